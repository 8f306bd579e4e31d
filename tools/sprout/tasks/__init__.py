"""The task generators: each module draws random items (or texts) of one ability from a `random.Random`."""
