"""Compile the attention kernels for a GPU on a machine without one.

What the interpreter accepts, the compiler may refuse; and what it compiles must fit a GPU's shared memory.
Runs in a process of its own, `python -m tests.kernels.compile_kernels`, because of the interpreter.  Writes
one line a kernel: its name, a head dim, bytes of shared memory.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pellucid.kernels.decode_attention import decode_kernel, merge_kernel
from pellucid.kernels.kv_move import kv_move_kernel
from pellucid.kernels.kv_write import kv_write_kernel
from pellucid.kernels.paged_attention import keys_per_tile, stages_for
from pellucid.kernels.prefill_attention import PACKED_ROWS, prefill_kernel

HOPPER = GPUTarget("cuda", 90, 32)
DTYPE = torch.bfloat16
POINTERS = {"block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr", "first_drafts_ptr"}
WIDE = {"slot_mapping_ptr", "positions_ptr", "ancestors_ptr", "sources_ptr", "targets_ptr"}
PARTIAL = {"partial_ptr", "statistics_ptr"}


def signature_of(name: str, cache: str) -> str:
    """Triton's word for the type of a kernel's argument.  cache: of the cache's elements."""
    if name == "cache_ptr":
        return cache
    if name in POINTERS:
        return "*i32"
    if name in PARTIAL:
        return "*fp32"
    if name in WIDE:
        return "*i64"
    return "*bf16" if name.endswith("_ptr") else "fp32" if name.endswith("scale") else "i32"


def shared_memory(kernel, cache: str, constants: dict[str, float], **options: int) -> int:  # noqa: ANN001
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


def main() -> None:
    for head_dim, num_query, window, tree, cache in (
        (128, 1, 0, False, "*bf16"),
        (80, 4, 500, True, "*bf16"),
        (128, 4, 0, False, "*fp8e4nv"),
        (128, 8, 0, True, "*fp8e4nv"),
    ):
        dim, tile = triton.next_power_of_2(head_dim), keys_per_tile(64, DTYPE)
        constants = {
            **{
                "NUM_KV_HEADS": 8,
                "NUM_HEADS": 16,
                "HEADS_PADDED": 8,
                "LIMIT": 448.0 if cache == "*fp8e4nv" else 0.0,
                "GROUP_SIZE": 2,
                "HEAD_DIM": head_dim,
                "DIM_PADDED": dim,
            },
            **{
                "CHUNK": 256,
                "NUM_CHUNKS": 32,
                "CHUNKS_PADDED": 32,
                "PACKED": num_query * 2,
                "WINDOW": window,
                "TREE": tree,
            },
            **{"BLOCK_SIZE": 64, "TILE": tile, "TILE_QUERIES": PACKED_ROWS // 2},
        }
        launches = (
            (decode_kernel, 16, 2),
            (prefill_kernel, PACKED_ROWS, 8),
            (merge_kernel, 1, 4),
            (kv_write_kernel, 1, 4),
            (kv_move_kernel, 1, 1),
        )
        for kernel, rows, warps in launches:
            stages = stages_for(2 * tile * dim * DTYPE.itemsize, rows * dim * DTYPE.itemsize)
            size = shared_memory(kernel, cache, constants | {"M": rows}, num_warps=warps, num_stages=stages)
            sys.stdout.write(f"{kernel.fn.__name__} {head_dim} {size}\n")


if __name__ == "__main__":
    main()
