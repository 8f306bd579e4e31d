"""Compile the kernels for a GPU on a machine without one.

What the interpreter accepts, the compiler may refuse; and what it compiles must fit a GPU's shared memory.
Runs in a process of its own, `python -m tests.kernels.compile_kernels`, because of the interpreter.  Writes
one line a kernel: its name, a size, bytes of shared memory.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pellucid.kernels.decode_attention import decode_kernel, merge_kernel
from pellucid.kernels.kv_write import kv_write_kernel
from pellucid.kernels.paged_attention import keys_per_tile, stages_for
from pellucid.kernels.prefill_attention import PACKED_ROWS, prefill_kernel
from pellucid.kernels.sample import best_kernel, draw_kernel
from pellucid.kernels.small_matmul import gemv_kernel, split_k_kernel

HOPPER = GPUTarget("cuda", 90, 32)
DTYPE = torch.bfloat16
POINTERS = {"block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"} | {
    "arrivals_ptr",
    "tokens_ptr",
    "part_tokens_ptr",
}
PARTIAL = {
    "partial_ptr",
    "statistics_ptr",
    "values_ptr",
    "part_values_ptr",
    "x_scale_ptr",
    "weight_scale_ptr",
}
LONG = {"slot_mapping_ptr", "codes_ptr", "seeds_ptr", "slots_ptr", "positions_ptr"}


def signature_of(name: str, stored: str) -> str:
    """Triton's word for the type of a kernel's argument.  stored: of the elements of a cache or a weight."""
    if name in ("cache_ptr", "weight_ptr"):
        return stored
    if name in POINTERS:
        return "*i32"
    if name in PARTIAL:
        return "*fp32"
    if name in LONG:
        return "*i64"
    if name == "temperatures_ptr":
        return "*fp64"
    return "*bf16" if name.endswith("_ptr") else "fp32" if name.endswith("scale") else "i32"


def shared_memory(kernel, stored: str, constants: dict[str, float | None], **options: int) -> int:  # noqa: ANN001
    """Compile for a Hopper GPU.  Bytes of shared memory a program takes."""
    names = kernel.arg_names
    chosen = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in chosen else signature_of(name, stored) for name in names}
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
    compile_attention()
    compile_products()
    compile_draw()


def compile_products() -> None:
    """Weights as they are, and FP8 ones with scales; the largest tiles that tables may name."""
    for stored in ("*bf16", "*fp8e4nv"):
        scale = {"weight_scale_ptr": None, "x_scale_ptr": None} if stored == "*bf16" else {}
        launches = (
            (gemv_kernel, {"ROWS": 4, "BLOCK_N": 4, "BLOCK_K": 2048}, 8, 1),
            (split_k_kernel, {"ROWS": 16, "BLOCK_N": 32, "BLOCK_K": 256}, 4, 3),
            (split_k_kernel, {"ROWS": 64, "BLOCK_N": 64, "BLOCK_K": 128}, 4, 3),
            (split_k_kernel, {"ROWS": 256, "BLOCK_N": 128, "BLOCK_K": 64}, 8, 3),
        )
        for kernel, tile, warps, stages in launches:
            constants = tile | scale | {"bias_ptr": None}
            size = shared_memory(kernel, stored, constants, num_warps=warps, num_stages=stages)
            sys.stdout.write(f"{kernel.fn.__name__} {tile['ROWS']} {size}\n")


def compile_draw() -> None:
    for rows, block in ((1, 1024), (8, 256)):
        tile = {"ROWS": rows, "BLOCK": block, "IS_NVIDIA": True}
        sys.stdout.write(f"draw_kernel {rows} {shared_memory(draw_kernel, '', tile, num_warps=4)}\n")
    size = shared_memory(best_kernel, "", {"PARTS_PADDED": 1024}, num_warps=4)
    sys.stdout.write(f"best_kernel 1024 {size}\n")


def compile_attention() -> None:
    for head_dim, num_query, window, cache in (
        (128, 1, 0, "*bf16"),
        (80, 4, 500, "*bf16"),
        (128, 4, 0, "*fp8e4nv"),
    ):
        dim, tile = triton.next_power_of_2(head_dim), keys_per_tile(64, DTYPE)
        constants = {
            **{
                "NUM_KV_HEADS": 8,
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
            },
            **{"BLOCK_SIZE": 64, "TILE": tile, "TILE_QUERIES": PACKED_ROWS // 2},
        }
        launches = (
            (decode_kernel, 16, 2),
            (prefill_kernel, PACKED_ROWS, 8),
            (merge_kernel, 1, 4),
            (kv_write_kernel, 1, 4),
        )
        for kernel, rows, warps in launches:
            stages = stages_for(2 * tile * dim * DTYPE.itemsize, rows * dim * DTYPE.itemsize)
            size = shared_memory(kernel, cache, constants | {"M": rows}, num_warps=warps, num_stages=stages)
            sys.stdout.write(f"{kernel.fn.__name__} {head_dim} {size}\n")


if __name__ == "__main__":
    main()
