"""Compile the kernels for a GPU on a machine without one.

What the interpreter accepts, the compiler may refuse; and what it compiles must fit a GPU's shared memory.
Runs in a process of its own, `python -m tests.kernels.compile_kernels`, because of the interpreter.  Writes
one line a kernel: its name, what sets it apart, bytes of shared memory.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pellucid.kernels.decode_attention import decode_kernel, merge_kernel
from pellucid.kernels.paged_attention import keys_per_tile, stages_for
from pellucid.kernels.prefill_attention import PACKED_ROWS, prefill_kernel
from pellucid.kernels.qkv_rope import HEADS, NUM_WARPS, qkv_rope_kernel
from pellucid.kernels.rms_norm import MAX_DIM, add_rms_norm_kernel, warps_for
from pellucid.kernels.silu_mul import ACTIVATIONS, BLOCK, silu_mul_kernel

HOPPER = GPUTarget("cuda", 90, 32)
DTYPE = torch.bfloat16
POINTERS = {"block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"}
FLOATS = {"partial_ptr", "statistics_ptr", "rope_ptr"}
LONGS = {"slot_mapping_ptr", "positions_ptr"}


def signature_of(name: str, cache: str) -> str:
    """Triton's word for the type of a kernel's argument.  cache: of the cache's elements."""
    if name == "cache_ptr":
        return cache
    if name in POINTERS:
        return "*i32"
    if name in FLOATS:
        return "*fp32"
    if name in LONGS:
        return "*i64"
    return "*bf16" if name.endswith("_ptr") else "fp32" if name.endswith(("scale", "eps")) else "i32"


def shared_memory(kernel, cache: str, constants: dict[str, float | str], **options: int) -> int:  # noqa: ANN001
    """Compile for a Hopper GPU.  Bytes of shared memory a program takes."""
    names = kernel.arg_names
    chosen = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in chosen else signature_of(name, cache) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n] not in ("constexpr", "fp32")
    }
    source = ASTSource(
        kernel, signature, constexprs={(names.index(n),): v for n, v in chosen.items()}, attrs=aligned
    )
    return triton.compile(source, target=HOPPER, options=options).metadata.shared


def report(kernel, label: object, size: int) -> None:  # noqa: ANN001
    sys.stdout.write(f"{kernel.fn.__name__} {label} {size}\n")


def attention_kernels(head_dim: int, num_query: int, window: int, cache: str) -> None:
    dim, tile = triton.next_power_of_2(head_dim), keys_per_tile(64, DTYPE)
    constants = {
        **{"NUM_KV_HEADS": 8, "GROUP_SIZE": 2, "HEAD_DIM": head_dim, "DIM_PADDED": dim},
        **{"CHUNK": 256, "NUM_CHUNKS": 32, "CHUNKS_PADDED": 32, "PACKED": num_query * 2, "WINDOW": window},
        **{"BLOCK_SIZE": 64, "TILE": tile, "TILE_QUERIES": PACKED_ROWS // 2},
    }
    for kernel, rows, warps in (
        (decode_kernel, 16, 2),
        (prefill_kernel, PACKED_ROWS, 8),
        (merge_kernel, 1, 4),
    ):
        stages = stages_for(2 * tile * dim * DTYPE.itemsize, rows * dim * DTYPE.itemsize)
        size = shared_memory(kernel, cache, constants | {"M": rows}, num_warps=warps, num_stages=stages)
        report(kernel, head_dim, size)


def qkv_kernel(head_dim: int, rotary_dim: int, cache: str) -> None:
    constants = {
        **{"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64, "HEADS": HEADS},
        **{"HALF": rotary_dim // 2, "HALF_PADDED": triton.next_power_of_2(rotary_dim // 2)},
        **{"REST_PADDED": triton.next_power_of_2(max(1, head_dim - rotary_dim))},
        **{"HAS_NORM": True, "HAS_ROPE": True, "LIMIT": 448.0 if cache == "*fp8e4nv" else 0.0},
    }
    report(qkv_rope_kernel, head_dim, shared_memory(qkv_rope_kernel, cache, constants, num_warps=NUM_WARPS))


def leaf_kernels() -> None:
    for dim in (1024, MAX_DIM):
        constants = {"DIM": dim, "DIM_PADDED": dim, "HAS_RESIDUAL": True}
        size = shared_memory(add_rms_norm_kernel, "", constants, num_warps=warps_for(dim))
        report(add_rms_norm_kernel, dim, size)
    for act in ACTIVATIONS:
        constants = {"HIDDEN": 3072, "ACT": act, "BLOCK": BLOCK}
        report(silu_mul_kernel, act, shared_memory(silu_mul_kernel, "", constants, num_warps=4))


def main() -> None:
    for head_dim, num_query, window, cache in (
        (128, 1, 0, "*bf16"),
        (80, 4, 500, "*bf16"),
        (128, 4, 0, "*fp8e4nv"),
    ):
        attention_kernels(head_dim, num_query, window, cache)
        qkv_kernel(head_dim, head_dim if num_query == 1 else head_dim // 2, cache)
    leaf_kernels()


if __name__ == "__main__":
    main()
