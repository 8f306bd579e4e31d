"""Products with plain matrices, with bytes (FP8, INT8) and adapters; which kernel is whose."""
