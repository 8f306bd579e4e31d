"""Messages as bytes.

Plans and results, which travel every step, are msgpack, and a row takes about ten bytes.  The fields of the
types are the format, so a new field needs nothing here.  What is rare (calls, capacities, failures) is
pickled.  What a connector puts into `kv_meta` and `kv_done` travels with the name of its type: plain data, or
a dataclass with typed fields that can be imported.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from numbers import Integral, Real

import msgspec
from msgspec import Raw

from pellucid.registry import load_object
from pellucid.schedule.plan import Ints, StepPlan, StepResult, ints

Tagged = tuple[str, Raw]  # "module:Class", and an object of it
_PLAN, _RESULT, _OTHER = b"PRO"


def _plain(value: object) -> object:
    """Arrays as their bytes, and what users may hand in beside Python's own numbers: numpy's, for example."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which no message can carry")


def _array(_: type, packed: bytes) -> Ints:
    """The only type of ours that msgpack does not have."""
    return ints(packed)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_plan_decoder = msgspec.msgpack.Decoder(tuple[StepPlan, list[Tagged]], dec_hook=_array)
_result_decoder = msgspec.msgpack.Decoder(tuple[StepResult, list[Tagged]], dec_hook=_array)


def encode(message: object) -> bytes:
    """A message, with its kind as the first byte."""
    match message:
        case StepPlan():
            bare = replace(message, kv_meta=[]) if message.kv_meta else message
            return b"P" + _encoder.encode((bare, _tag(message.kv_meta)))
        case StepResult():
            bare = replace(message, kv_done=[]) if message.kv_done else message
            return b"R" + _encoder.encode((bare, _tag(message.kv_done)))
        case _:
            return b"O" + pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(packed: bytes) -> object:
    """The message that `encode` was given."""
    kind, body = packed[0], memoryview(packed)[1:]
    if kind == _PLAN:
        plan, kv_meta = _plan_decoder.decode(body)
        return replace(plan, kv_meta=_untag(kv_meta)) if kv_meta else plan
    if kind == _RESULT:
        result, kv_done = _result_decoder.decode(body)
        return replace(result, kv_done=_untag(kv_done)) if kv_done else result
    assert kind == _OTHER, f"a message of kind {kind}"
    return pickle.loads(body)


def _tag(items: Sequence[object]) -> list[Tagged]:
    return [(_path(type(item)), Raw(_encoder.encode(item))) for item in items]


def _untag(items: list[Tagged]) -> list[object]:
    return [_decoder(path).decode(raw) for path, raw in items]


@cache
def _path(cls: type) -> str:
    path = f"{cls.__module__}:{cls.__qualname__}"
    if "." in cls.__qualname__:
        raise TypeError(f"{path} cannot be imported by name; define the class in its module's top level")
    return path


@cache
def _decoder(path: str) -> msgspec.msgpack.Decoder[object]:
    return msgspec.msgpack.Decoder(load_object(path))
