"""What an engine knows of a model's tokens as text: only what its grammars need."""

from __future__ import annotations

from pathlib import Path

from pellucid.resolve import Resolved
from pellucid.sample.grammars.base import Spelling
from pellucid.sample.grammars.host import Grammars
from pellucid.text.tokenizer import Tokenizer


def make_grammars(resolved: Resolved) -> Grammars | None:
    """The host's side of constrained decoding; None for a model without a tokenizer."""
    folder, vocab_size = resolved.checkpoint.tokenizer_path, resolved.checkpoint.vocab_size
    if folder is None:
        return None
    return Grammars(lambda: spelling_of(resolved, Tokenizer.load(Path(folder))), vocab_size=vocab_size)


def spelling_of(resolved: Resolved, tokenizer: Tokenizer) -> Spelling:
    """The model's tokens as bytes."""
    vocab_size = resolved.checkpoint.vocab_size
    return Spelling(
        token_bytes=tokenizer.spell_all()[:vocab_size],
        vocab_size=vocab_size,
        stop_token_ids=eos_token_ids(resolved, tokenizer),
    )


def eos_token_ids(resolved: Resolved, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What ends a text: config.json, generation_config.json and the tokenizer each may name tokens.

    Some name one that the model has no logit for, as -1, or a tokenizer's that was added later.
    """
    own, vocab_size = resolved.checkpoint.eos_token_ids, resolved.checkpoint.vocab_size
    named = None if tokenizer is None else tokenizer.eos_token_id
    all_named = own if named is None or named in own else (*own, named)
    return tuple(token for token in all_named if 0 <= token < vocab_size)
