"""Layouts against what the formats' own tools say, backwards, in cuts as ranks read them, and damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pellucid.quant.codes import (
    E2M1,
    E4M3,
    LUT4,
    PLAIN,
    S8,
    U2,
    U3,
    U4,
    U5,
    U6,
    WHOLE_MATRIX,
    Code,
    Codes,
    Group,
    Scales,
)
from pellucid.quant.layouts import LAYOUTS, layout_of
from pellucid.quant.layouts.base import LayerFormat, MatrixShape, Writes
from pellucid.quant.layouts.bits import packed, per_words, unpacked, unpacked_words, words_for
from pellucid.quant.layouts.ggml.types import SIZES, TYPES
from pellucid.quant.layouts.sparse24 import tile_permutation
from tests.quant.formats import DATA, FORMATS, raw_of, shape_of, stored, tensors

GGML = sorted(key.split("/")[1] for key in tensors() if key.startswith("ggml/") and key.endswith("/weight"))


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_their_tools_say(name: str) -> None:
    format, want = FORMATS[name], stored()[name]
    weights = layout_of(format).decode(raw_of(name), format, shape_of(name)).dequantized()
    if name.startswith("gpt-oss"):  # whose tool holds them with inputs first
        weights = weights.transpose(1, 2)
    # LLM.int8() multiplies twice, by a scale and by a rounded 1 / 127.
    rtol = 1e-6 if name == "bnb-int8" else 0
    row = [float(f"{value:.9g}") for value in weights.flatten(0, -2)[1, :8].tolist()]
    assert row == pytest.approx(want["row1_first8"], rel=rtol, abs=0)
    assert float(weights.double().abs().sum()) == pytest.approx(want["abs_sum"], rel=max(rtol, 2e-8))
    assert float(weights.double().sum()) == pytest.approx(want["sum"], abs=max(rtol, 2e-8) * want["abs_sum"])


@pytest.mark.parametrize("name", GGML)
def test_ggml_blocks_are_what_gguf_says(name: str) -> None:
    raw = raw_of(f"ggml/{name}")
    shape = MatrixShape(*raw["expected"].shape)
    format = LayerFormat(layout=f"ggml/{name}")
    assert torch.equal(layout_of(format).decode(raw, format, shape).dequantized(), raw["expected"])


@pytest.mark.parametrize("name", GGML)
def test_ggml_blocks_of_experts_are_one_tensor(name: str) -> None:
    raw = raw_of(f"ggml/{name}")
    inputs = raw["expected"].shape[1]
    stacked = {"weight": raw["weight"].unflatten(0, (2, 2))}
    format, shape = LayerFormat(layout=f"ggml/{name}"), MatrixShape(2, inputs, 2)
    weights = layout_of(format).decode(stacked, format, shape).dequantized()
    assert torch.equal(weights, raw["expected"].unflatten(0, (2, 2)))


def test_every_block_type_that_has_a_file_is_read() -> None:
    unread = {"I8", "I16", "I32", "I64"}
    for type in TYPES.values():
        assert (type.file is None) == (type.name in unread)
        if type.file:
            layout_of(LayerFormat(layout=f"ggml/{type.name}"))
    # F64, Q8_1 and Q8_K hold no weights in files of ours; the other types do.
    assert set(SIZES) - unread - set(GGML) == {"F64", "Q8_1", "Q8_K"}


def test_blocks_that_hold_activations_are_scaled_integers() -> None:
    q = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    half, single = torch.tensor([0.5], dtype=torch.float16), torch.tensor([0.25])
    q8_1 = torch.cat((half.view(torch.uint8), torch.zeros(2, dtype=torch.uint8), q[:32].view(torch.uint8)))
    q8_k = torch.cat((single.view(torch.uint8), q.view(torch.uint8), torch.zeros(32, dtype=torch.uint8)))
    for name, block, scale, n in (("Q8_1", q8_1, 0.5, 32), ("Q8_K", q8_k, 0.25, 256)):
        format = LayerFormat(layout=f"ggml/{name}")
        codes = layout_of(format).decode({"weight": block[None]}, format, MatrixShape(1, n))
        assert torch.equal(codes.dequantized(), q[None, :n].float() * scale)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_packing_is_undone(bits: int, count: int) -> None:
    codes = torch.randint(1 << bits, (3, count), dtype=torch.uint8)
    words = packed(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (3, words_for(count, bits))
    assert torch.equal(unpacked(words, bits, count), codes)
    assert torch.equal(unpacked(packed(codes.T, bits, axis=0), bits, count, axis=0), codes.T)
    strided = torch.stack((words, words), -1)[..., 0]
    assert torch.equal(unpacked(strided[:1], bits, count), codes[:1])
    assert torch.equal(unpacked(strided[:1].T, bits, count, axis=0), codes[:1].T)
    value = sum(int(code) << bits * i for i, code in enumerate(codes[0].tolist()))
    assert value == sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words[0].tolist()))


def test_padded_words_hold_whole_codes() -> None:
    codes = torch.randint(8, (2, 23), dtype=torch.uint8)
    words = torch.zeros(2, 3, dtype=torch.int64)
    for i in range(23):
        words[:, i // 10] |= codes[:, i].long() << 3 * (i % 10)
    assert torch.equal(unpacked_words(words.int(), 3, 23), codes)


def random_codes(format: LayerFormat, shape: MatrixShape) -> Codes:
    """Codes as this layout can hold them."""
    code, group = format.code, format.group
    lead = () if shape.experts is None else (shape.experts,)
    scales = (*lead, *group.counts(shape.out, shape.inn))
    scale = Scales(torch.rand(scales).half() + 0.1)
    zero = offset = index = table = None
    q = torch.randint(1 << code.bits, (*lead, shape.out, shape.inn)).to(torch.uint8)
    if format.layout in ("awq", "gptq") or "asym" in format.options:
        zero = Scales(torch.randint(1 << code.bits, scales).to(torch.uint8))
    if "7_bits" in format.options:
        q = q % 128 + 64
        zero = zero and Scales(zero.values % 128 + 64)
    if code == S8:
        q, zero = q.view(torch.int8) ^ -128, zero and Scales(zero.values.view(torch.int8) ^ -128)
    if code == E4M3:
        q = torch.randn(shape[:2]).to(torch.float8_e4m3fn)
    if code == E2M1:
        powers = torch.randint(100, 140, scales).to(torch.uint8)
        scale = Scales(powers.view(torch.float8_e8m0fnu))
        if "nvfp4" in format.layout:
            scale = Scales(scale.values.float().to(torch.float8_e4m3fn), torch.tensor([[0.75]]).double())
    if code == LUT4:
        table, scale = torch.randn(16), Scales(torch.rand(scales))
    if "act_order" in format.options:
        index = torch.randperm(shape.inn) // group.inputs
    if format.layout in ("ggml/Q4_K", "ggml/Q6_K"):
        small = torch.randint(0, 64, scales)
        outer = torch.rand(shape.out, shape.inn // 256).half()
        scale = Scales(small.to(torch.uint8 if format.layout.endswith("Q4_K") else torch.int8), outer)
        if format.layout == "ggml/Q4_K":
            offset = Scales(torch.randint(0, 64, scales).to(torch.uint8), outer + 1)
    if format.layout in ("ggml/Q4_0", "ggml/Q6_K") or (
        format.layout == "ct-pack" and code != S8 and not zero
    ):
        zero = Scales(torch.tensor([[1 << code.bits - 1]]))
    return Codes(q=q, code=code, group=group, scale=scale, zero=zero, offset=offset, index=index, table=table)


def written(layout: str, code: Code, group: Group, *options: str) -> LayerFormat:
    return LayerFormat(layout=layout, code=code, group=group, options=frozenset(options))


WRITTEN = [
    written("awq", U4, Group(1, 64)),
    written("awq", U4, Group()),
    *(written("gptq", code, Group(1, 32)) for code in (U2, U3, U4, S8)),
    *(written("gptq", code, Group(1, 32), "v2") for code in (U3, S8)),
    written("gptq", U4, Group(1, 32), "act_order"),
    *(written("ct-pack", code, Group(1, 32)) for code in (U2, U3, U4, U5, U6, S8)),
    *(written("ct-pack", code, Group(1, 32), "asym") for code in (U3, U4, U6, S8)),
    written("ct-pack", U4, Group()),
    *(written("ct-pack", code, WHOLE_MATRIX, "asym") for code in (U3, S8)),
    written("ct-pack", U4, Group(1, 32), "act_order", "asym"),
    written("ct-pack", S8, Group(1, 32), "7_bits", "asym"),
    written("scaled", S8, Group()),
    written("scaled", S8, Group(), "asym"),
    written("scaled", E4M3, Group(0, 0)),
    written("scaled", E4M3, Group(32, 64)),
    written("fp8-blocks", E4M3, Group(32, 64)),
    written("torchao", S8, Group(1, 32), "asym"),
    written("mxfp4", E2M1, Group(1, 32)),
    written("nvfp4", E2M1, Group(1, 16)),
    written("modelopt-nvfp4", E2M1, Group(1, 16)),
    written("mx-experts", E2M1, Group(1, 32)),
    written("bnb4", LUT4, Group(1, 64), "nf4"),
    written("ggml/Q4_0", U4, Group(1, 32)),
    written("ggml/Q8_0", S8, Group(1, 32)),
    written("ggml/Q4_K", U4, Group(1, 32)),
    written("ggml/Q6_K", U6, Group(1, 16)),
    written("ggml/MXFP4", E2M1, Group(1, 32)),
]


def name_of(format: LayerFormat) -> str:
    group = "x".join(map(str, format.group))
    return "-".join((format.layout, format.code.name, group, *sorted(format.options)))


@pytest.mark.parametrize("format", WRITTEN, ids=name_of)
def test_what_is_written_is_read_again(format: LayerFormat) -> None:
    torch.manual_seed(0)
    shape = MatrixShape(72, 512, 3 if format.layout == "mx-experts" else None)
    layout = layout_of(format)
    assert isinstance(layout, Writes)
    codes = random_codes(format, shape)
    raw = layout.encode(codes, format)
    assert all(tensor.is_contiguous() for tensor in raw.values())
    again = layout.decode(raw, format, shape)
    assert torch.equal(again.q.view(torch.uint8), codes.q.view(torch.uint8))
    assert torch.equal(again.dequantized(), codes.dequantized())
    assert {name for name, spec in layout.params(format, shape).items() if spec.required} <= set(raw)


AS_TOOLS_WRITE = {name: FORMATS[name] for name in FORMATS if isinstance(layout_of(FORMATS[name]), Writes)}
AS_TOOLS_WRITE |= {
    f"ggml/{type}": LayerFormat(layout=f"ggml/{type}", code=code)
    for type, code in (("Q4_0", U4), ("Q8_0", S8), ("Q4_K", U4), ("Q5_K", U5), ("Q6_K", U6), ("MXFP4", E2M1))
}
del AS_TOOLS_WRITE["bnb-nf4-double"]  # nested scales are written as they are
OTHERWISE = ("SCB", "quant_state")  # one is rounded on the way, the other is text


@pytest.mark.parametrize("name", AS_TOOLS_WRITE)
def test_what_tools_have_written_is_written_again_to_the_bit(name: str) -> None:
    format, raw = AS_TOOLS_WRITE[name], raw_of(name)
    shape = shape_of(name) if name in FORMATS else MatrixShape(*raw["expected"].shape)
    layout = layout_of(format)
    assert isinstance(layout, Writes)
    written = layout.encode(layout.decode(raw, format, shape), format)
    assert written
    for key, tensor in written.items():
        if not any(other in key for other in OTHERWISE):
            found = raw[key].reshape(tensor.shape)
            assert tensor.dtype == found.dtype, key
            assert torch.equal(tensor.contiguous().view(torch.uint8), found.view(torch.uint8)), key


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"bnb-nf4-double"}))
def test_params_tell_what_files_have(name: str) -> None:
    format, raw = FORMATS[name], raw_of(name)
    specs = layout_of(format).params(format, shape_of(name))
    of_others = {"weight_format", "k_scale", "v_scale", "input_scale", "input_global_scale"}
    assert not set(raw) - set(specs) - of_others
    assert all(name in raw for name, spec in specs.items() if spec.required)
    for key, tensor in raw.items():
        if key in specs and "quant_state" not in key:
            assert tensor.numel() == torch.Size(specs[key].shape).numel(), key
            assert tensor.dtype in specs[key].dtypes


@pytest.mark.parametrize(
    "name", ["awq-gemm-g128", "gptq-3bit-g128", "ct-w4a16-asym", "ct-fp8-block", "ct-nvfp4", "hqq-4bit-g64"]
)
def test_damaged_matrices_are_refused(name: str) -> None:
    format, raw, shape = FORMATS[name], raw_of(name), shape_of(name)
    layout = layout_of(format)
    for key, spec in layout.params(format, shape).items():
        if not spec.required:
            continue
        with pytest.raises(ValueError, match=f"{key} is missing"):
            layout.decode({k: v for k, v in raw.items() if k != key}, format, shape)
        longer = torch.cat([raw[key].reshape(spec.shape)] * 2)
        with pytest.raises(ValueError, match=rf"{key} has shape \[.*, expected \["):
            layout.decode({**raw, key: longer}, format, shape)
        with pytest.raises(ValueError, match=f"{key} is float64, expected "):
            layout.decode({**raw, key: raw[key].double()}, format, shape)


@pytest.mark.parametrize("inputs", [32, 96])
def test_rows_need_not_begin_with_a_group_of_hqq(inputs: int) -> None:
    format = LayerFormat(layout="hqq", code=U4, group=Group(1, 64))
    groups = 8 * inputs // 64
    q = torch.randint(16, (groups, 64), dtype=torch.uint8)
    scale, zero = torch.rand(groups, 1), torch.rand(groups, 1)
    raw = {"W_q": q[: groups // 2] << 4 | q[groups // 2 :], "scale": scale, "zero": zero}
    weights = layout_of(format).decode(raw, format, MatrixShape(8, inputs)).dequantized()
    assert torch.equal(weights, ((q - zero) * scale).view(8, inputs))


def test_old_packing_of_three_bits_is_read() -> None:
    format = written("ct-pack", U3, Group(), "padded")
    codes = random_codes(replace(format, options=frozenset()), MatrixShape(4, 50))
    words = torch.zeros(4, 5, dtype=torch.int64)
    for i in range(50):
        words[:, i // 10] |= codes.q[:, i].long() << 3 * (i % 10)
    assert codes.scale is not None
    raw = {"weight_packed": words.int(), "weight_scale": codes.scale.values}
    again = layout_of(format).decode(raw, format, MatrixShape(4, 50))
    assert torch.equal(again.dequantized(), codes.dequantized())


@pytest.mark.parametrize(
    "name,key", [("gptq-4bit-g128-actorder", "g_idx"), ("ct-w4a16-gptq-actorder", "weight_g_idx")]
)
@pytest.mark.parametrize("group", [-1, 2])
def test_groups_that_are_not_there_are_refused(name: str, key: str, group: int) -> None:
    raw = dict(raw_of(name))
    raw[key] = raw[key].clone()
    raw[key][7] = group
    with pytest.raises(ValueError, match="g_idx names groups .* of 2"):
        layout_of(FORMATS[name]).decode(raw, FORMATS[name], shape_of(name))


@pytest.mark.parametrize("code", [U2, U4, S8], ids=lambda code: code.name)
def test_a_zero_of_0_has_borrowed_from_the_one_behind_it(code: Code) -> None:
    """GPTQModel makes version 1 of version 2 by one subtraction a word."""
    format = LayerFormat(layout="gptq", code=code, group=Group(1, 32))
    codes = random_codes(format, MatrixShape(32, 64))
    low = -128 if code == S8 else 0
    zero = torch.where(torch.rand(32, 2) < 0.5, low, low + 3).to(torch.int8 if code == S8 else torch.uint8)
    codes = replace(codes, zero=Scales(zero))
    of_tool = layout_of(format).encode(codes, replace(format, options=frozenset({"v2"})))  # pyright: ignore[reportAttributeAccessIssue]
    of_tool["qzeros"] -= {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[code.bits]
    again = layout_of(format).decode(of_tool, format, MatrixShape(32, 64))
    assert torch.equal(again.dequantized(), codes.dequantized())
    written = layout_of(format).encode(codes, format)  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(written["qzeros"], of_tool["qzeros"])


def test_inputs_in_an_order_that_the_config_denies_are_refused() -> None:
    format, raw = FORMATS["gptq-4bit-g128-actorder"], raw_of("gptq-4bit-g128-actorder")
    in_order, shape = replace(format, options=frozenset()), shape_of("gptq-4bit-g128-actorder")
    with pytest.raises(ValueError, match="g_idx has the inputs in an order of its own.*set it to true"):
        layout_of(in_order).decode(raw, in_order, shape)
    layout_of(in_order).decode({**raw, "g_idx": raw["g_idx"] * 0}, in_order, shape)  # as old tools left it


@pytest.mark.parametrize("text", [b"{}", b"[]", b"\xff", b'{"blocksize"'])
def test_damaged_states_of_bitsandbytes_are_refused(text: bytes) -> None:
    format, raw = FORMATS["bnb-nf4"], raw_of("bnb-nf4")
    raw = {**raw, "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8)}
    with pytest.raises(ValueError, match="quant_state is damaged"):
        layout_of(format).decode(raw, format, shape_of("bnb-nf4"))


def test_seven_bits_take_seven() -> None:
    format = written("ct-pack", S8, Group(), "7_bits")
    codes = torch.randint(128, (4, 64), dtype=torch.uint8)
    raw = {"weight_packed": packed(codes, 7), "weight_scale": torch.ones(4, 1)}
    assert raw["weight_packed"].shape == (4, 14)
    weights = layout_of(format).decode(raw, format, MatrixShape(4, 64)).dequantized()
    assert torch.equal(weights, codes.float() - 64)


def test_the_last_block_may_be_cut_short() -> None:
    format = written("fp8-blocks", E4M3, Group(64, 64))
    codes = random_codes(format, MatrixShape(100, 200))
    layout = layout_of(format)
    assert isinstance(layout, Writes)
    raw = layout.encode(codes, format)
    assert raw["weight_scale_inv"].shape == (2, 4)
    assert torch.equal(layout.decode(raw, format, MatrixShape(100, 200)).dequantized(), codes.dequantized())


def test_rows_need_not_begin_with_a_block_of_bitsandbytes() -> None:
    format = written("bnb4", LUT4, Group(1, 64), "nf4")
    shape = MatrixShape(6, 96)
    raw = raw_of("bnb-nf4")
    count = 6 * 96
    part = {
        **raw,
        "weight": raw["weight"][: count // 2],
        "weight.absmax": raw["weight.absmax"][: count // 64],
    }
    table, absmax = raw["weight.quant_map"], part["weight.absmax"]
    nibbles = [half for byte in part["weight"].flatten().tolist() for half in (byte >> 4, byte & 15)]
    expected = torch.stack([table[n] * absmax[i // 64] for i, n in enumerate(nibbles)]).view(6, 96)
    assert torch.equal(layout_of(format).decode(part, format, shape).dequantized(), expected)


@pytest.mark.parametrize("code", [PLAIN, S8, E4M3])
def test_bitmasks_keep_two_of_four(code: Code) -> None:
    format = LayerFormat(layout="bitmask", code=code)
    dense = torch.randn(8, 64)
    dense[torch.rand(8, 16, 4).argsort(-1).reshape(8, 64) < 2] = 0
    dtype = torch.bfloat16 if code == PLAIN else code.dtype
    kept = dense != 0
    dense = (dense * 40 + dense.sign()).to(dtype)
    weights = 1 << torch.arange(8)
    raw = {
        "compressed": dense.float()[kept].view(8, 32).to(dtype),
        "bitmask": (kept.view(8, 8, 8) * weights).sum(-1).to(torch.uint8),
        "shape": torch.tensor([[8], [64]]),
    }
    scale: Tensor = torch.ones(8, 1)
    if code != PLAIN:
        raw["weight_scale"] = scale = torch.rand(8, 1)
    shape = MatrixShape(8, 64)
    layout = layout_of(format)
    assert torch.equal(layout.decode(raw, format, shape).dequantized(), dense.float() * scale)
    raw["bitmask"] = raw["bitmask"] ^ 1
    with pytest.raises(ValueError, match="bitmask keeps"):
        layout.decode(raw, format, shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_marlins_tiles_are_a_permutation(bits: int) -> None:
    assert tile_permutation(bits).sort().values.equal(torch.arange(1024))


def test_marlins_scales_are_permuted_where_groups_are_many() -> None:
    """Under GPTQ's names tiles are the same; with many groups a row, scales of eight outputs are shuffled."""
    raw, shape = raw_of("ct-marlin24-w4a16"), shape_of("ct-marlin24-w4a16")
    ours, theirs = FORMATS["ct-marlin24-w4a16"], written("gptq-marlin24", U4, Group(1, 128))
    shuffled = raw["scale_packed"].unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
    renamed = {"B_24": raw["weight_packed"], "B_meta": raw["meta"], "s": shuffled}
    codes = layout_of(theirs).decode(renamed, theirs, shape)
    assert torch.equal(codes.dequantized(), layout_of(ours).decode(raw, ours, shape).dequantized())


