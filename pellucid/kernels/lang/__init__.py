"""What kernels are written with: Triton's language, and launches that follow each other."""
