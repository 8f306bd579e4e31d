"""Speculation: proposers guess tokens, a verifier judges them; `strict`, the default, keeps the output.

Of the others `standard` keeps its distribution, and of greedy requests the text; `synthetic` keeps neither.
"""
