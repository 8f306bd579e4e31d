"""The cache, and attention over it: decodes, prompts, latents, and what brings keys there."""
