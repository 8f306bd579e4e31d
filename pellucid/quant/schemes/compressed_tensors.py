"""compressed-tensors' dialect: groups of layers, each with what its weights and its activations are."""

from __future__ import annotations

import re
from dataclasses import replace

from pellucid.quant.codes import E2M1, E4M3, PLAIN, ROW, S8, U2, U3, U4, U5, U6, WHOLE_MATRIX, Code, Group
from pellucid.quant.layouts.base import PLAIN_ACT, ActFormat, ActType, LayerFormat
from pellucid.quant.schemes.base import (
    EVERY_KIND,
    EVERYTHING,
    WITH_HEAD,
    Kinds,
    Options,
    QuantScheme,
    Rule,
    Rules,
    StoredConfig,
    exact,
    refusal,
    regex,
)

CLASSES: dict[str, Kinds] = {"Linear": WITH_HEAD, "Embedding": frozenset({"embedding"})}
INTEGERS = {2: U2, 3: U3, 4: U4, 5: U5, 6: U6, 7: S8, 8: S8}
LAYOUTS = {
    "pack-quantized": "ct-pack",
    "int-quantized": "scaled",
    "float-quantized": "scaled",
    "naive-quantized": "scaled",
    "mxfp8-quantized": "scaled",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp6-pack-quantized": "mxfp6",
    "marlin-24": "marlin24",
}
ACT_TYPES: dict[tuple[str, int], ActType] = {
    ("float", 8): "e4m3",
    ("int", 8): "s8",
    ("float", 6): "e2m3",
    ("float", 4): "e2m1",
}
DENSE_SINCE = (0, 18)  # the version from which on words are packed without gaps
SPARSE = "sparse-24-bitmask"
WAY_OUT = "decompress it with compressed-tensors, or use another checkpoint"


class CompressedTensorsScheme(QuantScheme):
    def rules(self, stored: StoredConfig, options: Options) -> Rules:
        if options.has("transform_config"):
            raise refusal("transform_config", "weights are rotated against activations", WAY_OUT)
        sparse = is_sparse(options)
        ignored = [rule for name in options.names("ignore") for rule in rules_of(name, None)]
        groups = options.parts("config_groups")
        if not groups and not sparse and not options.has("kv_cache_scheme"):
            raise refusal("no config_groups", "nothing says how layers are stored", WAY_OUT)
        rules: list[Rule] = []
        for group in groups.values():
            format = format_of(group, options)
            if sparse and format and format.layout == "scaled":
                format = replace(format, layout="bitmask")
            rules += [rule for name in group.names("targets") for rule in rules_of(name, format)]
        if sparse and not groups:
            rules += rules_of("Linear", LayerFormat(layout="bitmask", code=PLAIN))
        # A layer's own name goes before regular expressions, and these before classes.
        rules.sort(key=lambda rule: (rule.kinds != EVERY_KIND, rule.pattern.pattern.startswith("(?:")))
        return Rules((*ignored, *rules))


def rules_of(target: str, format: LayerFormat | None) -> list[Rule]:
    """What a target means: layers by a regex behind `re:`, by their class, or one by its name."""
    if target.startswith("re:"):
        return [Rule(regex(target.removeprefix("re:")), format)]
    if target in CLASSES:
        return [Rule(EVERYTHING, format, CLASSES[target])]
    return [Rule(exact(target), format)]


def is_sparse(options: Options) -> bool:
    """Whether layers are stored by bitmasks of 2:4."""
    sparsity = options.part("sparsity_config")
    form = sparsity.text("format", default="dense")
    if form not in ("dense", SPARSE):
        raise refusal(f"sparsity of format {form!r}", f"there is {SPARSE}", WAY_OUT)
    if form == "dense":
        return False
    if options.has("config_groups") and set(sparsity.names("ignore")) != set(options.names("ignore")):
        raise refusal("layers sparse or quantized, but not both", "their lists must agree", WAY_OUT)
    return True


