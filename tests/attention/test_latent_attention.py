"""Latent attention by both backends against its definition: keys and values of every head, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pellucid.attention.base import LATENT_BACKENDS, LatentBackend, LatentSpec, QKNorm
from pellucid.forward import ForwardInput
from pellucid.kernels.attention.latent_rope import latent_rope_ref
from pellucid.layers.rope import RopeConfig
from pellucid.layers.rotary import rotary_table
from tests.diagonal import diagonal

SPEC = LatentSpec(
    num_heads=6, nope_dim=12, rope_dim=8, value_dim=20, rank=24, dtype=torch.float32, block_size=16
)
STEPS = {
    "prompts": [[20, 1, 9], [17, 30, 12]],
    "a prefix, decodes and a verification": [[40, 33, 7], [1, 1, 1], [1, 4, 11], [1, 1, 20]],
    "chunks of one": [[1, 2, 3], [1, 1, 1], [8, 9, 1]],
}
MAX_LEN = 80


@dataclass
class Layer:
    """All that a backend reads of a layer."""

    spec: LatentSpec
    scale: float
    kv_cache: Tensor
    norm: QKNorm
    rope: Tensor
    interleaved: bool
    up: Tensor
    table: int = 0
    row_scale: float = 1.0
    is_last: bool = False


def make_layer(spec: LatentSpec, *, interleaved: bool, num_blocks: int) -> Layer:
    rope = RopeConfig(kind="default", theta=100.0, rotary_dim=spec.rope_dim, max_position_embeddings=MAX_LEN)
    return Layer(
        spec=spec,
        scale=0.3,
        kv_cache=torch.full((num_blocks, spec.block_size, spec.row_dim), torch.nan).to(
            spec.kv_dtype or spec.dtype
        ),
        row_scale=0.5 if spec.kv_dtype else 1.0,
        norm=QKNorm(1 + 0.2 * torch.randn(spec.rank), 1e-6),
        rope=rotary_table(rope, MAX_LEN),
        interleaved=interleaved,
        up=torch.randn(spec.num_heads, spec.nope_dim + spec.value_dim, spec.rank) / spec.rank**0.5,
    )


def expected(layer: Layer, q: Tensor, latent: Tensor, num_query: int) -> Tensor:
    """The last queries of one sequence, of whose tokens all projections are given; [num_query, N * value]."""
    spec, length = layer.spec, len(latent)
    q = q.double().unflatten(1, (spec.num_heads, -1))
    c, k_turning = latent.double().split((spec.rank, spec.rope_dim), dim=1)
    c = kept(torch.nn.functional.rms_norm(c, (spec.rank,), layer.norm.weight.double(), layer.norm.eps), layer)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 100.0 ** (
        -torch.arange(0, spec.rope_dim, 2, dtype=torch.float64) / spec.rope_dim
    )

    def turned(x: Tensor) -> Tensor:  # [S, ..., R]
        if layer.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        a, b = x.chunk(2, dim=-1)
        factor = torch.polar(torch.ones_like(angles), angles)
        y = torch.complex(a, b) * (factor if x.dim() == 2 else factor[:, None])
        return torch.cat((y.real, y.imag), dim=-1)

    made = torch.einsum("sc,nhc->snh", c, layer.up.double())
    k_nope, v = made.split((spec.nope_dim, spec.value_dim), dim=-1)
    k = torch.cat((k_nope, kept(turned(k_turning), layer)[:, None].expand(-1, spec.num_heads, -1)), dim=-1)
    q = torch.cat((q[..., : spec.nope_dim], turned(q[..., spec.nope_dim :])), dim=-1)[-num_query:]
    scores = torch.einsum("qnh,snh->nqs", q, k) * layer.scale
    hidden = torch.ones(length, length).triu(1).bool()[-num_query:]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("nqs,snh->qnh", weights, v).flatten(1)


def kept(x: Tensor, layer: Layer) -> Tensor:
    """As the cache holds it."""
    if layer.spec.kv_dtype is None:
        return x
    return (x / layer.row_scale).float().to(layer.spec.kv_dtype).double() * layer.row_scale


def make_fwd(backend: LatentBackend, work: list[int], computed: list[int], table: Tensor) -> ForwardInput:
    """The next `work` tokens of each sequence, of which `computed` are in the cache."""
    order = sorted(range(len(work)), key=lambda seq: work[seq])  # decodes come first
    places = [computed[seq] + i for seq in order for i in range(work[seq])]
    owners = [seq for seq in order for _ in range(work[seq])]
    size = SPEC.block_size
    slots = [
        int(table[seq, place // size]) * size + place % size
        for seq, place in zip(owners, places, strict=True)
    ]
    lens = [work[seq] for seq in order]
    fwd = ForwardInput(
        input_ids=torch.zeros(len(places), dtype=torch.int32),
        positions=torch.tensor(places),
        slots=torch.tensor(order),
        cu_seqlens_q=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor([computed[seq] + work[seq] for seq in order], dtype=torch.int32),
        block_tables=(table[order],),
        slot_mappings=(torch.tensor(slots),),
        logits_index=torch.zeros(0, dtype=torch.long),
        query_lens=lens,
        max_query=max(lens),
        max_keys=[computed[seq] + work[seq] + 5 for seq in order],
        block_size=size,
    )
    fwd.attn = (backend.metadata(fwd, 0),)
    return fwd


@diagonal({"interleaved": [True, False], "name": list(LATENT_BACKENDS), "steps": list(STEPS.values())})
def test_both_backends_attend_as_defined(
    monkeypatch: pytest.MonkeyPatch, steps: list[list[int]], name: str, interleaved: bool
) -> None:
    check(monkeypatch, SPEC, steps, name, interleaved=interleaved, tolerance=2e-5)


@pytest.mark.parametrize("name", list(LATENT_BACKENDS))
def test_an_fp8_cache_holds_scaled_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where what is rounded differs by float32's rounding, it may be an FP8 step from what is expected."""
    if name == "triton" and not torch.cuda.is_available():
        pytest.importorskip("triton")
        # The interpreter does not round to FP8 as GPUs do.
        monkeypatch.setattr("pellucid.kernels.attention.latent_rope.latent_rope", latent_rope_ref)
    spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn)
    for steps in STEPS.values():
        check(monkeypatch, spec, steps, name, interleaved=True, tolerance=5e-3)


