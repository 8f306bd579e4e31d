"""What is compiled, by whom, and what was compiled too late."""
