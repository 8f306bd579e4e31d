"""Codes that stay packed: how they lie, and products that unpack them in registers."""
