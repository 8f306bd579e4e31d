"""What ranks of one host send each other."""
