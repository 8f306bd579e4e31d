"""The door for grammars: a text that describes a language becomes masks over the next token.

On the host alone, and without torch.  Legend: V vocab, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from pellucid.registry import Registry

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A language, as a request names it."""

    kind: str  # one of KINDS
    text: str = ""  # a JSON schema, a regular expression, a JSON list of choices, EBNF, or a structural tag
    begins_after: int | None = None  # the token behind which it holds; None: from the first one on

    def encode(self) -> str:
        """As `Request.grammar` carries it; equal specs are equal texts."""
        return json.dumps([self.kind, self.text, self.begins_after])

    @classmethod
    def decode(cls, encoded: str) -> Self:
        return cls(*json.loads(encoded))

    @property
    def language(self) -> Self:
        """The same from the first token on: what there is to compile."""
        return type(self)(self.kind, self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """A model's tokens as bytes."""

    token_bytes: Sequence[bytes]  # of token 0, 1, ..; empty for a token that is no text
    vocab_size: int  # V; the model's may be padded
    stop_token_ids: tuple[int, ...]  # may come where a text is complete

    @property
    def num_words(self) -> int:
        return -(-self.vocab_size // 32)


class Matcher(Protocol):
    """Where a text stands in its language."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing has changed, if it may not come."""
        ...

    def fill(self, masks: np.ndarray, place: int) -> None:
        """Write which tokens may come into masks[place]; masks: [n, W] int32.  Not called when done."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the tokens accepted last."""
        ...

    @property
    def is_done(self) -> bool:
        """Has a stop token been accepted, so that nothing may come?"""
        ...


class CompiledGrammar(Protocol):
    """A language over a model's tokens."""

    num_bytes: int

    def start(self) -> Matcher:
        """A matcher for a text that has not begun."""
        ...


class GrammarBackend(Protocol):
    """One file a library; made for one model's tokens.  Any thread may call it."""

    def __init__(self, spelling: Spelling) -> None: ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """May take long, without Python's lock.  Raises ValueError, in words, for what is no language."""
        ...


GRAMMARS: Registry[type[GrammarBackend]] = Registry(
    "grammar backend", {"xgrammar": "pellucid.sample.grammars.xgrammar:XGrammarBackend"}
)
BACKEND = "xgrammar"
