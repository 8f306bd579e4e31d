"""All that members and their owners say to each other, as msgpack: the fields of the types are the format.

A *member* is a process that serves another one, its *owner*: a worker serves an engine, an engine the front.
Plans and results travel every step; a row takes about four bytes.  What features add to them and say out of
turn, and what a call is given and answers, travels with the name of its type: plain data, or a dataclass with
typed fields that can be imported.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast, get_type_hints

import msgspec
import numpy as np
from msgspec import Raw
from msgspec.structs import replace

from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import Frame
from pellucid.registry import load_object
from pellucid.schedule.plan import Ints, StepPlan, StepResult, ints
from pellucid.types import Request, SeqUpdate

Tagged = tuple[str, Raw]  # "module:Class", and an object of it; "" for plain data

# A SeqUpdate without the names of its fields, which `SeqUpdate(*packed)` is: most of the traffic.
pack = attrgetter(*(f.name for f in fields(SeqUpdate)))
if TYPE_CHECKING:
    Packed = tuple[Any, ...]
else:
    Packed = tuple[tuple(get_type_hints(SeqUpdate).values())]


class _Message(msgspec.Struct, tag=True, array_like=True):
    """Its name, and its fields in order."""


# Of every member


class Start(_Message):
    """To a member, before all else: what it is to do."""

    life: str  # "module:function" of (desk, work)
    work: Tagged
    log_level: int
    additions: dict[str, dict[str, str]]  # what the owner's code has registered: see registry.py


class Ready(_Message):
    """From a member that has begun to serve."""

    facts: Tagged  # what its owner is to know


class Stop(_Message):
    """To a member: leave."""


class Failed(_Message):
    """From a member's last breath, or about it."""

    message: str
    is_echo: bool = False  # another member's failure is the cause
    is_users: bool = False  # a ValueError: the user can mend it
    is_lost: bool = False  # it was killed, or says nothing


# Of workers


class Meet(_Message):
    """From rank 0, and then to the others: the port on its node at which all ranks meet."""

    port: int


class Plan(_Message):
    """To a worker: a step."""

    plan: StepPlan  # but for `ride`
    ride: dict[str, Tagged]

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        if not plan.ride:
            return cls(plan, {})
        return cls(replace(plan, ride={}), all_tagged(plan.ride))

    def whole(self) -> StepPlan:
        return replace(self.plan, ride=all_untagged(self.ride)) if self.ride else self.plan


class Late(_Message):
    """To a worker, behind an open plan and before any other: the rest, by feature."""

    parts: dict[str, Tagged]

    @classmethod
    def of(cls, late: Mapping[str, object]) -> Self:
        return cls(all_tagged(late))

    def whole(self) -> dict[str, object]:
        return all_untagged(self.parts)


class Result(_Message):
    """From the worker that reports: what a plan yielded."""

    result: StepResult  # but for `told`
    told: dict[str, Tagged]

    @classmethod
    def of(cls, result: StepResult) -> Self:
        if not result.told:
            return cls(result, {})
        return cls(replace(result, told={}), all_tagged(result.told))

    def whole(self) -> StepResult:
        return replace(self.result, told=all_untagged(self.told)) if self.told else self.result


class Said(_Message):
    """From any worker, out of turn: a feature's half to the one beside the scheduler."""

    name: str
    said: Tagged


class Call(_Message):
    """To a worker: run this method."""

    name: str
    args: list[Tagged]


class Answer(_Message):
    """To a call."""

    value: Tagged


# Of engines


class Add(_Message):
    """A request, encoded by itself, so that one which cannot be read harms no other."""

    request_id: str
    request: Raw

    @classmethod
    def of(cls, request: Request) -> Self:
        """Raises TypeError, ValueError or OverflowError for what cannot be sent."""
        return cls(request.id, Raw(_encode_request(request)))


class Abort(_Message):
    """End this request early."""

    request_id: str


class ClearPrefixCache(_Message):
    """Forget all cached prefixes."""


