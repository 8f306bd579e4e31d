"""torchao's dialect: the headers of safetensors say of each weight which of torchao's classes holds it.

Neither torchao nor config.json is asked; older files, pickled objects of such classes, need torchao to be
read.
"""

from __future__ import annotations

import json

from pellucid.quant.codes import E4M3, S8, WHOLE_MATRIX, Code, Group
from pellucid.quant.layouts.base import PLAIN_ACT, ActFormat, LayerFormat
from pellucid.quant.schemes.base import (
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    exact,
    refusal,
)

CODES: dict[str, Code] = {"Int8Tensor": S8, "IntxUnpackedToInt8Tensor": S8, "Float8Tensor": E4M3}
PLAIN = "Tensor"
WAY_OUT = "save it as one of these, or in another format such as compressed-tensors"


class TorchAoScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        rules: list[Rule] = []
        for name, text in stored.metadata.items():
            if not name.endswith(".weight"):
                continue
            matrix = name.removesuffix(".weight")
            entry = Options.of(json.loads(str(text)), f"{name} in the metadata")
            if entry.text("_type") != PLAIN:
                rules.append(Rule(exact(matrix), format_of(matrix, entry, stored)))
        if not rules:
            raise refusal(
                "torchao's objects in pickles",
                "headers of safetensors tell their form",
                "save it as safetensors",
            )
        return Rules(tuple(rules))


def format_of(matrix: str, entry: Options, stored: StoredConfig) -> LayerFormat:
    type, data = entry.text("_type"), entry.part("_data")
    if type not in CODES:
        raise refusal(f"torchao's {type}", f"there are {', '.join(CODES)}", WAY_OUT)
    if type == "Float8Tensor" and data.text("float8_dtype", default="float8_e4m3fn") != "float8_e4m3fn":
        raise refusal(f"torchao's {data.get('float8_dtype')}", "there is float8_e4m3fn", WAY_OUT)
    qdata = f"{matrix}._weight_qdata"
    if qdata not in stored.tensors:
        raise refusal(f"torchao's {type} without {qdata}", "older versions name tensors otherwise", WAY_OUT)
    shape = stored.tensors[qdata].shape
    return LayerFormat(
        layout="torchao",
        code=CODES[type],
        group=group_of(data, shape),
        act=act_of(data, CODES[type]),
        options=frozenset({"asym"}) if CODES[type] == S8 else frozenset(),
    )


def group_of(data: Options, shape: tuple[int, ...]) -> Group:
    match data.get("block_size"):
        case [int(rows), int(inputs)] if (rows, inputs) == shape:
            return WHOLE_MATRIX
        case [int(rows), int(inputs)]:
            return Group(0 if rows == shape[0] else rows, 0 if inputs == shape[1] else inputs)
        case other:
            raise ValueError(f"block_size in {data.where} is {other!r}, must be two numbers")


def act_of(data: Options, code: Code) -> ActFormat:
    """Activations, where they are rounded as each row comes."""
    kind = data.text("activation_quantization")
    if kind == "int8_asym_per_token":
        return ActFormat(type="s8", symmetric=False)
    if kind:
        known = "there are plain ones, rows of int8 with zeros or without, and rows of float8"
        raise refusal(f"activations by torchao's {kind!r}", known, WAY_OUT)
    return ActFormat(type="s8" if code == S8 else "e4m3") if data.has("act_quant_kwargs") else PLAIN_ACT
