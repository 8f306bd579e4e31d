"""What a request says of KV at another engine: vLLM's `kv_transfer_params`, so that its proxies fit."""

from __future__ import annotations

from typing import Self

import msgspec


class KVParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """As JSON in `Request.kv_transfer`, and in requests and answers of servers.

    An engine with `do_remote_decode` keeps what it computes for another one, which is then given
    `do_remote_prefill` and where to ask.  remote_block_ids: one for each full block of the prompt; their
    numbers are the lender's own affair.  remote_seal: see trust.py.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[int] | None = None
    tp_size: int | None = None
    remote_seal: str | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Is there an address at which engines of other nodes ask?"""
        return self.remote_host is not None and self.remote_port is not None

    @classmethod
    def of(cls, encoded: str | None) -> Self:
        """Raises msgspec.ValidationError for what is none."""
        return cls() if encoded is None else msgspec.json.decode(encoded, type=cls)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()
