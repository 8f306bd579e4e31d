"""How the layers of one model are quantized: as its checkpoint stores them, or while plain weights load.

What files hold is one thing (`schemes/`, `layouts/`), what a device multiplies another one (methods: fp8.py,
int8.py, packed.py, unquantized.py): here it is decided which method serves which stored format.  Formats that
no method serves as they are become plain weights when they are read (`weights/decoded.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pellucid.kernels.packed.packed_weight import LEAST_GROUP
from pellucid.native.library import serves
from pellucid.platform import Platform
from pellucid.quant.base import ExpertsMethod, LinearMethod, TableCodes
from pellucid.quant.codes import E2M1, E4M3, PLAIN, ROW, S8, WHOLE_MATRIX, Code
from pellucid.quant.experts import CodedExperts, PlainExperts
from pellucid.quant.fp8 import Fp8, Fp8Format
from pellucid.quant.int8 import Int8, Int8Format
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.online import ONLINE, online
from pellucid.quant.packed import Packed, refusal
from pellucid.quant.schemes import SCHEMES, rules_of, scheme_names
from pellucid.quant.schemes.base import Kind, Rules, StoredConfig
from pellucid.quant.unquantized import Unquantized

KEPT = "codes are kept for activations of 16 bits, on GPUs and by native code for CPUs"
Path = str  # of a matrix, such as "model.layers.0.mlp.up_proj"


class Quantization(Protocol):
    """Asked by the builder for every layer of a model."""

    def method(self, paths: tuple[Path, ...], kind: Kind) -> LinearMethod | None:
        """What the layer made of these matrices is in memory, and how it is applied.

        None says: do not merge these; each is then asked for alone, and then the answer must be a method.
        """
        ...

    def stored(self, path: Path, kind: Kind) -> LayerFormat | None:
        """How the checkpoint holds a matrix; None is plain."""
        ...

    def unit(self, path: Path, kind: Kind) -> int:
        """Inputs of a matrix, of which a rank's share must be whole ones."""
        ...

    def tied(self, path: Path, table: Path) -> LinearMethod | None:
        """The same for a head that shares the table of an embedding; Unquantized multiplies by that."""
        ...

    def embedding(self, path: Path, dim: int) -> TableCodes | None:
        """As what codes a table with rows of `dim` is kept; None: as plain numbers.

        Raises ValueError if rows are not whole groups.
        """
        ...

    def experts(self, gate_up: tuple[Path, ...], down: tuple[Path, ...]) -> ExpertsMethod:
        """How the experts of a layer are kept, of which these are all matrices."""
        ...


@dataclass(frozen=True, slots=True)
class AsStored(Quantization):
    """A quantized checkpoint.  served: codes that methods of their own multiply, where the model runs.

    packs: other codes stay codes, too.  device: where the model runs.
    """

    rules: Rules
    served: frozenset[Code] = frozenset()
    packs: bool = False
    device: str = "cuda"

    def method(self, paths: tuple[Path, ...], kind: Kind) -> LinearMethod | None:
        kept = {self._kept(self.stored(path, kind)) for path in paths}
        if len(kept) > 1:
            return None
        match kept.pop():
            case None:
                return Unquantized(self._why(self.stored(paths[0], kind)))
            case Fp8Format() as native:
                return Fp8(native)
            case Int8Format() as native:
                return Int8(native)
            case LayerFormat() as format:
                # Each matrix may have its inputs in an order of its own.
                return None if "act_order" in format.options and len(paths) > 1 else Packed(format)

    def _kept(self, format: LayerFormat | None) -> Fp8Format | Int8Format | LayerFormat | None:
        """As what a device holds a matrix; None is plain."""
        if format is None:
            return None
        native = native_format(format, self.device) if format.code in self.served else None
        if native is None and self.packs and refusal(format) is None:
            return format
        return native

    def _why(self, format: LayerFormat | None) -> str:
        """Why codes are decoded; of plain weights nothing."""
        if format is None or format.code == PLAIN:
            return ""
        if self.packs:
            return refusal(format) or ""
        return KEPT

    def stored(self, path: Path, kind: Kind) -> LayerFormat | None:
        return self.rules.format_of(path, kind)

    def unit(self, path: Path, kind: Kind) -> int:
        format = self.stored(path, kind)
        if format is None or format.code == PLAIN or not format.group.inputs:
            return 1
        return format.group.inputs if format.code == E2M1 else math.gcd(format.group.inputs, LEAST_GROUP)

    def tied(self, path: Path, table: Path) -> LinearMethod | None:
        return Unquantized()

    def embedding(self, path: Path, dim: int) -> TableCodes | None:
        return None

    def experts(self, gate_up: tuple[Path, ...], down: tuple[Path, ...]) -> ExpertsMethod:
        kinds = [{self.stored(path, "experts") for path in paths} for paths in (gate_up, down)]
        formats = [kind.pop() for kind in kinds if len(kind) == 1]
        if len(formats) < len(kinds):
            return PlainExperts("experts of a layer are stored in several ways", self.device)
        for format in formats:
            if format is None or format.code == PLAIN:
                return PlainExperts(device=self.device)
            if not self.packs:
                return PlainExperts(KEPT, self.device)
            if (why := refusal(format)) is not None:
                return PlainExperts(why, self.device)
        up, last = formats
        assert up is not None and last is not None
        return CodedExperts(lambda _: up, lambda _: last, is_stored=True, device=self.device)


