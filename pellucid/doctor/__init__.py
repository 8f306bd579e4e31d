"""What a machine is, and what keeps an engine from running well on it: `pellucid doctor`."""
