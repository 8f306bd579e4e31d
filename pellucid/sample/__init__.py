"""From logits to tokens: per-slot parameters, edits, filters, noise, logprobs.  Knows nothing of text."""
