"""ggml's blocks, as GGUF files hold them: a row is blocks of 32 or 256 inputs, each with its scales.

`types` has all names, numbers and sizes; `legacy`, `k_quants`, `i_quants` and `floats` say what the bytes
mean.
"""
