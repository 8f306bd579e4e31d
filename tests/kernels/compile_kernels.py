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
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pellucid.kernels.block_fp8_matmul import block_fp8_matmul_kernel, tile_for
from pellucid.kernels.decode_attention import MAX_CHUNKS, decode_kernel
from pellucid.kernels.hopper_prefill import PART, ROWS, hopper_prefill_kernel
from pellucid.kernels.kv_move import kv_move_kernel
from pellucid.kernels.paged_attention import keys_per_tile, stages_for
from pellucid.kernels.prefill_attention import PACKED_ROWS, prefill_kernel
from pellucid.kernels.qkv_rope import program_size, qkv_rope_kernel
from pellucid.kernels.quantize_fp8 import FP8_MAX, INVERSE_MAX, SMALLEST, quantize_fp8_kernel
from pellucid.kernels.rms_norm import MAX_DIM, add_rms_norm_kernel, warps_for
from pellucid.kernels.sample import best_kernel, draw_kernel
from pellucid.kernels.silu_mul import ACTIVATIONS, BLOCK, silu_mul_kernel
from pellucid.kernels.small_matmul import gemv_kernel, split_k_kernel

HOPPER = GPUTarget("cuda", 90, 32)
DTYPE = torch.bfloat16
POINTERS = {"block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr", "first_drafts_ptr"} | {
    "arrivals_ptr",
    "tokens_ptr",
    "part_tokens_ptr",
}
PARTIAL = {
    "partial_ptr",
    "statistics_ptr",
    "rope_ptr",
    "values_ptr",
    "part_values_ptr",
    "x_scale_ptr",
    "weight_scale_ptr",
}
LONG = {"slot_mapping_ptr", "codes_ptr", "seeds_ptr", "slots_ptr", "positions_ptr"} | {
    "ancestors_ptr",
    "sources_ptr",
    "targets_ptr",
}
FP8_TYPES = {
    "x_scale_ptr": "*fp32",
    "weight_scale_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "static_ptr": "*fp32",
}


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
    return "*bf16" if name.endswith("_ptr") else "fp32" if name.endswith(("scale", "eps")) else "i32"


def shared_memory(kernel, stored: str, constants: dict[str, float | str | None], **options: int) -> int:  # noqa: ANN001
    """Compile for a Hopper GPU.  Bytes of shared memory a program takes."""
    types = {name: signature_of(name, stored) for name in kernel.arg_names}
    return compiled_size(kernel, types, constants, **options)


def compiled_size(kernel, types: dict[str, str], constants: dict[str, float | None], **options: int) -> int:  # noqa: ANN001
    """The same, with the type of each argument that is no constant."""
    names = kernel.arg_names
    constants = {"DEPENDENT": True} | constants
    chosen = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in chosen else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n] not in ("constexpr", "fp32") and not signature[n].startswith("tensordesc")
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(
        kernel, signature, constexprs={(names.index(n),): v for n, v in chosen.items()}, attrs=aligned
    )
    return triton.compile(source, target=HOPPER, options=options).metadata.shared


def main() -> None:
    compile_attention()
    compile_hopper_prefill()
    compile_products()
    compile_draw()
    compile_quantization()
    compile_passes()


