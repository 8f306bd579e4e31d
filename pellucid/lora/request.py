"""Adapters as users and requests name them, and what a folder tells of one without its numbers.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from pellucid.lora.content import content_of
from pellucid.lora.peft_config import read_config


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that a request runs with, as vLLM names its fields; the folder is one of peft's.

    lora_int_id is taken for compatibility: adapters are told apart by what their files hold.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter as it was when it was named: a folder that holds other numbers is another one."""

    name: str
    path: str
    content: str  # see content.py

    @classmethod
    def find(cls, request: LoRARequest, max_rank: int) -> Self:
        """Raises ValueError for a folder without an adapter, or with one of a kind or rank not served."""
        folder = Path(request.lora_path).expanduser()
        config = read_config(folder)
        if config.max_rank > max_rank:
            raise ValueError(
                f"adapter {request.lora_name!r} has rank {config.max_rank}, above max_lora_rank {max_rank}; "
                "start with a larger one"
            )
        return cls(request.lora_name, str(folder.resolve()), content_of(folder))

    def encode(self) -> str:
        """What a request carries: the content, which keys its KV (`Request.cache_key`), and the rest."""
        return f"{self.content} {msgspec.json.encode((self.name, self.path)).decode()}"

    @classmethod
    def decode(cls, text: str) -> AdapterRef:
        content, _, rest = text.partition(" ")
        name, path = msgspec.json.decode(rest, type=tuple[str, str])
        return cls(name, path, content)
