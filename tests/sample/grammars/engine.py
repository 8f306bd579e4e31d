"""An engine's grammars, without the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pellucid.config import SpeculativeConfig
from pellucid.features.grammar.host import Grammars


def grammars_of(vocab_size: int) -> Grammars:
    resolved: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(vocab_size=vocab_size), speculative=SpeculativeConfig(), num_spec=0
    )
    return Grammars(resolved)