def compile_passes() -> None:
    """What lies between products, and between products and attention."""
    for head_dim, rotary_dim, cache in ((128, 128, "*bf16"), (80, 40, "*bf16"), (128, 64, "*fp8e4nv")):
        heads, num_warps = program_size(4096)
        constants = {
            **{"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64, "HEADS": heads},
            **{"HALF": rotary_dim // 2, "HALF_PADDED": triton.next_power_of_2(rotary_dim // 2)},
            **{"REST_PADDED": triton.next_power_of_2(max(1, head_dim - rotary_dim))},
            **{"HAS_NORM": True, "HAS_ROPE": True, "LIMIT": 448.0 if cache == "*fp8e4nv" else 0.0},
        }
        size = shared_memory(qkv_rope_kernel, cache, constants, num_warps=num_warps)
        sys.stdout.write(f"qkv_rope_kernel {head_dim} {size}\n")
    for dim in (1024, MAX_DIM):
        constants = {"DIM": dim, "DIM_PADDED": dim, "HAS_RESIDUAL": True}
        size = shared_memory(add_rms_norm_kernel, "*bf16", constants, num_warps=warps_for(dim))
        sys.stdout.write(f"add_rms_norm_kernel {dim} {size}\n")
    for act in ACTIVATIONS:
        constants = {"HIDDEN": 3072, "ACT": act, "BLOCK": BLOCK}
        size = shared_memory(silu_mul_kernel, "", constants, num_warps=4)
        sys.stdout.write(f"silu_mul_kernel {act} {size}\n")


def compile_products() -> None:
    """Weights as they are, and FP8 ones with scales; the largest tiles that tables may name."""
    for stored in ("*bf16", "*fp8e4nv"):
        scale = {"weight_scale_ptr": None, "x_scale_ptr": None} if stored == "*bf16" else {}
        launches = (
            (gemv_kernel, {"ROWS": 4, "BLOCK_N": 4, "BLOCK_K": 2048, "ACT": None}, 8, 1),
            (gemv_kernel, {"ROWS": 1, "BLOCK_N": 4, "BLOCK_K": 1024, "ACT": "silu"}, 4, 1),
            (split_k_kernel, {"ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 128, "ACT": None}, 4, 4),
            (split_k_kernel, {"ROWS": 32, "BLOCK_N": 64, "BLOCK_K": 128, "ACT": "silu"}, 4, 3),
            (split_k_kernel, {"ROWS": 64, "BLOCK_N": 64, "BLOCK_K": 128, "ACT": None}, 4, 3),
            (split_k_kernel, {"ROWS": 256, "BLOCK_N": 128, "BLOCK_K": 64, "ACT": None}, 8, 3),
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
                "GROUP_SIZE": 2,
                "HEADS_PADDED": 8,
                "HEAD_DIM": head_dim,
                "DIM_PADDED": dim,
            },
            **{
                "MAX_CHUNKS": MAX_CHUNKS,
                "lines": None,
                "PACKED": num_query * 2,
                "WINDOW": window,
                "TREE": tree,
            },
            **{"BLOCK_SIZE": 64, "TILE": tile, "TILE_QUERIES": PACKED_ROWS // 2},
        }
        launches = (
            (decode_kernel, 16, 2),
            (prefill_kernel, PACKED_ROWS, 8),
            (kv_move_kernel, 1, 1),
        )
        for kernel, rows, warps in launches:
            stages = stages_for(2 * tile * dim * DTYPE.itemsize, rows * dim * DTYPE.itemsize)
            size = shared_memory(kernel, cache, constants | {"M": rows}, num_warps=warps, num_stages=stages)
            sys.stdout.write(f"{kernel.fn.__name__} {head_dim} {size}\n")


def compile_hopper_prefill() -> None:
    part, rows = PART.value, ROWS.value
    for head_dim, group_size in ((128, 1), (128, 2), (128, 8), (64, 4)):
        box = [rows // group_size, group_size, part]
        layouts = [gl.NVMMASharedLayout(128, 16, rank) for rank in (3, 2)]
        constants = {"NUM_KV_HEADS": 8, "GROUP_SIZE": group_size, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64}
        constants |= {"DEPENDENT": True}
        names = [name for name in hopper_prefill_kernel.arg_names if name not in constants]
        types = {name: signature_of(name, "") for name in names}
        types |= {"queries": f"tensordesc<bf16{box},{layouts[0]!r}>"}
        types |= {"lines": f"tensordesc<bf16{[part, part]},{layouts[1]!r}>"}
        size = compiled_size(hopper_prefill_kernel, types, constants, num_warps=4)
        sys.stdout.write(f"hopper_prefill_kernel {head_dim}x{group_size} {size}\n")


def compile_quantization() -> None:
    """Rounding to FP8, by rows and by blocks, and products of blocks."""
    for features, group in ((12288, 12288), (12288, 128)):
        constants = {"K": features, "GROUP": group, "GROUPS": features // group, "IS_STATIC": False}
        constants |= {"LIMIT": FP8_MAX, "INVERSE_LIMIT": INVERSE_MAX, "SMALLEST": SMALLEST}
        constants |= {"GROUP_PADDED": triton.next_power_of_2(group)}
        constants |= {"GROUPS_PADDED": triton.next_power_of_2(features // group)}
        types = {"x_ptr": "*bf16", "out_ptr": "*fp8e4nv", "x_stride": "i32", **FP8_TYPES}
        size = compiled_size(quantize_fp8_kernel, types, constants, num_warps=16)
        sys.stdout.write(f"{quantize_fp8_kernel.fn.__name__} {group} {size}\n")
    for num_tokens in (1, 64, 1000):
        rows, columns, warps = tile_for(num_tokens)
        constants = {"N": 4096, "K": 4096, "BLOCK": 128, "ROWS": rows, "COLUMNS": columns}
        types = {"x_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv", "out_ptr": "*bf16", "num_tokens": "i32"}
        size = compiled_size(
            block_fp8_matmul_kernel, types | FP8_TYPES, constants, num_warps=warps, num_stages=4
        )
        sys.stdout.write(f"{block_fp8_matmul_kernel.fn.__name__} {num_tokens} {size}\n")


if __name__ == "__main__":
    main()
