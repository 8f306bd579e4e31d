"""bitsandbytes' 4 bits: places in a table of 16 numbers (NF4 or FP4), blocks along the flattened matrix.

Options: "nf4" or "fp4", and "nested" (the blocks' scales are places in a table of 256 numbers themselves).
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from pellucid.quant.codes import LUT4, Codes, Group, Scales
from pellucid.quant.layouts.base import LayerFormat, Layout, MatrixShape, Raw, TensorSpec, checked, divided

BLOCK = 64  # weights
NESTED_BLOCK = 256  # scales
STATE = "weight.quant_state.bitsandbytes__"


class Bnb4(Layout):
    """weight [N K / 2, 1], weight.absmax [N K / block], weight.quant_map [16], and a state in JSON.

    The first of a byte's numbers is in its high half.
    """

    def params(self, format: LayerFormat, shape: MatrixShape) -> dict[str, TensorSpec]:
        count = shape.out * shape.inn
        blocks = -(-count // (format.group.inputs or BLOCK))
        floats, byte = (torch.float32,), (torch.uint8,)
        nested = "nested" in format.options
        specs = {
            "weight": TensorSpec(shape=(divided(count, 2, "weights"), 1), dtypes=byte),
            "weight.absmax": TensorSpec(shape=(blocks,), dtypes=byte if nested else floats),
            "weight.quant_map": TensorSpec(shape=(16,), dtypes=floats),
            state_name(format): TensorSpec(shape=(-1,), dtypes=byte),
        }
        if nested:
            outer = -(-blocks // NESTED_BLOCK)
            specs["weight.nested_absmax"] = TensorSpec(shape=(outer,), dtypes=floats)
            specs["weight.nested_quant_map"] = TensorSpec(shape=(256,), dtypes=floats)
        return specs

    def decode(self, raw: Raw, format: LayerFormat, shape: MatrixShape) -> Codes:
        # Some checkpoints hold the bytes as elements of a wider dtype.
        raw = {**raw, "weight": raw["weight"].reshape(-1).view(torch.uint8)} if "weight" in raw else raw
        found = checked(raw, self.params(format, shape))
        state = state_in(found[state_name(format)])
        block = int(state["blocksize"])
        low_first = found["weight"].flatten()
        q = torch.stack((low_first >> 4, low_first & 15), -1).reshape(shape.out, shape.inn)
        absmax = nested_scales(found, state) if "nested" in format.options else found["weight.absmax"]
        # A row need not begin with a block: groups are what rows and blocks have in common.
        group = math.gcd(block, shape.inn)
        scale = absmax.repeat_interleave(block // group)[: q.numel() // group].reshape(shape.out, -1)
        table = found["weight.quant_map"]
        return Codes(q=q, code=LUT4, group=Group(1, group), scale=Scales(scale), table=table)

    def encode(self, codes: Codes, format: LayerFormat) -> dict[str, Tensor]:
        """Rows of whole blocks, scales not nested."""
        assert codes.code == LUT4 and codes.scale is not None and codes.table is not None, codes.code
        q = codes.q.flatten().view(-1, 2)
        state = {
            "quant_type": "fp4" if "fp4" in format.options else "nf4",
            "blocksize": codes.group.inputs,
            "dtype": "bfloat16",
            "shape": list(codes.q.shape),
        }
        return {
            "weight": (q[:, :1] << 4 | q[:, 1:]),
            "weight.absmax": codes.scale.numbers().flatten(),
            "weight.quant_map": codes.table,
            state_name(format): torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }


def state_name(format: LayerFormat) -> str:
    return STATE + ("fp4" if "fp4" in format.options else "nf4")


def state_in(text: Tensor) -> dict[str, float]:
    """The numbers of a state.  Raises ValueError if it is no JSON, or has none."""
    try:
        state = {"nested_blocksize": NESTED_BLOCK, "nested_offset": 0.0, **json.loads(bytes(text.tolist()))}
        return {key: state[key] for key in ("blocksize", "nested_blocksize", "nested_offset")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"quant_state is damaged ({error!r}); download the checkpoint again") from error


def nested_scales(found: dict[str, Tensor], state: dict[str, float]) -> Tensor:
    """float32: the scales of blocks that are stored as places in a table, scaled in blocks of their own."""
    outer = found["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))
    values = found["weight.nested_quant_map"][found["weight.absmax"].int()]
    return values * outer[: len(values)] + state["nested_offset"]


BNB4 = Bnb4()