class Watch(_Message):
    """Send views of what the engine does, from the beginning, or no more."""

    is_on: bool


class Pause(_Message):
    """Plan no more steps, or go on."""

    is_on: bool


class Sleep(_Message):
    """Give memory away."""

    level: int


class WakeUp(_Message):
    """Take it back."""

    tags: tuple[str, ...]


Order = Add | Abort | ClearPrefixCache | Watch | Pause | Sleep | WakeUp


class Orders(_Message):
    """To an engine: to be followed before the next turn of its loop."""

    orders: list[Order]


class Turn(_Message):
    """From an engine: where it stands after a turn of its loop."""

    updates: list[Packed]
    stats: EngineStats
    num_heard: int  # `Orders` that it has read
    has_work: bool
    error: str | None  # why it answers every request with an error
    # Requests of which there is nothing to tell but tokens: [B] names, [B] numbers and [B, w] tokens.
    going: list[str] = []
    num_new: Ints = msgspec.field(default_factory=ints)
    tokens: Ints = msgspec.field(default_factory=ints)
    is_lost: bool = False  # the error: workers were killed, or say nothing


class View(_Message):
    """From an engine that is watched."""

    frame: Frame


Message = (
    Start | Ready | Stop | Failed | Meet | Plan | Late | Result | Said | Call | Answer | Orders | Turn | View
)  # fmt: skip


def encode(message: Message) -> bytes:
    return _encode(message)


def decode(frame: bytes) -> Message:
    """The message that `encode` was given."""
    return _decode(frame)


def tagged(value: object) -> Tagged:
    """Any data, with what it takes to read it.  Raises TypeError for a class that cannot be imported."""
    return _path(type(value)), Raw(_encode(value))


def untagged(tagged: Tagged) -> object:
    path, raw = tagged
    return _decoder(path).decode(raw)


def all_tagged(values: Mapping[str, object]) -> dict[str, Tagged]:
    return {name: tagged(value) for name, value in values.items()}


def all_untagged(values: Mapping[str, Tagged]) -> dict[str, object]:
    return {name: untagged(value) for name, value in values.items()}


def _plain(value: object) -> object:
    """What msgpack does not have, and what users may hand in beside Python's own numbers and lists."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, np.ndarray):
        matrix = cast("np.ndarray[Any, np.dtype[Any]]", value)
        if matrix.dtype.kind not in "iub":
            raise TypeError(f"an array of {matrix.dtype} cannot travel; send its bytes")
        return matrix.astype(np.int32).tobytes()
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Iterable):
        return list(cast("Iterable[object]", value))
    raise TypeError(f"{value!r} is a {type(value).__name__}, which no message can carry")


def _listed(value: object) -> object:
    """The same in requests, whose lists users have made of whatever they had."""
    return cast("list[object]", value.tolist()) if isinstance(value, array | np.ndarray) else _plain(value)


def _made(kind: type, plain: object) -> object:
    """The types of ours that msgpack does not have; `object` is whatever came.

    Arrays travel with 32 bits an item.
    """
    if kind is object:
        return plain
    if kind is np.ndarray:
        return np.frombuffer(cast(bytes, plain), dtype=np.int32).astype(np.int64)
    return Path(cast(str, plain)) if issubclass(kind, Path) else ints(cast(bytes, plain))


_PLAIN = {type(None), bool, int, float, str, bytes, list, tuple, dict, set}
_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_encode_request = msgspec.msgpack.Encoder(enc_hook=_listed).encode
_decode = msgspec.msgpack.Decoder(Message, dec_hook=_made).decode
decode_request = msgspec.msgpack.Decoder(Request, strict=False).decode  # 1 may stand for True


@cache
def _path(cls: type) -> str:
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls in _PLAIN:
        return ""
    if "." in cls.__qualname__:
        raise TypeError(f"{path} cannot be imported by name; define the class in its module's top level")
    return path


@cache
def _decoder(path: str) -> msgspec.msgpack.Decoder[object]:
    return msgspec.msgpack.Decoder(load_object(path) if path else object, dec_hook=_made)
