"""Schemes: configs that tools have written, each dialect's ways to name layers apart, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from pellucid.quant.codes import E2M1, E4M3, LUT4, PLAIN, ROW, S8, U2, U3, U4, WHOLE_MATRIX, Code, Group
from pellucid.quant.layouts import LAYOUTS, layout_of
from pellucid.quant.layouts.base import ActFormat, LayerFormat, MatrixShape
from pellucid.quant.layouts.ggml.types import SIZES
from pellucid.quant.schemes import ALIASES, REFUSED, SCHEMES, rules_of
from pellucid.quant.schemes.base import Rules, StoredConfig
from pellucid.weights.decoded import describe
from tests.quant.formats import FORMATS, raw_of, stored

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
QUERY, HEAD = "model.layers.10.self_attn.q_proj", "lm_head"


class Info(NamedTuple):
    shape: tuple[int, ...]
    type: str = "I32"


def read(config: Mapping[str, object], **more: object) -> Rules:
    rules = rules_of(StoredConfig(config={"quantization_config": config}, **more))  # type: ignore[arg-type]
    assert rules is not None
    return rules


def of(layer: str, **config: object) -> LayerFormat | None:
    return read(config).format_of(layer)


def pack(bits: int = 4, **weights: object) -> dict[str, object]:
    return {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128, **weights},
    }


def ct(*groups: dict[str, object], **more: object) -> dict[str, object]:
    numbered = {f"group_{i}": group for i, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": numbered,
        **more,
    }


def hqq(**weights: object) -> dict[str, object]:
    said = {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True, "view_as_float": False}
    return {"weight_quant_params": said | weights, "scale_quant_params": None, "zero_quant_params": None}


@pytest.mark.parametrize("name", FORMATS)
def test_configs_tell_what_files_have(name: str) -> None:
    entry = stored()[name]
    tensors = {f"{entry['matrix']}.{key}": Info(tuple(t.shape)) for key, t in raw_of(name).items()}
    rules = read(entry["config"], tensors=tensors, metadata=entry.get("metadata", {}))
    kind = "experts" if "experts" in entry["matrix"] else "linear"
    assert rules.format_of(entry["matrix"], kind) == FORMATS[name]
    assert rules.format_of("lm_head", "head") is None
    assert rules.format_of("model.embed_tokens", "embedding") is None


def test_plain_checkpoints_have_no_rules() -> None:
    assert rules_of(StoredConfig(config={})) is None
    assert rules_of(StoredConfig(config={"quantization_config": {}}), "awq") is None


@pytest.mark.parametrize(
    "file,content,layout",
    [
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False}, "gptq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "modelopt-nvfp4"),
    ],
)
def test_files_beside_config_json_are_read(file: str, content: dict, layout: str) -> None:
    rules = rules_of(StoredConfig(config={}, side={file: content}))
    assert rules is not None
    format = rules.format_of(UP)
    assert format is not None and format.layout == layout
    assert format.group.inputs == content.get("group_size", content.get("q_group_size", 16))


@pytest.mark.parametrize("alias", ALIASES)
def test_vllms_names_mean_dialects(alias: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    stored = StoredConfig(config={"quantization_config": config})
    assert all(name in SCHEMES for name in ALIASES[alias])
    if "gptq" in ALIASES[alias]:
        assert rules_of(stored, alias) == rules_of(stored)
    else:
        with pytest.raises(
            ValueError, match=f"quantization is '{alias}', but the checkpoint is stored as 'gptq'"
        ):
            rules_of(stored, alias)


def test_layers_that_files_show_to_be_plain_are_plain() -> None:
    tensors = {
        f"{UP}.qweight": Info((64, 64)),
        "model.layers.0.mlp.gate.weight": Info((8, 64), "BF16"),
        f"{DOWN}.qweight": Info((64, 64)),
    }
    for config in ({"quant_method": "awq", "bits": 4}, {"quant_method": "gptq", "bits": 4, "group_size": 64}):
        rules = read(config, tensors=tensors)
        assert rules.format_of(UP) and rules.format_of(DOWN)
        assert rules.format_of("model.layers.0.mlp.gate") is None


class TestGptq:
    CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}

    @pytest.mark.parametrize("bits,code", [(2, U2), (3, U3), (4, U4), (8, S8)])
    def test_bits(self, bits: int, code: Code) -> None:
        assert of(UP, **{**self.CONFIG, "bits": bits}) == LayerFormat(
            layout="gptq", code=code, group=Group(1, 128), options=frozenset({"act_order"})
        )

    def test_a_whole_row_has_no_order(self) -> None:
        format = of(UP, **{**self.CONFIG, "group_size": -1, "checkpoint_format": "gptq_v2"})
        assert format == LayerFormat(layout="gptq", code=U4, options=frozenset({"v2"}))

    def test_marlin_24(self) -> None:
        format = of(UP, **{**self.CONFIG, "checkpoint_format": "marlin_24"})
        assert format and format.layout == "gptq-marlin24"

    def test_dynamic(self) -> None:
        dynamic = {
            r"+:.*\.0\..*up_proj": {"bits": 8, "group_size": 32},
            r"-:.*\.0\.": {},
            r"model\.layers\.10\.": {"desc_act": False},
            r"+:lm_head": {"bits": 8},
        }
        rules = read({**self.CONFIG, "dynamic": dynamic})
        up, query, other = (rules.format_of(n) for n in (UP, QUERY, QUERY.replace("10", "1")))
        assert up and (up.code, up.group) == (S8, Group(1, 32))
        assert rules.format_of(DOWN) is None
        assert query and query.options == frozenset() and other and "act_order" in other.options
        head = rules.format_of(HEAD, "head")
        assert head and head.code == S8

    def test_the_head_only_if_it_is_named(self) -> None:
        assert read(self.CONFIG).format_of(HEAD, "head") is None
        assert read({**self.CONFIG, "lm_head": True}).format_of(HEAD, "head") is not None

    def test_names_inside_blocks(self) -> None:
        rules = read({**self.CONFIG, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
        assert rules.format_of(UP) and rules.format_of(QUERY) and rules.format_of(DOWN) is None


class TestAutoRound:
    CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}

    def test_packing(self) -> None:
        for packing, layout in (("auto_round:auto_gptq", "gptq"), ("auto_round:auto_awq", "awq")):
            format = of(UP, **self.CONFIG, packing_format=packing)
            assert format and (format.layout, format.code, format.group) == (layout, U4, Group(1, 128))
        for packing in ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2"):
            format = of(UP, **self.CONFIG, packing_format=packing)
            assert format and (format.layout, format.options) == ("gptq", frozenset({"v2"}))
        for said in ({"packing_format": "auto_round:gptq:exllamav2"}, {"backend": "auto"}, {}):
            of_gptq = of(UP, **self.CONFIG, **said)
            assert of_gptq and (of_gptq.layout, of_gptq.options) == ("gptq", frozenset())
        of_old = of(UP, **self.CONFIG, backend="auto_round:exllamav2")  # versions before packing_format
        assert of_old and of_old.options == {"v2"}

    def test_floats(self) -> None:
        config = {**self.CONFIG, "packing_format": "auto_round:llm_compressor"}
        mx = of(UP, **config | {"data_type": "mx_fp", "group_size": 32, "act_bits": 4})
        assert mx and (mx.layout, mx.act) == ("mxfp4", ActFormat(type="e2m1", group=32))
        nv = of(UP, **config | {"data_type": "nv_fp4_with_static_gs", "group_size": 16})
        assert nv and (nv.layout, nv.act) == ("nvfp4", ActFormat())
        config |= {"bits": 8, "act_bits": 8, "packing_format": "auto_round:fp8"}
        mx = of(UP, **config | {"data_type": "mx_fp8"})
        assert mx and (mx.layout, mx.group, mx.act.group) == ("scaled", Group(1, 32), 32)
        blocks = of(UP, **config | {"data_type": "fp", "weight_block_size": [128, 128]})
        assert blocks and (blocks.layout, blocks.group) == ("fp8-blocks", Group(128, 128))
        static = of(UP, **config | {"data_type": "fp8", "activation_scheme": "static"})
        assert static and static.layout == "scaled" and static.act.static

    def test_layers_apart(self) -> None:
        extra = {UP: {"bits": 16}, r".*q_proj.*": {"bits": 2, "group_size": 32}, HEAD: {"bits": 8}}
        rules = read({**self.CONFIG, "extra_config": extra})
        query, down, head = (rules.format_of(QUERY), rules.format_of(DOWN), rules.format_of(HEAD, "head"))
        assert rules.format_of(UP) is None
        assert query and (query.code, query.group) == (U2, Group(1, 32))
        assert down and down.code == U4 and head and head.code == S8

    def test_blocks(self) -> None:
        rules = read({**self.CONFIG, "block_name_to_quantize": "model.layers"})
        assert rules.format_of(UP) and rules.format_of("visual.blocks.0.mlp.up_proj") is None


class TestCompressedTensors:
    def test_bits_zeros_and_order(self) -> None:
        format = of(UP, **ct(pack(3, symmetric=False, actorder="group"), version="0.17.1"))
        assert format == LayerFormat(
            layout="ct-pack",
            code=U3,
            group=Group(1, 128),
            options=frozenset({"asym", "act_order", "padded"}),
        )
        dense = of(UP, **ct(pack(7, strategy="channel", actorder="weight"), version="0.18.0"))
        assert dense == LayerFormat(layout="ct-pack", code=S8, options=frozenset({"7_bits"}))
        assert of(UP, **ct(pack(4), version="0.9.0")) == LayerFormat(
            layout="ct-pack", code=U4, group=Group(1, 128)
        )

    def test_names_go_before_expressions_and_classes(self) -> None:
        groups = [pack(4), pack(8) | {"targets": ["re:.*mlp.*"]}, pack(2) | {"targets": [UP]}]
        rules = read(ct(*groups, ignore=["lm_head", r"re:.*layers\.10\."]))
        codes = {name: rules.format_of(name) for name in (UP, DOWN, "model.layers.1.self_attn.q_proj")}
        assert [format and format.code for format in codes.values()] == [U2, S8, U4]
        assert rules.format_of(QUERY) is None and rules.format_of(HEAD, "head") is None
        assert rules.format_of("model.embed_tokens", "embedding") is None

    @pytest.mark.parametrize("block", [[64, 128], "64x128"])
    def test_blocks_in_either_spelling(self, block: object) -> None:
        form = pack(8, type="float", strategy="block", block_structure=block, group_size=None)
        found = of(UP, **ct(form, format="float-quantized"))
        assert found and found.group == Group(64, 128)

    def test_heads_and_embeddings(self) -> None:
        rules = read(ct(pack(4), pack(8) | {"targets": ["Embedding"]}))
        head, embedding = rules.format_of(HEAD, "head"), rules.format_of("model.embed_tokens", "embedding")
        assert head and head.code == U4 and embedding and embedding.code == S8

    def test_groups_of_formats_of_their_own(self) -> None:
        nvfp4 = {
            "format": "nvfp4-pack-quantized",
            "targets": ["re:.*mlp.*"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
        mxfp6 = {
            "format": "mxfp6-pack-quantized",
            "targets": [DOWN],
            "weights": {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32},
        }
        rules = read(ct(nvfp4, mxfp6, pack(4) | {"format": "pack-quantized"}, format="mixed-precision"))
        assert rules.format_of(DOWN) == LayerFormat(layout="mxfp6", code=S8, group=Group(1, 32))
        assert rules.format_of(UP) == LayerFormat(layout="nvfp4", code=E2M1, group=Group(1, 16))
        query = rules.format_of(QUERY)
        assert query and query.layout == "ct-pack"

    @pytest.mark.parametrize(
        "act,expected",
        [
            (None, ActFormat()),
            ({"type": "int", "num_bits": 8, "dynamic": True, "strategy": "token"}, ActFormat(type="s8")),
            (
                {"type": "int", "num_bits": 8, "strategy": "tensor", "symmetric": False},
                ActFormat(type="s8", static=True, symmetric=False),
            ),
            (
                {"type": "float", "num_bits": 8, "dynamic": True, "strategy": "group", "group_size": 128},
                ActFormat(type="e4m3", group=128),
            ),
        ],
    )
    def test_activations(self, act: dict | None, expected: ActFormat) -> None:
        group = pack(8, strategy="channel", group_size=None) | {"input_activations": act}
        format = of(UP, **ct(group, format="int-quantized"))
        assert format == LayerFormat(layout="scaled", code=S8, group=ROW, act=expected)

    def test_sparse_weights(self) -> None:
        sparsity = {"format": "sparse-24-bitmask", "ignore": ["lm_head"]}
        rules = read(ct(ignore=["lm_head"], sparsity_config=sparsity, format="dense"))
        assert rules.format_of(UP) == LayerFormat(layout="bitmask", code=PLAIN)
        fp8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        both = of(UP, **ct(fp8, ignore=["lm_head"], sparsity_config=sparsity, format="float-quantized"))
        assert both == LayerFormat(layout="bitmask", code=E4M3)

    def test_a_scheme_of_the_cache_alone(self) -> None:
        assert of(UP, **ct(kv_cache_scheme={"num_bits": 8, "type": "float"})) is None


class TestFp8:
    def test_blocks(self) -> None:
        format = of(UP, quant_method="fp8", weight_block_size=[128, 128])
        assert format == LayerFormat(
            layout="fp8-blocks", code=E4M3, group=Group(128, 128), act=ActFormat(type="e4m3", group=128)
        )

    def test_whole_matrices(self) -> None:
        rules = read(
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [UP, "lm_head"]}
        )
        assert rules.format_of(UP) is None and rules.format_of(HEAD, "head") is None
        assert rules.format_of(DOWN) == LayerFormat(
            layout="scaled", code=E4M3, group=WHOLE_MATRIX, act=ActFormat(type="e4m3", static=True)
        )
        tensors = {f"{UP}.weight_scale_inv": Info((1,), "F32")}
        inverse = read({"quant_method": "fp8"}, tensors=tensors).format_of(UP)
        assert inverse and (inverse.layout, inverse.group) == ("fp8-blocks", WHOLE_MATRIX)

    def test_fbgemm(self) -> None:
        rules = read({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.1", "gate"]})
        assert rules.format_of(UP) == LayerFormat(layout="scaled", code=E4M3, act=ActFormat(type="e4m3"))
        assert rules.format_of("model.layers.1.mlp.up_proj") is None
        assert rules.format_of("model.layers.0.mlp.gate") is None
        assert rules.format_of(QUERY) and rules.format_of("model.layers.0.mlp.gate_proj")
        tensors = {"model.layers.0.mlp.experts.gate_up_proj_scale": Info((4, 1, 8), "F32")}
        rules = read({"quant_method": "fbgemm_fp8"}, tensors=tensors)
        experts = rules.format_of("model.layers.0.mlp.experts.gate_up_proj", "experts")
        assert experts and experts.layout == "fbgemm-experts"


class TestModelOpt:
    def test_exclusions_reach_below(self) -> None:
        rules = read(
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "ignore": ["model.layers.1", "*q_proj", "lm_hea*"],
            }
        )
        assert rules.format_of(UP) and rules.format_of("model.layers.10.self_attn.k_proj")
        assert rules.format_of("model.layers.1.mlp.up_proj") is None and rules.format_of(QUERY) is None

    def test_mixed(self) -> None:
        layers = {UP: {"quant_algo": "NVFP4", "group_size": 16}, DOWN: {"quant_algo": "FP8"}}
        rules = read(
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        )
        up, down = rules.format_of(UP), rules.format_of(DOWN)
        assert up and up.code == E2M1 and down and down.group == WHOLE_MATRIX
        assert rules.format_of(QUERY) is None

    @pytest.mark.parametrize(
        "algorithm,layout,group",
        [
            ("FP8_PER_CHANNEL_PER_TOKEN", "scaled", ROW),
            ("FP8_PB_WO", "scaled", Group(128, 128)),
            ("MXFP8", "scaled", Group(1, 32)),
            ("W4A16_NVFP4", "modelopt-nvfp4", Group(1, 16)),
            ("MXFP4", "modelopt-mxfp4", Group(1, 32)),
            ("W8A16", "scaled", ROW),
        ],
    )
    def test_algorithms(self, algorithm: str, layout: str, group: Group) -> None:
        format = of(UP, quant_method="modelopt", quant_algo=algorithm)
        assert format and (format.layout, format.group) == (layout, group)


def test_hqq_names_kinds_of_layers() -> None:
    kinds = {"mlp.up_proj": hqq(group_size=None), "self_attn.q_proj": hqq(nbits=3)}
    rules = read({"quant_method": "hqq", "quant_config": kinds, "skip_modules": ["mlp.experts.up_proj"]})
    assert (found := rules.format_of(UP)) and (found.code, found.group) == (U4, Group(1, 0))
    assert (found := rules.format_of(QUERY)) and found.code == U3
    assert rules.format_of(DOWN) is None
    everywhere = {"quant_method": "hqq", "quant_config": hqq(), "skip_modules": ["mlp.experts.up_proj"]}
    assert read(everywhere).format_of("model.layers.0.mlp.experts.3.up_proj", "experts") is None
    assert read(everywhere).format_of(HEAD, "head")


def test_bitsandbytes_leaves_out_what_is_plain() -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    tensors = {f"{UP}.weight.absmax": Info((9,)), f"{DOWN}.weight": Info((9, 9), "BF16")}
    rules = read({**config, "llm_int8_skip_modules": ["self_attn"]}, tensors=tensors)
    assert rules.format_of(UP) == LayerFormat(
        layout="bnb4", code=LUT4, group=Group(1, 64), options=frozenset({"nf4"})
    )
    assert rules.format_of(DOWN) is None and rules.format_of(QUERY) is None
    of_head = {f"{HEAD}.weight.absmax": Info((9,))}
    assert read(config, tensors=of_head).format_of(HEAD, "head") == rules.format_of(UP)
    assert read(config).format_of(HEAD, "head") is None


@pytest.mark.parametrize(
    ("block", "type", "elements"), [(64, "U8", 288), (128, "BF16", 144), (256, "F32", 72)]
)
def test_bitsandbytes_blocks_are_those_of_the_files(block: int, type: str, elements: int) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    tensors = {f"{UP}.weight": Info((elements, 1), type), f"{UP}.weight.absmax": Info((-(-576 // block),))}
    found = read(config, tensors=tensors).format_of(UP)
    assert found is not None and found.group == Group(1, block)
    damaged = {f"{DOWN}.weight": Info((elements, 1), type), f"{DOWN}.weight.absmax": Info((2,))}
    whole = {name.replace("up", each): info for each in ("up", "gate") for name, info in tensors.items()}
    assert read(config, tensors=damaged | whole).format_of(UP) == found


def test_torchaos_classes() -> None:
    def weight(type: str, **data: object) -> str:
        return json.dumps({"_type": type, "_data": data})

    metadata = {
        f"{UP}.weight": weight("Int8Tensor", block_size=[64, 32], act_quant_kwargs={"granularity": "PerRow"}),
        f"{DOWN}.weight": weight("Float8Tensor", block_size=[1, 64]),
        f"{QUERY}.weight": json.dumps({"_type": "Tensor"}),
        "format": "pt",
    }
    tensors = {f"{UP}._weight_qdata": Info((64, 32)), f"{DOWN}._weight_qdata": Info((32, 64))}
    rules = read({"quant_method": "torchao"}, metadata=metadata, tensors=tensors)
    asym = frozenset({"asym"})
    assert rules.format_of(UP) == LayerFormat(
        layout="torchao", code=S8, group=WHOLE_MATRIX, act=ActFormat(type="s8"), options=asym
    )
    assert rules.format_of(DOWN) == LayerFormat(layout="torchao", code=E4M3)
    assert rules.format_of(QUERY) is None
    with_zeros = weight(
        "IntxUnpackedToInt8Tensor", block_size=[1, 32], activation_quantization="int8_asym_per_token"
    )
    metadata[f"{UP}.weight"] = with_zeros
    found = read({"quant_method": "torchao"}, metadata=metadata, tensors=tensors).format_of(UP)
    assert found is not None and found.act == ActFormat(type="s8", symmetric=False)


def test_gpt_oss_has_experts_in_mxfp4() -> None:
    rules = read({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    assert rules.format_of("model.layers.0.mlp.experts.down_proj", "experts") is not None
    assert rules.format_of(QUERY) is None and rules.format_of("model.layers.0.mlp.router") is None


def test_gguf_has_a_type_for_each_tensor() -> None:
    tensors = {
        f"{UP}.weight": Info((64, 256), "Q4_K"),
        f"{DOWN}.weight": Info((64, 256), "Q6_K"),
        "model.norm.weight": Info((64,), "F32"),
    }
    rules = read({"quant_method": "gguf"}, tensors=tensors)
    up = rules.format_of(UP)
    assert up == LayerFormat(layout="ggml/Q4_K", code=U4, group=Group(1, 32))
    assert rules.format_of(DOWN) != up and rules.format_of("model.norm") is None


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size.file])
def test_ggml_types_become_the_codes_they_are_said_to(name: str) -> None:
    rules = read({"quant_method": "gguf"}, tensors={f"{UP}.weight": Info((2, 512), name)})
    format = rules.format_of(UP)
    assert format is not None
    layout = layout_of(format)
    (spec,) = layout.params(format, MatrixShape(2, 512)).values()
    raw = {"weight": torch.zeros(spec.shape, dtype=spec.dtypes[0])}
    codes = layout.decode(raw, format, MatrixShape(2, 512))
    assert (codes.code, codes.group) == (format.code, format.group)


REFUSALS = [
    (
        {"quant_method": "quark"},
        "'quark', which is not served: its files .*; use a checkpoint in another format",
    ),
    ({"quant_method": "secret"}, "'secret', which is not served: there are awq, gptq"),
    ({"what": 1}, "quant_method is missing in quantization_config in config.json"),
    ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
    (
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        "AWQ of version 'gemv'.*convert it to version 'gemm'",
    ),
    ({"quant_method": "gptq", "bits": 5}, "GPTQ of 5 bits"),
    (
        {"quant_method": "gptq", "bits": "4"},
        "bits in quantization_config in config.json is '4', must be a whole",
    ),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the format 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "no regular expression"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "words of int16"),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exl"},
        "auto-round's 'int' of 4 bits in 'exl'",
    ),
    ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "activations of 8 bits"),
    (ct(pack(9)), "pack-quantized of integers of 9 bits"),
    (ct(pack(4), format="mystery"), "format 'mystery', which is not served: there are pack-quantized"),
    (ct(pack(4), transform_config={"a": 1}), "transform_config"),
    (ct(), "no config_groups"),
    (ct(pack(4, strategy="odd")), "weight scales by 'odd'"),
    (
        ct(pack(4) | {"input_activations": {"num_bits": 4, "type": "int"}}),
        "activations of type 'int' with 4 bits",
    ),
    (
        ct(pack(4) | {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}),
        "dynamic True, by 'tensor'",
    ),
    (ct(pack(4, type="float"), format="float-quantized"), "float-quantized of floats of 4 bits"),
    (
        ct(pack(8, type="float", symmetric=False), format="float-quantized"),
        "float-quantized weights with zero points, .*: only integers have them",
    ),
    (
        ct(pack(4) | {"input_activations": {"num_bits": 8, "type": "float", "symmetric": False}}),
        "activations of type 'float' with 8 bits and zero points, .*: only integers have them",
    ),
    (ct(pack(4), sparsity_config={"format": "sparse-bitmask"}), "sparsity of format 'sparse-bitmask'"),
    (ct(pack(4), sparsity_config={"format": "sparse-24-bitmask", "ignore": ["x"]}), "sparse or quantized"),
    ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd'"),
    (
        {"quant_method": "fp8", "weight_block_size": [128]},
        r"weight_block_size in .* is \[128\], must be two numbers",
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"},
        "blocks need dynamic",
    ),
    ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "FP8 kept as 'mxfp4'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's 'W4A8_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "in groups of 32"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "'af4'"),
    ({"quant_method": "hqq", "quant_config": hqq(nbits=1)}, "HQQ of 1 bits, .*: there are 2, 3, 4, 5, 6, 8;"),
    ({"quant_method": "hqq", "quant_config": hqq(axis=0)}, "HQQ along axis 0"),
    ({"quant_method": "hqq", "quant_config": hqq(channel_wise=False)}, "HQQ with one scale for a matrix"),
    ({"quant_method": "hqq", "quant_config": hqq(view_as_float=True)}, "HQQ's codes as floats"),
    (
        {"quant_method": "hqq", "quant_config": {**hqq(), "scale_quant_params": {"nbits": 8}}},
        "HQQ with quantized scales",
    ),
    ({"quant_method": "torchao", "quant_type": {}}, "torchao's objects in pickles.*save it as safetensors"),
    ("nonsense", "quantization_config in config.json is 'nonsense', must be an object"),
]


@pytest.mark.parametrize("config,message", REFUSALS)
def test_what_is_not_served_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(config)


def test_refusals_that_need_the_files() -> None:
    with pytest.raises(
        ValueError, match="plain weights and a bitsandbytes config.*remove quantization_config"
    ):
        read({"quant_method": "bitsandbytes"}, tensors={f"{UP}.weight": Info((4, 4), "BF16")})
    metadata = {f"{UP}.weight": json.dumps({"_type": "Int4Tensor", "_data": {}})}
    with pytest.raises(ValueError, match="torchao's Int4Tensor, which is not served: there are Int8Tensor"):
        read({"quant_method": "torchao"}, metadata=metadata)
    tensors = {f"{UP}._weight_qdata": Info((4, 4), "F8_E4M3")}
    for data, words in (
        ({"float8_dtype": "float8_e5m2"}, "torchao's float8_e5m2, .*: there is float8_e4m3fn"),
        ({"block_size": [1]}, r"block_size in .* is \[1\], must be two numbers"),
        ({"block_size": [1, 4], "activation_quantization": "odd"}, "activations by torchao's 'odd'"),
    ):
        metadata = {f"{UP}.weight": json.dumps({"_type": "Float8Tensor", "_data": data})}
        with pytest.raises(ValueError, match=words):
            read({"quant_method": "torchao"}, metadata=metadata, tensors=tensors)
    metadata = {f"{UP}.weight": json.dumps({"_type": "Int8Tensor", "_data": {"block_size": [1, 4]}})}
    with pytest.raises(ValueError, match="torchao's Int8Tensor without .*up_proj._weight_qdata"):
        read({"quant_method": "torchao"}, metadata=metadata)
    with pytest.raises(ValueError, match="ggml's type IQ9.*there are F32.*quantize it again with llama.cpp"):
        read({"quant_method": "gguf"}, tensors={f"{UP}.weight": Info((4, 256), "IQ9")})


def test_every_name_leads_somewhere() -> None:
    for name in SCHEMES:
        SCHEMES.load(name)
    assert not set(REFUSED) & set(SCHEMES) and not set(ALIASES) & set(SCHEMES)
    for name in LAYOUTS:
        LAYOUTS.load(name)


def test_a_format_is_told_with_what_it_rounds_activations_to() -> None:
    weights = LayerFormat(layout="scaled", code=S8, group=ROW)
    told = "scaled s8, a scale for each row"
    assert describe(weights) == told
    for act, words in (
        (ActFormat(type="s8"), "s8, a scale for each row"),
        (ActFormat(type="s8", symmetric=False), "s8, a scale for each row and zero"),
        (ActFormat(type="e4m3", static=True), "e4m3, one scale"),
        (ActFormat(type="e4m3", group=128), "e4m3, a scale for each 128 inputs"),
    ):
        assert describe(replace(weights, act=act)) == f"{told}, for activations in {words}"
