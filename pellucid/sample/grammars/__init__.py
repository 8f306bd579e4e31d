"""Grammars on the host: what may come next in a text, token by token."""
