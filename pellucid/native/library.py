"""The symbols of `cpu.cpp`, as Python calls them: addresses of tensors, which must stay where they are."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import CDLL, POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum, IntFlag
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pellucid.native.build import build
from pellucid.platform import CORES

logger = logging.getLogger(__name__)
TYPES = {torch.bfloat16: 0, torch.float16: 1}  # of activations
GATES = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}  # by the kernels' names


class Code(IntEnum):
    """What a matrix is made of: see `Matrix` in cpu.cpp."""

    BF16 = 0
    BYTES = 1
    NIBBLES = 2
    MAPPED = 3
    TABLE = 4
    E4M3 = 5
    E5M2 = 6


class Ability(IntFlag):
    """What the CPU has that was compiled for."""

    BF16 = 1
    VNNI = 2
    AMX = 4


class MatrixFields(Structure):
    """`Matrix` of cpu.cpp."""

    _fields_ = (
        ("words", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("rows", c_void_p),
        ("bias", c_void_p),
        ("table", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("num_used", c_int64),
        ("stored", c_int64),
        ("group", c_int64),
        ("scale_unit", c_float),
        ("offset_unit", c_float),
        ("code", c_int32),
        ("middle", c_int32),
        ("type", c_int32),
        ("gated", c_int32),
    )


class GatingFields(Structure):
    """`Gating` of cpu.cpp."""

    _fields_ = (("act", c_int32), ("limit", c_float), ("alpha", c_float))


class MixtureFields(Structure):
    """`Mixture` of cpu.cpp."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("num", c_int64),
        ("top_k", c_int64),
        ("hidden", c_int64),
        ("dim", c_int64),
        ("gate", GatingFields),
        ("weighs_input", c_int32),
        ("type", c_int32),
    )


class HeadsFields(Structure):
    """`Heads` of cpu.cpp."""

    _fields_ = (
        ("cache", c_void_p),
        ("rope", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("is_wide", c_int32),
        ("type", c_int32),
        ("interleaved", c_int32),
        ("num", c_int64),
        ("num_kv", c_int64),
        ("dim", c_int64),
        ("rotary", c_int64),
        ("block_size", c_int64),
    )


ARGUMENTS: dict[str, tuple[object, ...]] = {
    "panels": (c_void_p, c_void_p, c_int64, c_int64),
    "product": (POINTER(MatrixFields), c_void_p, c_void_p, c_int64, c_int32),
    "mix": (POINTER(MixtureFields), *[c_void_p] * 7, c_int64),
    "add_norm": (*[c_void_p] * 4, c_int64, c_int64, c_float, c_int32, c_int32),
    "gate": (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32),
    "highest": (c_void_p, c_void_p, c_int64, c_int64, c_int32),
    "attend": (POINTER(HeadsFields), *[c_void_p] * 5, c_int64, c_void_p, c_int64, c_void_p, c_int64),
}


class Library:
    """What has been compiled.  Callers keep what they pass contiguous, and alive."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        code = CDLL(str(path))
        for name, arguments in ARGUMENTS.items():
            function = getattr(code, f"pellucid_{name}")
            function.argtypes, function.restype = arguments, None
        self.lanes = int(code.pellucid_lanes())
        self.abilities = Ability(code.pellucid_features())
        is_pinned = os.environ.get("OMP_PROC_BIND", "false") != "false"  # the caller's thread is, too
        cpus = [min(core) for core in CORES] if is_pinned else []
        code.pellucid_cpus((c_int32 * len(cpus))(*cpus), c_int64(len(cpus)))
        self.panels, self.product = code.pellucid_panels, code.pellucid_product
        self.mix = code.pellucid_mix
        self.add_norm, self.gate = code.pellucid_add_norm, code.pellucid_gate
        self.highest = code.pellucid_highest
        self.attend = code.pellucid_attend

    def __str__(self) -> str:
        named = [ability.name for ability in Ability if ability in self.abilities and ability.name]
        return f"vectors of {32 * self.lanes} bits{''.join(f', {name}' for name in named)}"


@cache
def library() -> Library | None:
    """The one of this process, compiled if need be; None: torch has to do."""
    path = build()
    if path is None:
        return None
    try:
        found = Library(path)
    except (OSError, AttributeError) as error:
        logger.warning("no native code, which makes a CPU slower: %s", error)
        return None
    logger.info("native code for CPUs: %s", found)
    return found


def serves(dtype: torch.dtype) -> bool:
    """Whether native code computes with activations of `dtype` here; float32 is torch's, and exact."""
    return dtype in TYPES and library() is not None


def address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous(), tensor.stride()
    return None if tensor is None else tensor.data_ptr()


def pointer(fields: Structure) -> object:
    """What passes a structure; the structure must stay alive."""
    return ctypes.pointer(fields)
