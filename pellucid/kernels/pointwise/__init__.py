"""Norms, gates and tables of embeddings."""