def choose_quantization(
    stored: StoredConfig, asked: str | Mapping[str, object] | None, platform: Platform, dtype: torch.dtype
) -> Quantization:
    """How a checkpoint's layers are quantized.

    dtype: of activations.  asked: what the user insists on: the checkpoint's own dialect, or a way to
    quantize plain weights as they load, or one for each kind of layers (`online.py`).  Raises ValueError,
    naming the value, the reason and the way out, for what is not served.
    """
    name = asked if asked is None or isinstance(asked, str) else "a mapping"
    rules, packs = rules_of(stored, name), packs_codes(platform, dtype)
    if rules is not None:
        return AsStored(rules, served_codes(platform, dtype), packs, platform.device)
    found = online(asked, platform.device, packs=packs)
    if found is not None:
        return found
    known = ", ".join(ONLINE)
    if name is not None and scheme_names(name)[0] in SCHEMES:
        raise ValueError(
            f"quantization is {name!r}, but the checkpoint is plain; leave quantization out, or use one that "
            f"plain weights can be given while they load: {known}"
        )
    raise ValueError(f"unknown quantization {name!r} (known for plain weights: {known})")


def served_codes(platform: Platform, dtype: torch.dtype) -> frozenset[Code]:
    """What is multiplied as it is stored; in float32 nothing is, for there results are to be exact."""
    if dtype.itemsize > 2:
        return frozenset()
    return frozenset({S8, E4M3} if platform.device == "cuda" else {S8})


def packs_codes(platform: Platform, dtype: torch.dtype) -> bool:
    """Whether codes of all kinds are kept and multiplied: by kernels, or by native code."""
    return serves(dtype) if platform.device == "cpu" else dtype.itemsize == 2


def native_format(format: LayerFormat, device: str) -> Fp8Format | Int8Format | None:
    """What serves these codes as they are stored; None is nothing."""
    if format.layout not in ("scaled", "fp8-blocks"):
        return None
    if format.code == S8 and format.layout == "scaled" and format.group in (ROW, WHOLE_MATRIX):
        return int8_format(format, device)
    if format.code != E4M3 or format.act.type != "e4m3":
        return None
    rows, inputs = format.group
    is_blocks = rows > 1 and inputs > 0
    if (
        not is_blocks
        and format.group not in (ROW, WHOLE_MATRIX)
        or format.act.group != (inputs if is_blocks else 0)
    ):
        return None
    return Fp8Format(
        activations="static" if format.act.static else "dynamic",
        block=(rows, inputs) if is_blocks else None,
        scale_name="weight_scale_inv" if format.layout == "fp8-blocks" else "weight_scale",
    )


def int8_format(format: LayerFormat, device: str) -> Int8Format | None:
    """The same of INT8 with scales of rows.  A GPU keeps packed what it does not multiply with integers."""
    act = format.act
    if "asym" in format.options or not act.symmetric:
        return None
    if device == "cpu":
        return Int8Format()
    if act.type != "s8" or act.group:
        return None
    return Int8Format("static" if act.static else "dynamic")