def check(
    monkeypatch: pytest.MonkeyPatch,
    spec: LatentSpec,
    steps: list[list[int]],
    name: str,
    *,
    interleaved: bool,
    tolerance: float,
) -> None:
    """Three sequences through some steps."""
    if name == "triton":
        pytest.importorskip("triton")
        from pellucid.attention import triton_latent

        monkeypatch.setattr(triton_latent, "MAX_EXPANDED", 12_000)  # bytes: some rows and heads at once
    device = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    backend = LATENT_BACKENDS.load(name)()
    table = (torch.randperm(15) + 1).view(3, 5).int()
    layer = make_layer(spec, interleaved=interleaved, num_blocks=16)
    there = replace(
        layer,
        kv_cache=layer.kv_cache.to(device),
        norm=QKNorm(layer.norm.weight.to(device), layer.norm.eps),
        rope=layer.rope.to(device),
        up=layer.up.to(device),
    )
    width = SPEC.num_heads * (SPEC.nope_dim + SPEC.rope_dim)
    packed = torch.randn(3, MAX_LEN, width + SPEC.row_dim)
    computed = [0, 0, 0]
    for work in steps:
        with torch.device(device):
            fwd = make_fwd(backend, work, computed, table.to(device))
        order, lens = fwd.slots.tolist(), fwd.query_lens
        tokens = torch.cat(
            [packed[seq, computed[seq] : computed[seq] + num] for seq, num in zip(order, lens, strict=True)]
        )
        q, latent = tokens.to(device, copy=True).split((width, SPEC.row_dim), dim=1)
        out = backend.forward(q, latent, there, fwd).cpu()
        computed = [done + num for done, num in zip(computed, work, strict=True)]
        for seq, part in zip(order, out.split(lens), strict=True):
            q, latent = packed[seq, : computed[seq]].split((width, SPEC.row_dim), dim=1)
            true = expected(layer, q, latent, len(part))
            torch.testing.assert_close(part.double(), true, atol=tolerance, rtol=tolerance)


def test_a_token_costs_one_row() -> None:
    spec = LatentSpec(
        num_heads=128, nope_dim=128, rope_dim=64, value_dim=128, rank=512, dtype=torch.bfloat16, block_size=64
    )
    assert spec.cache.num_bytes == 64 * 1152
    assert replace(spec, kv_dtype=torch.float8_e4m3fn).cache.num_bytes == 64 * 576
