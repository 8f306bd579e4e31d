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

ANY_TOKEN = -1  # a word of a mask in which every token may come


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A language, as a request names it."""

    kind: str  # one of types.STRUCTURES
    text: str = ""  # a JSON schema, a regular expression, choices as a JSON list, EBNF, a structural tag


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRef:
    """A language that has been checked, and where it is held in its compiled form."""

    address: str  # of the grammar server, a Unix socket
    digest: str  # of the language
    # The tokens that thinking begins and ends with, behind which the language holds.  The first is None if
    # the prompt has begun it.
    thinking: tuple[int | None, int] | None = None

    def encode(self) -> str:
        """As `Request.grammar` carries it."""
        return json.dumps([self.address, self.digest, self.thinking])

    @classmethod
    def decode(cls, encoded: str) -> Self:
        address, digest, thinking = json.loads(encoded)
        thinking = None if thinking is None else tuple(thinking)
        return cls(address=address, digest=digest, thinking=thinking)


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
    def forced(self) -> bytes:
        """How the text must go on, as far as that is known.  Cheap, where masks may not be."""
        ...

    @property
    def is_done(self) -> bool:
        """Has a stop token been accepted, so that nothing may come?"""
        ...


class CompiledGrammar(Protocol):
    """A language over a model's tokens."""

    num_bytes: int  # of memory

    def start(self) -> Matcher:
        """A matcher for a text that has not begun."""
        ...


class GrammarBackend(Protocol):
    """One file a library; made for one model's tokens, in a process that forks for every language."""

    def __init__(self, spelling: Spelling) -> None: ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """May take long, without Python's lock.  Raises ValueError, in words, for what is no language."""
        ...


GRAMMARS: Registry[type[GrammarBackend]] = Registry(
    "grammar backend", {"xgrammar": "pellucid.sample.grammars.xgrammar:XGrammarBackend"}
)
BACKEND = "xgrammar"
