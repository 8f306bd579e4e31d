"""LoRA adapters (Hu et al. 2021): their files, how requests name them, their banks beside linear layers."""
