"""Where weights come from: files and their headers, as tensors by the model's names."""