def test_scales_of_bytes_are_powers_of_two() -> None:
    format = written("scaled", E4M3, Group(1, 32))
    q = torch.randn(4, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 127], [130, 0], [1, 254], [127, 127]], dtype=torch.uint8)
    codes = layout_of(format).decode({"weight": q, "weight_scale": scale}, format, MatrixShape(4, 64))
    expected = q.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(codes.dequantized(), expected)


def test_floats_of_six_bits_are_what_their_tool_says() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers")
    format, shape = LayerFormat(layout="mxfp6", code=S8, group=Group(1, 32)), MatrixShape(3, 64)
    torch.manual_seed(0)
    raw = {
        "weight_packed": torch.randint(256, (3, 48), dtype=torch.uint8),
        "weight_scale": torch.randint(120, 130, (3, 2), dtype=torch.uint8),
    }
    numbers = helpers.unpack_fp6_from_uint8(raw["weight_packed"], 3, 64, torch.float32)
    expected = numbers * (raw["weight_scale"].float() - 127).exp2().repeat_interleave(32, 1)
    assert torch.equal(layout_of(format).decode(raw, format, shape).dequantized(), expected)


def test_units_are_the_fewest_codes_that_fill_words() -> None:
    assert [per_words(bits) for bits in (2, 3, 4, 5, 6, 8)] == [16, 32, 8, 32, 16, 4]


def test_unknown_layouts_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown layout of weights 'gtpq'; did you mean 'gptq'\?"):
        LAYOUTS.check("gtpq")
    format = LayerFormat(layout="ggml/Q3_K")
    layout = layout_of(format)
    assert isinstance(layout, Writes)
    with pytest.raises(ValueError, match="Q3_K is not written here"):
        layout.encode(random_codes(FORMATS["ct-w4a16"], MatrixShape(1, 256)), format)


def test_data_are_small() -> None:
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 1 << 20
