"""From logits to tokens: noise, masks, draws, and drafts that are taken or not."""
