"""Speculation: proposers that guess tokens, and one verifier that keeps the output the target's own."""
