"""The client of `pellucid bench serve`: it loads an OpenAI-compatible server and counts what comes back."""