def format_of(group: Options, options: Options) -> LayerFormat | None:
    """How a group's layers are stored; None is plain."""
    form = group.text("format", default=options.text("format"))
    if form == "dense":
        return None
    if form not in LAYOUTS:
        raise refusal(f"format {form!r}", f"there are {', '.join(LAYOUTS)}", WAY_OUT)
    weights = group.part("weights")
    bits, is_float = weights.number("num_bits"), weights.text("type", default="int") == "float"
    code = code_of(form, bits, is_float=is_float)
    act = PLAIN_ACT
    if group.has("input_activations"):
        act = act_of(group.part("input_activations"))
    found = set[str]()
    if not weights.flag("symmetric", default=True):
        if is_float or form == "marlin-24":
            raise refusal(f"{form} weights with zero points", "only integers have them", WAY_OUT)
        found.add("asym")
    if form == "pack-quantized":
        found |= pack_options(weights, bits, options.text("version"))
    return LayerFormat(
        layout=LAYOUTS[form], code=code, group=group_of(weights), act=act, options=frozenset(found)
    )


def code_of(form: str, bits: int, *, is_float: bool) -> Code:
    match form:
        case "pack-quantized" if bits in INTEGERS and not is_float:
            return INTEGERS[bits]
        case "int-quantized" | "naive-quantized" if 2 <= bits <= 8 and not is_float:
            return S8
        case "float-quantized" | "naive-quantized" | "mxfp8-quantized" if bits == 8 and is_float:
            return E4M3
        case "nvfp4-pack-quantized" | "mxfp4-pack-quantized" if bits == 4 and is_float:
            return E2M1
        case "mxfp6-pack-quantized" if bits == 6 and is_float:
            return S8  # of eighths
        case "marlin-24" if bits in (4, 8) and not is_float:
            return INTEGERS[bits]
    kind = "floats" if is_float else "integers"
    raise refusal(f"{form} of {kind} of {bits} bits", "that format has no such weights", WAY_OUT)


def pack_options(weights: Options, bits: int, version: str) -> set[str]:
    found = {"7_bits"} if bits == 7 else set[str]()
    if weights.get("actorder") in ("group", "dynamic", True):
        found.add("act_order")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if bits in (3, 5, 6, 7) and numbers and (int(numbers[1]), int(numbers[2])) < DENSE_SINCE:
        found.add("padded")
    return found


def group_of(weights: Options) -> Group:
    match weights.text("strategy", default="tensor"), weights.get("group_size"):
        case "tensor", _:
            return WHOLE_MATRIX
        case "channel", _:
            return ROW
        case (("group" | "tensor_group"), int(inputs)):
            return Group(1, max(0, inputs))
        case "block", _:
            match weights.get("block_structure"):
                case [int(rows), int(inputs)]:
                    return Group(rows, inputs)
                case str() as block if re.fullmatch(r"\d+x\d+", block):  # as older versions have it
                    return Group(*map(int, block.split("x")))
    found = f"weight scales by {weights.get('strategy')!r} with group_size {weights.get('group_size')!r}"
    raise refusal(found, "there are tensor, channel, group, tensor_group and block", WAY_OUT)


def act_of(act: Options) -> ActFormat:
    """How activations are rounded."""
    bits, kind = act.number("num_bits"), act.text("type", default="int")
    found = f"activations of type {kind!r} with {bits} bits"
    if (kind, bits) not in ACT_TYPES:
        raise refusal(found, "there are floats of 4, 6 and 8 bits and integers of 8", WAY_OUT)
    type, symmetric = ACT_TYPES[kind, bits], act.flag("symmetric", default=True)
    if not symmetric and type != "s8":
        raise refusal(f"{found} and zero points", "only integers have them", WAY_OUT)
    match act.get("dynamic") or False, act.text("strategy", default="tensor"), act.get("group_size"):
        case False, "tensor", _:
            return ActFormat(type=type, static=True, symmetric=symmetric)
        case True, "token", _:
            return ActFormat(type=type, symmetric=symmetric)
        case ((True | "local"), ("group" | "tensor_group"), int(inputs)):
            return ActFormat(type=type, group=inputs, symmetric=symmetric)
        case dynamic, strategy, _:
            raise refusal(
                f"{found}, dynamic {dynamic}, by {strategy!r}",
                "there are static ones by tensor, and dynamic ones by token or group",
                WAY_OUT,
            )
