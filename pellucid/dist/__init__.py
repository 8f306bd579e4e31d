"""Several devices as one: the grid of ranks, and what they say to each other."""
