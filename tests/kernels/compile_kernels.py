# Constants of kernels are dicts of many kinds of value.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Compile the kernels for a GPU on a machine without one.

What the interpreter accepts, the compiler may refuse; and what it compiles must fit a GPU's shared memory.
Runs in a process of its own, `python -m tests.kernels.compile_kernels`, because of the interpreter.  Writes
one line a kernel: its name, a size, bytes of shared memory.  Every kernel is compiled for Hopper, in the
variants that differ most, and some for older GPUs: with `--all` every variant of each.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from pellucid.kernels.attention import decode_attention as decode
from pellucid.kernels.attention import latent_decode as latent
from pellucid.kernels.attention.decode_merge import copies_for
from pellucid.kernels.attention.hopper_prefill import PART, ROWS, hopper_prefill_kernel
from pellucid.kernels.attention.kv_move import kv_move_kernel
from pellucid.kernels.attention.latent_expand import latent_expand_kernel
from pellucid.kernels.attention.latent_expand import tile_for as expand_tile
from pellucid.kernels.attention.latent_prefill import latent_prefill_kernel
from pellucid.kernels.attention.latent_rope import latent_rope_kernel
from pellucid.kernels.attention.paged_attention import SHARED_MEMORY, padded_heads
from pellucid.kernels.attention.prefill_attention import (
    PACKED_ROWS,
    keys_per_tile,
    prefill_kernel,
    stages_for,
)
from pellucid.kernels.attention.prefill_plan import plan_kernel
from pellucid.kernels.attention.qkv_rope import program_size, qkv_rope_kernel
from pellucid.kernels.experts.experts import (
    FEW,
    FEW_DOWN,
    TILES,
    few_down_kernel,
    few_gate_up_kernel,
    fitted,
    grouped_kernel,
    sum_pairs_kernel,
)
from pellucid.kernels.experts.packed_experts import (
    gather_pairs_kernel,
    packed_grouped_kernel,
    sort_rows_kernel,
    write_numbers_kernel,
)
from pellucid.kernels.experts.packed_experts_hopper import (
    expert_tile,
    groups_of_step,
    packed_experts_hopper_kernel,
    part_of,
)
from pellucid.kernels.experts.packed_experts_hopper import registers_of as registers_of_experts
from pellucid.kernels.experts.routing import (
    few_logits_kernel,
    logit_parts_kernel,
    part_tile,
    route_kernel,
    sort_kernel,
)
from pellucid.kernels.experts.sum_norm import sum_norm_kernel, summing_warps
from pellucid.kernels.packed.packed_gemv import gemv_tile, packed_gemv_kernel, products, writing_pairs
from pellucid.kernels.packed.packed_hopper import assembly as assembly_of
from pellucid.kernels.packed.packed_hopper import packed_hopper_kernel
from pellucid.kernels.packed.packed_matmul import dequantize_kernel, packed_matmul_kernel
from pellucid.kernels.packed.packed_weight import Numbers
from pellucid.kernels.pointwise.embedding import embed_codes_kernel, embed_share_kernel
from pellucid.kernels.pointwise.rms_norm import MAX_DIM, add_rms_norm_kernel, warps_for
from pellucid.kernels.pointwise.silu_mul import ACTIVATIONS, BLOCK, silu_mul_kernel, silu_mul_rounded_kernel
from pellucid.kernels.products.bytes_gemv import LANES, bytes_gemv_kernel
from pellucid.kernels.products.heads_matmul import TILE as HEADS_TILE
from pellucid.kernels.products.heads_matmul import heads_matmul_kernel
from pellucid.kernels.products.hopper_matmul import LINE_BYTES, LINES, hopper_matmul_kernel
from pellucid.kernels.products.lora import (
    BLOCK_K,
    BLOCK_N,
    MANY,
    SOME,
    WIDE_BLOCK,
    expand_kernel,
    expand_wide_kernel,
    gate_wide_kernel,
    shrink_kernel,
    wide_tile,
)
from pellucid.kernels.products.lora import FEW as FEW_TOKENS
from pellucid.kernels.products.persistent_matmul import OUTS, persistent_matmul_kernel
from pellucid.kernels.products.persistent_matmul import ROWS as PERSISTENT_ROWS
from pellucid.kernels.products.round_rows import cut, round_rows_kernel
from pellucid.kernels.products.round_rows import warps_for as warps_to_round
from pellucid.kernels.products.scaled_matmul import scaled_matmul_kernel, step_for, tile_for
from pellucid.kernels.products.scaled_matmul import stages_for as scaled_stages
from pellucid.kernels.products.small_matmul import gemv_kernel, split_k_kernel
from pellucid.kernels.ranks.all_reduce import best_kernel as best_of_ranks_kernel
from pellucid.kernels.ranks.all_reduce import (
    gather_kernel,
    memory_shape,
    padded_words,
    sum_add_rms_norm_kernel,
    sum_kernel,
)
from pellucid.kernels.sampling.cap_logits import BLOCK as LOGITS
from pellucid.kernels.sampling.cap_logits import cap_logits_kernel
from pellucid.kernels.sampling.mask_logits import BLOCK as MASKED_LOGITS
from pellucid.kernels.sampling.mask_logits import mask_logits_kernel
from pellucid.kernels.sampling.noise import BLOCK as NUMBERS
from pellucid.kernels.sampling.noise import noise_kernel
from pellucid.kernels.sampling.sample import BLOCKS, BLOCKS_OF_FEW, block_kernel, token_kernel
from pellucid.kernels.sampling.trees import tree_places_kernel, verify_tree_kernel
from pellucid.kernels.sampling.verify_chain import take_by_chance_kernel, verify_chain_kernel
from pellucid.kernels.slots.advance_slots import advance_kernel, drafts_kernel
from pellucid.kernels.slots.draft_places import draft_places_kernel
from pellucid.kernels.slots.gather_rows import rows_kernel
from pellucid.kernels.slots.prompt_lookup import BLOCK as LOOKED_AT
from pellucid.kernels.slots.prompt_lookup import prompt_lookup_kernel
from pellucid.kernels.slots.spread import ROWS as UNPACKED_ROWS
from pellucid.kernels.slots.spread import pack_kernel, unpack_kernel, words_of

HOPPER = GPUTarget("cuda", 90, 32)
ADA = GPUTarget("cuda", 89, 32)  # such as an L4
AMPERE = GPUTarget("cuda", 80, 32)
BLACKWELL = GPUTarget("cuda", 100, 32)  # such as a B200
RTX = GPUTarget("cuda", 120, 32)  # Blackwell with an L4's shared memory, such as an RTX 5090
FP8_LIMITS = {"*fp8e4nv": 448.0, "*fp8e5": 57344.0}
FP8_HEADS = [(128, 64, stored) for stored in FP8_LIMITS]
# Bytes of shared memory that attention plans for.
ROOM = {HOPPER: SHARED_MEMORY, ADA: 99 * 1024, BLACKWELL: SHARED_MEMORY, RTX: 99 * 1024}
DTYPE = torch.bfloat16
ALL = "--all" in sys.argv
COMPILED: set[str] = set()  # names of kernels
Variant = TypeVar("Variant")
POINTERS = {
    "plan_ptr",
    "block_table_ptr",
    "seq_lens_ptr",
    "cu_seqlens_q_ptr",
    "tiles_ptr",
    "first_drafts_ptr",
} | {
    *("arrivals_ptr", "tokens_ptr", "blocks_ptr", "part_blocks_ptr", "token_ids_ptr", "input_ids_ptr"),
    *("cu_seqlens_ptr", "logit_inputs_ptr", "table_ptr", "rows_ptr"),
    *("chosen_ptr", "inputs_ptr", "flat_ptr", "num_new_ptr", "drafts_ptr", "taken_ptr", "fed_ptr"),
}
PARTIAL = {
    "partial_ptr",
    "room_ptr",
    "statistics_ptr",
    "rope_ptr",
    "values_ptr",
    "part_values_ptr",
    "rates_ptr",
    "x_scale_ptr",
    "weight_scale_ptr",
}
LONG = {"slot_mapping_ptr", "cu_keys_ptr", "codes_ptr", "seeds_ptr", "slots_ptr", "positions_ptr"} | {
    "ancestors_ptr",
    "sources_ptr",
    "targets_ptr",
    *("cu_query_ptr", "cu_logits_ptr", "num_drafts_ptr", "num_computed_ptr", "limits_ptr", "places_ptr"),
    *("starts_ptr", "roots_ptr", "room_ptr", "logit_slots_ptr", "logit_places_ptr", "mapping_ptr"),
    *("num_query_ptr", "newest_ptr", "step_positions_ptr", "logits_index_ptr", "drawn_ptr"),
}
FP8_TYPES = {
    "x_scale_ptr": "*fp32",
    "weight_scale_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "static_ptr": "*fp32",
}

TO_FP8 = FP8_TYPES | {
    **dict.fromkeys(("x_ptr", "gate_up_ptr", "stream_ptr", "weight_ptr"), "*bf16"),
    **dict.fromkeys(("x_stride", "gate_up_stride", "stream_stride"), "i32"),
    "out_ptr": "*fp8e4nv",
    **dict.fromkeys(("eps", "post_eps", "post_scale"), "fp32"),
}
FROM_FP8 = FP8_TYPES | {
    **dict.fromkeys(("x_ptr", "weight_ptr"), "*fp8e4nv"),
    **dict.fromkeys(("num_rows", "num_out", "num_in", "x_stride"), "i32"),
    "out_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "arrivals_ptr": "*i32",
}
OF_INT8 = FROM_FP8 | dict.fromkeys(("x_ptr", "weight_ptr"), "*i8") | {"partial_ptr": "*i32"}


# What a thread of plain models' kernels may have on Hopper, of which nothing may go to memory.
REGISTERS = {
    "decode_kernel": 248,
    "prefill_kernel": 232,
    "gemv_kernel": 208,
    "persistent_matmul_kernel": 168,
    "add_rms_norm_kernel": 64,
    "silu_mul_kernel": 40,
    "block_kernel": 104,
    "token_kernel": 40,
}


def few(variants: Sequence[Variant], *places: int) -> Sequence[Variant]:
    """Those at `places`, by default the first: what every run compiles of all that `--all` does."""
    return variants if ALL else [variants[place] for place in places or (0,)]


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
    if name == "samples_ptr":
        return "*i1"
    return "*bf16" if name.endswith("_ptr") else "fp32" if name.endswith(("scale", "eps", "cap")) else "i32"


def shared_memory(  # noqa: ANN201
    kernel,  # noqa: ANN001
    stored: str,
    constants: dict[str, float | str | None],
    target: GPUTarget = HOPPER,
    own: dict[str, str] | None = None,
    **options: int,
) -> int:
    """Compile for a GPU.  own: types of some arguments.  Bytes of shared memory a program takes."""
    types = {name: signature_of(name, stored) for name in kernel.arg_names} | (own or {})
    return compiled(kernel, types, constants, target, **options).metadata.shared


def compiled_size(
    kernel, types: dict[str, str], constants: dict[str, float | str | None], **options: int
) -> int:  # noqa: ANN001
    """The same for a Hopper GPU, with the type of each argument that is no constant."""
    return compiled(kernel, types, constants, **options).metadata.shared


def compiled(  # noqa: ANN201
    kernel,  # noqa: ANN001
    types: dict[str, str],
    constants: dict[str, float | str | None],
    target: GPUTarget = HOPPER,
    **options: int,
):
    """What Triton makes of it."""
    names = kernel.arg_names
    constants = {"DEPENDENT": True} | constants
    chosen = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in chosen else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n] not in ("constexpr", "fp32")
        and not signature[n].startswith("tensordesc")
        and not kernel.params[i].do_not_specialize
    }
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(
        kernel, signature, constexprs={(names.index(n),): v for n, v in chosen.items()}, attrs=aligned
    )
    made = triton.compile(source, target=target, options=options)
    COMPILED.add(kernel.fn.__name__)
    most = REGISTERS.get(kernel.fn.__name__)
    is_plain = not any(constants.get(name) for name in ("TREE", "CAPPED", "REACH"))
    if target == HOPPER and most is not None and is_plain:
        registers, stack = resources_of(made.asm["cubin"])
        assert registers <= most and not stack, (kernel.fn.__name__, constants, registers, stack)
    return made


def resources_of(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where registers go for which there is no room."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        cuobjdump = triton.knobs.nvidia.cuobjdump.path  # pyright: ignore[reportAttributeAccessIssue]
        command = [cuobjdump, "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def main() -> None:
    for target in few(list(ROOM), 0, 1):
        compile_attention(target)
        compile_decode(target)
    for target in few(list(ROOM)):
        compile_latent(target)
    compile_hopper_prefill()
    compile_hopper_matmul()
    compile_persistent_matmul()
    compile_products()
    compile_draw()
    compile_quantization()
    compile_scaled_products()
    compile_packed()
    compile_packed_hopper()
    compile_packed_gemv()
    compile_packed_experts()
    compile_packed_experts_hopper()
    if ALL:
        for target in (ADA, BLACKWELL, RTX):
            compile_few_rows(target)
    compile_passes()
    compile_exchanges()
    compile_spread()
    compile_adapters()
    compile_ends()
    for target in few(list(ROOM)):
        compile_experts(target)
    missing = kernels_of_package() - COMPILED
    assert not missing, f"nobody compiles {', '.join(sorted(missing))}"


def kernels_of_package() -> set[str]:
    """The names of all kernels that are launched, as their sources tell them."""
    sources = (Path(__file__).parents[2] / "pellucid" / "kernels").rglob("*.py")
    return {name for file in sources for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}


def compile_experts(target: GPUTarget) -> None:
    """Routing and sorting, products of few tokens and of many, in each tile; and sums."""
    types = {
        **dict.fromkeys(("logits_ptr", "x_ptr", "weight_ptr", "hidden_ptr", "pairs_ptr"), "*bf16"),
        **dict.fromkeys(("more_ptr", "more_gate_ptr", "out_ptr", "stream_ptr"), "*bf16"),
        **dict.fromkeys(("ids_ptr", "end_ptr", "token_ids_ptr", "order_ptr", "starts_ptr"), "*i32"),
        **dict.fromkeys(("places_ptr",), "*i32"),
        **dict.fromkeys(("tiles_ptr",), "*i32"),
        **dict.fromkeys(("weights_ptr",), "*fp32"),
        **dict.fromkeys(("bias_ptr", "added_ptr"), "*bf16"),
        **dict.fromkeys(("scale", "floor", "limit", "alpha", "eps"), "fp32"),
        **dict.fromkeys(
            ("stride", "stream_stride", "out_stride", "salt", "first", "num_here", "num_pairs", "num_tiles"),
            "i32",
        ),
        **dict.fromkeys(("x_stride", "more_stride", "num_experts", "num_tokens", "part_stride"), "i32"),
        **dict.fromkeys(("first_expert",), "i32"),
        "positions_ptr": "*i64",
    }
    common = {"TOP_K": 8, "K_PADDED": 8, "E": 60, "E_PADDED": 64} | follows(target)
    router = {
        "PARTS": 4,
        "DTYPE": gl.bfloat16,
        "SIGMOID": True,
        "RENORMALISE": True,
        "GROUPS": 4,
        "TOP_GROUPS": 2,
        "TOP2": True,
    }
    of_few = {"NUM_OUT": 1536, "NUM_IN": 2048, "ACT": "silu", "WEIGHS": True}
    few_turns = {"OUTS": FEW_DOWN.outs, "STEP": FEW_DOWN.step, "NUM_IN": 2048 if ALL else 768}  # unrolled
    launches = [
        (route_kernel, router, 1),
        (sort_kernel, {"TILE": 16, "BLOCK": 8192}, 4),
        (few_gate_up_kernel, of_few | {"OUTS": FEW.outs, "STEP": FEW.step}, FEW.num_warps),
        (few_down_kernel, of_few | few_turns, FEW_DOWN.num_warps),
        (sum_pairs_kernel, {"DIM": 2048, "BLOCK": 1024, "WEIGHS": True}, 4),
        (sum_norm_kernel, {"DIM": 2880, "DIM_PADDED": 4096, "WEIGHS": True}, summing_warps(256, 4096)),
    ]
    for kernel, constants, num_warps in launches:
        size = compiled(kernel, types, common | constants, target, num_warps=num_warps).metadata.shared
        sys.stdout.write(f"{kernel.fn.__name__} {target.arch} {size}\n")
    few_of = {"NUM_IN": 7168, "PADDED": 8192}
    for weight, itemsize in (("*fp32", 4), ("*bf16", 2)):
        own = types | {"weight_ptr": weight, "out_ptr": "*fp32"}
        rows, outs, step = part_tile(60, itemsize)
        parts = {"NUM_IN": 2048, "ROWS": rows, "OUTS": outs, "STEP": step}
        size = compiled(
            logit_parts_kernel, own, common | parts, target, num_warps=4, num_stages=3
        ).metadata.shared
        sys.stdout.write(f"logit_parts_kernel {target.arch} {size}\n")
        size = compiled(few_logits_kernel, own, common | few_of, target, num_warps=4).metadata.shared
        sys.stdout.write(f"few_logits_kernel {target.arch} {size}\n")
    tiles = [
        (rows, tile, is_gated)
        for rows, both in TILES.items()
        for tile, is_gated in zip(both, (True, False), strict=True)
    ]
    for rows, full, is_gated in few(tiles, 0, -1):
        tile = fitted(full, 2, 227 * 1024 if target is HOPPER else ROOM[target], boxes=target is HOPPER)
        constants = {"NUM_OUT": 1536, "NUM_IN": 2048, "GATED": is_gated, "ACT": "silu", "ROWS": rows}
        constants |= {
            "OUTS": tile.outs,
            "STEP": tile.step,
            "SWAPPED": tile.is_swapped,
            "BOXED": tile.is_boxed,
        }
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        own = {"weight_ptr": f"tensordesc<bf16[{tile.outs},{tile.step}]>"} if tile.is_boxed else {}
        size = compiled(grouped_kernel, types | own, common | constants, target, **options).metadata.shared
        sys.stdout.write(f"grouped_kernel {target.arch} {size}\n")


def compile_latent(target: GPUTarget) -> None:
    """DeepSeek's sizes: one query of 16 heads, and what fills a program."""
    of = {"RANK": 512, "ROTARY": 64, "ROTARY_PADDED": 64, "HALF_PADDED": 256, "RANK_PADDED": 512}
    of |= {"DEPENDENT": target == HOPPER}
    for padded, heads in few(((16, 16), (64, 64))):
        tile = latent.tile_for(1152, padded * 1152, padded, 64, ROOM[target])
        numbers = of | {"GROUPS": 1, "HEADS": heads, "PACKED": heads, "M": padded, "TILE": tile.keys}
        numbers |= {"BLOCK_SIZE": 64, "MERGED": latent.MERGED}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        kinds = ((False, {}), (True, {}), *((False, {"cache_ptr": stored}) for stored in FP8_LIMITS))
        for tree, kept in few(kinds, 1, 2):
            decode = numbers | {"TREE": tree}
            size = shared_memory(latent.latent_decode_kernel, "*bf16", decode, target, kept, **options)
            sys.stdout.write(f"latent_decode {target.arch} {padded} {size}\n")
        size = shared_memory(latent.latent_merge_kernel, "*bf16", numbers, target, num_warps=4)
        sys.stdout.write(f"latent_merge {target.arch} {padded} {size}\n")
    for num_in, num_out, strides in ((128, 512, (512, 1)), (512, 128, (1, 512))):
        matrix = {"NUM_IN": num_in, "IN_PADDED": num_in, "NUM_OUT": num_out, "OUTS": HEADS_TILE // num_in}
        matrix |= {"HEAD_STRIDE": 1 << 17, "IN_STRIDE": strides[0], "OUT_STRIDE": strides[1]}
        matrix |= {"DEPENDENT": target == HOPPER}
        size = shared_memory(heads_matmul_kernel, "*bf16", matrix, target, num_warps=4)
        sys.stdout.write(f"heads_matmul_kernel {target.arch} {size}\n")
    numbers = {"NOPE": 128, "NOPE_PADDED": 128, "VALUE": 128, "VALUE_PADDED": 128, "M": 128, "TILE": 64}
    numbers |= {"TREE": False}
    tile_bytes, query_bytes = 64 * 320 * 2, 128 * 192 * 2
    options = {"num_warps": 8, "num_stages": stages_for(tile_bytes, query_bytes, ROOM[target])}
    size = shared_memory(latent_prefill_kernel, "*bf16", of | numbers, target, **options)
    name = "hopper_latent_prefill" if target == HOPPER else "latent_prefill"
    sys.stdout.write(f"{name} {target.arch} {size}\n")
    numbers = {"NUM_HEADS": 16, "HEAD_DIM": 192, "HALF": 32, "HALF_PADDED": 32, "HEADS": 16}
    numbers |= {"INTERLEAVED": True}
    for stored in few(("*bf16", *FP8_LIMITS), 0, 1):
        kept = {"cache_ptr": stored}
        rope = of | numbers | {"LIMIT": FP8_LIMITS.get(stored, 0.0)}
        size = shared_memory(latent_rope_kernel, "*bf16", rope, target, kept, num_warps=2)
        sys.stdout.write(f"latent_rope_kernel {target.arch} {size}\n")
        tile = expand_tile(2, ROOM[target])
        numbers |= {
            "WIDTH": 256,
            "BLOCK_SIZE": 64,
            "TILE": tile.keys,
            "OUTS": tile.outs,
            "STEP": tile.step,
        }
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        expand = of | numbers | {"ROWS": 64}
        size = shared_memory(latent_expand_kernel, "*bf16", expand, target, kept, **options)
        sys.stdout.write(f"latent_expand_kernel {target.arch} {size}\n")


def compile_exchanges() -> None:
    """Between ranks; words of 32 bits."""
    for size in few((2, 8)):
        _, _, rows, words = memory_shape(size)
        mailbox = {"RANK": 1, "SIZE": size, "ROWS": rows, "WORDS": words, "DEPENDENT": False}
        row = {"NUM_WORDS": words, "PADDED": words, "DTYPE": triton.language.bfloat16}
        sum_norm = row | {"HAS_RESIDUAL": True, "IS_SCALED": False, "post_ptr": None}
        short = row | {"NUM_WORDS": 100, "PADDED": padded_words(100)}
        for kernel, constants, num_warps, num_messages in (
            (sum_kernel, row, 16, 1),
            (sum_kernel, short, 1, 1),
            (sum_add_rms_norm_kernel, sum_norm, 16, 1),
            (gather_kernel, {"PADDED": 1024}, 8, 1),
            (best_of_ranks_kernel, {"PADDED": words // 2}, 8, 2),
            (best_of_ranks_kernel, {"PADDED": padded_words(1)}, 1, 2),
        ):
            types = dict.fromkeys(kernel.arg_names, "*i32")
            types |= {"addresses_ptr": "*i64", "num_words": "i32", "num": "i32"}
            types |= dict.fromkeys(("eps", "post_eps", "post_scale"), "fp32")
            made = compiled(kernel, types, mailbox | constants, num_warps=num_warps)
            # Sums load what all ranks send at one place, others what each sends at one, and at a second one
            # where it was missing.  As in `compile_decode`, nobody would look at a further copy.
            places = 1 if kernel in (sum_kernel, sum_add_rms_norm_kernel) else 2
            num_loads = made.asm["ttgir"].count("isVolatile = true")
            assert num_loads == num_messages * size * places, (kernel.fn.__name__, constants)
            sys.stdout.write(f"{kernel.fn.__name__} {size} {made.metadata.shared}\n")
    types = {"ids_ptr": "*i32", "table_ptr": "*bf16", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("first", "share", "dim"), "i32")
    sized = compiled_size(embed_share_kernel, types, {"BLOCK": 1024, "DEPENDENT": False}, num_warps=4)
    sys.stdout.write(f"embed_share_kernel 1024 {sized}\n")
    types |= {"scales_ptr": "*bf16", "numbers_ptr": "*fp32"}
    for codes, constants in few(
        (("*u8", {}), ("*u8", {"numbers_ptr": None}), ("*i8", {"numbers_ptr": None})), 0, 1
    ):
        constants = {"GROUP": 128, "BLOCK": 1024, "DEPENDENT": True} | constants
        sized = compiled_size(embed_codes_kernel, types | {"codes_ptr": codes}, constants, num_warps=4)
        sys.stdout.write(f"embed_codes_kernel {codes} {sized}\n")


def compile_spread() -> None:
    """Tokens with their 8 experts as messages between ranks, and their experts from messages."""
    top_k, num = 8, 7168 * DTYPE.itemsize // 4
    for kernel in (pack_kernel, unpack_kernel):
        constants = {"NUM": num, "PADDED": triton.next_power_of_2(num), "TOP_K": top_k, "K_PADDED": 8}
        constants |= {"WORDS": words_of(4 * num, top_k), "BLOCK": UNPACKED_ROWS}
        types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
        sys.stdout.write(
            f"{kernel.fn.__name__} {num} {compiled_size(kernel, types, constants, num_warps=4)}\n"
        )


def compile_adapters() -> None:
    """Of decodes and of prompts."""
    kept = {"shrunk_ptr": "*fp32", "adapters_ptr": "*i32", "num_tokens": "i32"}
    for (tile, split), rank, parts in few(
        ((FEW_TOKENS, 16, 3), (SOME, 16, 1), (MANY, 16, 3), (MANY, 64, 3)), 0, 2
    ):
        common = {"TILE": tile, "PRECISION": "tf32", "R": rank, "P": parts}
        inputs = {"K": 4096, "BLOCK": BLOCK_K, "SPLIT": min(split, 4096)}
        ends = {"END0": 4096, "END1": 5120, "N": 6144, "SPLITS": 8, "BLOCK": BLOCK_N}
        for kernel, constants, types in (
            (shrink_kernel, inputs, {"out_ptr": "*fp32"}),
            (expand_kernel, ends, {}),
        ):
            names = {name: signature_of(name, "*bf16") for name in kernel.arg_names}
            made = compiled(kernel, {**names, **kept, **types}, {**common, **constants}, num_warps=4)
            sys.stdout.write(f"{kernel.fn.__name__} {tile}x{rank}x{parts} {made.metadata.shared}\n")
    for num_tokens, num in few(((16, 1), (32, 8), (64, 8), (64, 16)), 3):
        tile = wide_tile(num_tokens, 16 * num)
        constants = ends | {"BLOCKS0": 64, "BLOCKS1": 16, "R": 16, "P": 3, "L": num, "PADDED": 16 * num}
        constants |= {"TILE": tile, "BLOCK": WIDE_BLOCK, "PRECISION": "tf32"}
        del constants["SPLITS"]
        names = {name: signature_of(name, "*bf16") for name in expand_wide_kernel.arg_names}
        types = {"adapters_ptr": "*i32", "num_tokens": "i32"}
        made = compiled(expand_wide_kernel, {**names, **types}, constants, num_warps=4)
        sys.stdout.write(f"expand_wide_kernel {tile}x{num} {made.metadata.shared}\n")
        constants = {name: constants[name] for name in ("R", "L", "PADDED", "TILE", "BLOCK", "PRECISION")}
        constants |= {"H": 12288, "ACT": "silu"}
        names = {name: signature_of(name, "*bf16") for name in gate_wide_kernel.arg_names}
        made = compiled(gate_wide_kernel, {**names, **types}, constants, num_warps=4)
        sys.stdout.write(f"gate_wide_kernel {tile}x{num} {made.metadata.shared}\n")


def compile_ends() -> None:
    """What lies before the model, and behind the draw."""
    for block_size in (16, 64):
        constants = {"BLOCK_SIZE": block_size, "BLOCK": 256, "IS_FIRST": True, "DEPENDENT": True}
        size = shared_memory(rows_kernel, "", constants)
        sys.stdout.write(f"rows_kernel {block_size} {size}\n")
        constants = {"BLOCK_SIZE": block_size, "BLOCK": 32, "ALIGNED": 4, "DEPENDENT": True}
        size = shared_memory(draft_places_kernel, "", constants, num_warps=1)
        sys.stdout.write(f"draft_places_kernel {block_size} {size}\n")
    constants = {"PURPOSE": 1, "NODES": 32, "DEPENDENT": True}
    size = shared_memory(take_by_chance_kernel, "", constants, num_warps=1)
    sys.stdout.write(f"take_by_chance_kernel 32 {size}\n")
    types = {"seeds_ptr": "*i64", "positions_ptr": "*i64"}
    types |= dict.fromkeys(("num", "seed_stride", "position_stride"), "i32")
    for out in ("*i64", "*fp32"):
        constants = {"PURPOSE": 1, "BLOCK": NUMBERS}
        size = compiled_size(noise_kernel, types | {"out_ptr": out}, constants, num_warps=4)
        sys.stdout.write(f"noise_kernel {out} {size}\n")
    for longest in few((5, 1)):
        constants = {"SHORTEST": 1, "LONGEST": longest, "NUM": 5, "NUM_PADDED": 8, "BLOCK": LOOKED_AT}
        types = {"token_ids_ptr": "*i32", "slots_ptr": "*i64", "newest_ptr": "*i64", "out_ptr": "*i32"}
        size = compiled_size(prompt_lookup_kernel, types | {"token_stride": "i32"}, constants, num_warps=8)
        sys.stdout.write(f"prompt_lookup_kernel {longest} {size}\n")
    constants = {"K": 6, "DRAFTS": 16, "DEPENDENT": True}
    size = shared_memory(verify_tree_kernel, "", constants, num_warps=1)
    sys.stdout.write(f"verify_tree_kernel 16 {size}\n")
    size = shared_memory(tree_places_kernel, "", {"DEPTH": 5, "BLOCK": 128, "DEPENDENT": True}, num_warps=4)
    sys.stdout.write(f"tree_places_kernel 128 {size}\n")
    for is_capped in few((True, False)):
        constants = {"BLOCK": LOGITS, "IS_CAPPED": is_capped}
        sys.stdout.write(f"cap_logits_kernel {is_capped} {shared_memory(cap_logits_kernel, '', constants)}\n")
    own = {"bits_ptr": "*i32"}
    size = shared_memory(mask_logits_kernel, "", {"BLOCK": MASKED_LOGITS}, own=own)
    sys.stdout.write(f"mask_logits_kernel {MASKED_LOGITS} {size}\n")
    for kernel in (verify_chain_kernel, advance_kernel, drafts_kernel):
        size = shared_memory(kernel, "", {"K": 5, "K_PADDED": 8, "DEPENDENT": True}, num_warps=1)
        sys.stdout.write(f"{kernel.fn.__name__} 5 {size}\n")


def compile_passes() -> None:
    """What lies between products, and between products and attention."""
    heads = ((128, 128, "*bf16"), (80, 40, "*bf16"), *FP8_HEADS)
    for head_dim, rotary_dim, cache in few(heads, 1, 2):
        at_once, num_warps = program_size(4096, head_dim)
        constants = {
            **{"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64, "HEADS": at_once},
            **{"HALF": rotary_dim // 2, "HALF_PADDED": triton.next_power_of_2(rotary_dim // 2)},
            **{"REST_PADDED": triton.next_power_of_2(max(1, head_dim - rotary_dim))},
            **{
                "HAS_NORM": True,
                "HAS_ROPE": True,
                "INTERLEAVED": False,
                "LIMIT": FP8_LIMITS.get(cache, 0.0),
            },
        }
        size = shared_memory(qkv_rope_kernel, cache, constants, num_warps=num_warps)
        sys.stdout.write(f"qkv_rope_kernel {head_dim} {size}\n")
    for dim in (1024, MAX_DIM):
        constants = {"DIM": dim, "DIM_PADDED": dim, "GROUP": dim, "HAS_RESIDUAL": True, "scales_ptr": None}
        constants |= {"static_ptr": None, "post_ptr": None, "IS_SCALED": False}
        size = shared_memory(add_rms_norm_kernel, "*bf16", constants, num_warps=warps_for(dim))
        sys.stdout.write(f"add_rms_norm_kernel {dim} {size}\n")
    for act in few(list(ACTIVATIONS)):
        constants = {"HIDDEN": 3072, "ACT": act, "BLOCK": BLOCK, "GROUP": BLOCK, "NUM_SCALES": 0}
        constants |= {"scales_ptr": None, "static_ptr": None}
        size = shared_memory(silu_mul_kernel, "", constants, num_warps=4)
        sys.stdout.write(f"silu_mul_kernel {act} {size}\n")


def compile_products() -> None:
    """Of weights as they are; the largest tiles that tables may name."""
    for rows, act, in_features in ((1, None, 12288), (1, "silu", 4096), (4, None, 3072)):
        constants = {"K": in_features, "ROWS": rows, "BLOCK_N": 8, "BLOCK_K": 2048, "ACT": act}
        constants |= {"LANE": 8, "STAGES": 4, "WARPS": 4, "bias_ptr": None}
        size = shared_memory(gemv_kernel, "*bf16", constants, num_warps=4)
        sys.stdout.write(f"gemv_kernel {in_features} {size}\n")
    for in_features, stages in ((2048, 1), (12288, 4)):  # a program with one pair of outputs
        constants = {
            "K": in_features,
            "ROWS": 1,
            "BLOCK_N": 2,
            "BLOCK_K": 2048,
            "ACT": None,
            "bias_ptr": None,
        }
        constants |= {"LANE": 8, "STAGES": stages, "WARPS": 4}
        size = shared_memory(gemv_kernel, "*bf16", constants, num_warps=4)
        assert size > stages * 2 * 2048 * DTYPE.itemsize, "copies and sums share memory"
        sys.stdout.write(f"gemv_kernel {in_features} {size}\n")
    launches = (
        (split_k_kernel, {"ROWS": 16, "BLOCK_N": 64, "BLOCK_K": 128, "ACT": None}, 4, 4),
        (split_k_kernel, {"ROWS": 32, "BLOCK_N": 64, "BLOCK_K": 128, "ACT": "silu"}, 4, 3),
        (split_k_kernel, {"ROWS": 64, "BLOCK_N": 64, "BLOCK_K": 128, "ACT": None}, 4, 3),
        (split_k_kernel, {"ROWS": 256, "BLOCK_N": 128, "BLOCK_K": 64, "ACT": None}, 8, 3),
    )
    for kernel, tile, warps, stages in few(launches, 1, 3):
        constants = tile | {"weight_scale_ptr": None, "x_scale_ptr": None, "bias_ptr": None, "GROUP": None}
        size = shared_memory(kernel, "*bf16", constants, num_warps=warps, num_stages=stages)
        sys.stdout.write(f"{kernel.fn.__name__} {tile['ROWS']} {size}\n")


def compile_draw() -> None:
    for blocks in (BLOCKS_OF_FEW, BLOCKS):
        constants = {"BLOCKS": blocks, "IS_NVIDIA": True}
        size = shared_memory(block_kernel, "", constants, num_warps=4)
        sys.stdout.write(f"block_kernel {blocks} {size}\n")
    size = shared_memory(token_kernel, "", {"PARTS_PADDED": 256, "IS_NVIDIA": True}, num_warps=1)
    sys.stdout.write(f"token_kernel 256 {size}\n")


def compile_attention(target: GPUTarget) -> None:
    variants = (
        (128, 1, 0, False, "*bf16"),
        (128, 1, -8192, False, "*bf16"),
        (80, 4, 500, True, "*bf16"),
        (128, 4, 0, False, "*fp8e4nv"),
        (128, 8, 0, True, "*fp8e5"),
    )
    for head_dim, num_query, reach, tree, cache in few(variants, *((0, 2) if target is HOPPER else (3,))):
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
                "lines": None,
                "sinks_ptr": None,
                "PACKED": num_query * 2,
                "REACH": reach,
                "TREE": tree,
                "CAPPED": False,
            },
            **{"BLOCK_SIZE": 64, "TILE": tile, "TILE_QUERIES": PACKED_ROWS // 2},
        }
        launches = (
            (prefill_kernel, PACKED_ROWS, 8),
            (kv_move_kernel, 1, 1),
        )
        for kernel, rows, warps in launches:
            tile_bytes, query_bytes = 2 * tile * dim * DTYPE.itemsize, rows * dim * DTYPE.itemsize
            options = {"num_warps": warps, "num_stages": stages_for(tile_bytes, query_bytes, ROOM[target])}
            size = shared_memory(kernel, cache, constants | {"M": rows} | follows(target), target, **options)
            sys.stdout.write(f"{kernel.fn.__name__} {head_dim} {target.arch} {size}\n")


def follows(target: GPUTarget) -> dict[str, bool]:
    """Only on Hopper do kernels start before the one before them has ended."""
    return {"DEPENDENT": target is HOPPER}


def compile_decode(target: GPUTarget) -> None:
    """Decodes and verifications of few rows, some and many; FP8 caches are read as pairs of values."""
    variants = (
        (128, 8, -8192, False, 8, None),
        (128, 1, 0, False, 8, None),
        (80, 4, 500, True, 8, None),
        (256, 1, 0, False, 8, None),
        (256, 1, 0, False, 256, None),
        (128, 1, 0, False, 2048, None),
        (128, 8, 0, False, 8, None),
        (128, 8, 0, True, 256, None),
        (128, 1, 0, False, 2048, "e4m3"),
        (128, 8, 0, False, 8, "e4m3"),
        (128, 1, 0, False, 2048, "e5m2"),
        (128, 8, 0, False, 8, "e5m2"),
        (64, 1, 128, False, 2048, None),
        (64, 1, 0, False, 2048, None),
    )
    places = (2, 3, 5, 9, 12) if target is HOPPER else (1,)
    for head_dim, num_query, reach, tree, num_pairs, fp8 in few(variants, *places):
        packed, stored = num_query * 4, "*i16" if fp8 else "*bf16"
        by_lines = num_query == 1 and not fp8 and target is HOPPER
        by_lines &= num_pairs >= decode.MIN_PAIRS_BY_LINES and not reach
        by_columns = by_lines or head_dim <= decode.SMALL_HEAD
        rows = decode.padded_queries(packed, DTYPE, bool(fp8 or by_columns))
        cache = torch.empty(1, 2, 8, 64, head_dim, dtype=torch.float8_e4m3fn if fp8 else DTYPE)
        tile = decode.tile_for(num_pairs, cache, DTYPE, rows, ROOM[target], by_lines=by_lines)
        constants: dict[str, float | str | None] = {
            **{"NUM_KV_HEADS": 8, "GROUP_SIZE": 4, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64},
            **{"DIM_PADDED": triton.next_power_of_2(head_dim), "PACKED": packed, "M": rows},
            **{"REACH": reach, "TREE": tree, "TILE": tile.keys, "FP8": fp8, "DEPENDENT": False},
            "CAPPED": False,
            **({} if by_lines else {"lines": None}),
            **({} if head_dim == 256 else {"sinks_ptr": None}),
            "COLUMNS": rows == decode.COLUMNS,
            **{
                "ROWS": decode.ROWS_AT_ONCE,
                "MERGED": (merged := decode.merged_for(packed, head_dim, by_lines=by_lines)),
            },
            "COPIES": copies_for(merged * packed, tile.num_warps),
            "CUT": not reach or num_pairs == 8,
            "MARKED": num_pairs == 8,  # all their chunks have programs
        }
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        types = {name: signature_of(name, stored) for name in decode.decode_kernel.arg_names}
        types |= {"lines": f"tensordesc<bf16[{tile.keys},{head_dim}]>"}
        kernel = compiled(decode.decode_kernel, types, constants, target, **options)
        if constants["MARKED"]:
            # What others write is loaded at one place, and again where it was missing.  A second copy, which
            # the compiler makes of a load where there are fewer numbers than threads, nobody would look at.
            assert kernel.asm["ttgir"].count("isVolatile = true") == 2 * 3, constants
        size = kernel.metadata.shared
        sys.stdout.write(f"{decode.decode_kernel.fn.__name__} {head_dim} {target.arch} {size}\n")


def compile_hopper_prefill() -> None:
    part, rows = PART.value, ROWS.value
    variants = (
        *((128, 1, None), (128, 2, None), (128, 8, 700), (64, 4, None), (128, 5, None), (64, 7, None)),
        *((64, 8, 128), (64, 8, None)),
    )
    for head_dim, group_size, window in few(variants, 1, 6):
        heads = padded_heads(group_size)
        box = [rows // heads, heads, part]
        layouts = [gl.NVMMASharedLayout(128, 16, rank) for rank in (3, 2)]
        constants = {"NUM_KV_HEADS": 8, "GROUP_SIZE": group_size, "HEAD_DIM": head_dim, "BLOCK_SIZE": 64}
        constants |= {"DEPENDENT": True, "HEADS": heads, "WINDOW": window}
        constants |= {} if (head_dim, group_size) == (64, 8) else {"sinks_ptr": None}
        names = [name for name in hopper_prefill_kernel.arg_names if name not in constants]
        types = {name: signature_of(name, "") for name in names}
        types |= {"queries": f"tensordesc<bf16{box},{layouts[0]!r}>"}
        types |= {"lines": f"tensordesc<bf16{[part, part]},{layouts[1]!r}>"}
        size = compiled_size(hopper_prefill_kernel, types, constants, num_warps=4)
        sys.stdout.write(f"hopper_prefill_kernel {head_dim}x{group_size} {size}\n")
    size = shared_memory(plan_kernel, "", {"PROGRAMS": 256}, num_warps=4)
    sys.stdout.write(f"plan_kernel 256 {size}\n")


def compile_hopper_matmul() -> None:
    """Every number of groups of warps, with the most rows that each takes; whole, split and gated."""
    lines, step = LINES.value, LINE_BYTES.value // DTYPE.itemsize
    variants = (
        (1, 16, 20, 2, None),
        (2, 32, 11, 4, None),
        (3, 16, 8, 1, "silu"),
        (1, 64, 8, 4, None),
        (1, 128, 8, 2, None),
        (2, 128, 6, 1, "silu"),
        (2, 256, 4, 4, None),
        (3, 64, 6, 1, "silu"),
        (3, 256, 4, 4, None),
        (3, 256, 4, 1, "silu"),
    )
    for groups, rows, stages, splits, act in few(variants, 0, 7):
        box = [lines // 16, 2, 8, step] if act else [lines, step]
        layouts = [gl.NVMMASharedLayout(128, 16, rank) for rank in (2, len(box))]
        constants = {"ROWS": rows, "GROUPS": groups, "STAGES": stages, "STEP": step, "SPLITS": splits}
        constants |= {"ACT": act, "SHARED": None, "x_scale_ptr": None, "weight_scale_ptr": None}
        if splits == 1:
            constants |= {"partial_ptr": None, "arrivals_ptr": None}
        types = {name: signature_of(name, "") for name in hopper_matmul_kernel.arg_names}
        types |= {"x": f"tensordesc<bf16{[rows, step]},{layouts[0]!r}>"}
        types |= {"weight": f"tensordesc<bf16{box},{layouts[1]!r}>"}
        size = compiled_size(hopper_matmul_kernel, types, constants, num_warps=4)
        sys.stdout.write(f"hopper_matmul_kernel {groups}x{rows} {size}\n")
    # In FP8 with scales of groups, which take more registers, and in INT8.
    of_fp8 = (1, 16, 20, 1), (1, 128, 8, 2), (2, 128, 6, 1), (3, 64, 6, 1)
    of_int8 = (1, 16, 20, 2), (3, 64, 6, 1), (2, 256, 4, 2), (3, 256, 4, 1)
    variants = [("fp8e4nv", *each) for each in of_fp8] + [("i8", *each) for each in of_int8]
    for dtype, groups, rows, stages, splits in few(variants, 3, 7):
        layout = gl.NVMMASharedLayout(128, 8, 2)
        constants = {"ROWS": rows, "GROUPS": groups, "STAGES": stages, "STEP": 128, "SPLITS": splits}
        constants |= {"ACT": None, "SHARED": 128 if dtype == "fp8e4nv" else None, "bias_ptr": None}
        if splits == 1:
            constants |= {"partial_ptr": None, "arrivals_ptr": None}
        types = {name: signature_of(name, "") for name in hopper_matmul_kernel.arg_names}
        types |= {"x": f"tensordesc<{dtype}{[rows, 128]},{layout!r}>"}
        types |= {"weight": f"tensordesc<{dtype}{[lines, 128]},{layout!r}>"}
        types |= {"partial_ptr": "*fp32" if dtype == "fp8e4nv" else "*i32"}
        size = compiled_size(hopper_matmul_kernel, types, constants, num_warps=4)
        sys.stdout.write(f"hopper_matmul_kernel {dtype} {groups}x{rows} {size}\n")


def compile_persistent_matmul() -> None:
    rows, outs, step = PERSISTENT_ROWS.value, OUTS.value, LINE_BYTES.value // DTYPE.itemsize
    pairs, lines = [gl.NVMMASharedLayout(128, 16, rank) for rank in (4, 2)]
    for groups, stages, act in few(((3, 3, "silu"), (2, 4, "gelu_tanh"))):
        constants = {"GROUPS": groups, "STAGES": stages, "STEP": step, "ACT": act}
        types = {name: signature_of(name, "") for name in persistent_matmul_kernel.arg_names}
        types |= {"x": f"tensordesc<bf16{[rows, step]},{lines!r}>"}
        types |= {"weight": f"tensordesc<bf16{[outs // 16, 2, 8, step]},{pairs!r}>"}
        types |= {"out": f"tensordesc<bf16{[rows, outs // 4]},{lines!r}>"}
        size = compiled_size(persistent_matmul_kernel, types, constants, num_warps=4)
        sys.stdout.write(f"persistent_matmul_kernel {groups} {size}\n")


def compile_quantization() -> None:
    """Rounding to FP8, by rows and by groups, and products of few rows."""
    for features, group in ((12288, 12288), (12288, 128)):
        groups = features // group
        parts, part = cut(group)
        constants = {"K": features, "GROUP": group, "GROUPS": groups, "static_ptr": None}
        constants |= {"PARTS": parts, "PART": part, "GROUPS_PADDED": triton.next_power_of_2(groups)}
        size = compiled_size(round_rows_kernel, TO_FP8, constants, num_warps=warps_to_round(features))
        sys.stdout.write(f"{round_rows_kernel.fn.__name__} {group} {size}\n")
    constants = {"HIDDEN": 12288, "ACT": "silu", "PARTS": 3, "PART": 4096}
    size = compiled_size(silu_mul_rounded_kernel, TO_FP8, constants, num_warps=16)
    sys.stdout.write(f"silu_mul_rounded_kernel 12288 {size}\n")
    for group, own in few(((4096, {"static_ptr": None}), (4096, {}), (128, {"static_ptr": None})), 1, 2):
        constants = {"DIM": 4096, "DIM_PADDED": 4096, "GROUP": group, "HAS_RESIDUAL": True} | own
        constants |= {"post_ptr": None, "IS_SCALED": False}
        size = compiled_size(add_rms_norm_kernel, TO_FP8, constants, num_warps=warps_for(4096))
        sys.stdout.write(f"add_rms_norm_kernel fp8 {size}\n")
    for group, num_scales, own in ((BLOCK, 1, {}), (128, 96, {"static_ptr": None})):
        constants = {"HIDDEN": 12288, "ACT": "silu", "BLOCK": BLOCK, "GROUP": group, "NUM_SCALES": num_scales}
        size = compiled_size(silu_mul_kernel, TO_FP8, constants | own, num_warps=4)
        sys.stdout.write(f"silu_mul_kernel fp8 {size}\n")
    compile_few_rows(HOPPER)


def compile_few_rows(target: GPUTarget) -> None:
    """In FP8: rows that are rounded and those that are not, with scales of all kinds."""
    variants = (
        ("*fp8e4nv", 12288, {"static_ptr": None}),
        ("*fp8e4nv", 128, {"static_ptr": None}),
        ("*bf16", 12288, {"x_scale_ptr": None, "static_ptr": None}),
        ("*bf16", 12288, {"x_scale_ptr": None}),
    )
    for x, group, constants in few(variants, 1, 3):
        gemv = {"K": 12288, "ROWS": 2, "BLOCK_N": 4, "BLOCK_K": 4096, "LANES": LANES, "bias_ptr": None}
        gemv |= {"GROUP": group} | follows(target) | constants
        size = compiled(bytes_gemv_kernel, FROM_FP8 | {"x_ptr": x}, gemv, target, num_warps=8).metadata.shared
        sys.stdout.write(f"{bytes_gemv_kernel.fn.__name__} {x} {target.arch} {size}\n")
    for rows, block_k, group in few(((16, 256, None), (64, 128, None), (64, 128, 128), (128, 128, 128)), 2):
        tile = {"ROWS": rows, "BLOCK_N": 64, "BLOCK_K": block_k, "GROUP": group}
        tile |= {"ACT": None, "bias_ptr": None} | follows(target)
        size = compiled(split_k_kernel, FROM_FP8, tile, target, num_warps=4, num_stages=4).metadata.shared
        sys.stdout.write(f"{split_k_kernel.fn.__name__} {rows} {target.arch} {size}\n")
        if group is None:
            size = compiled(split_k_kernel, OF_INT8, tile, target, num_warps=4, num_stages=4).metadata.shared
            sys.stdout.write(f"{split_k_kernel.fn.__name__} int8 {rows} {target.arch} {size}\n")
    gemv = {"K": 12288, "GROUP": 12288, "BLOCK_N": 4, "BLOCK_K": 4096, "LANES": LANES, "bias_ptr": None}
    for x, own in few((("*bf16", {"ROWS": 1, "x_scale_ptr": None}), ("*i32", {"ROWS": 2})), 0):
        types = OF_INT8 | {"x_ptr": x, "weight_ptr": "*i32"}
        constants = gemv | {"static_ptr": None} | own | follows(target)
        size = compiled(bytes_gemv_kernel, types, constants, target, num_warps=4).metadata.shared
        sys.stdout.write(f"{bytes_gemv_kernel.fn.__name__} int8 {x} {target.arch} {size}\n")


def compile_packed() -> None:
    """Codes of all kinds, for few rows, and made numbers."""
    pointers = ("x_ptr", "scale_ptr", "zero_ptr", "offset_ptr", "table_ptr", "bias_ptr", "out_ptr")
    types = dict.fromkeys(pointers, "*bf16") | {"words_ptr": "*i32", "partial_ptr": "*fp32"}
    types |= dict.fromkeys(("num_rows", "num_out", "num_in", "x_stride", "first_block"), "i32")
    types |= {"arrivals_ptr": "*i32"}
    kinds = (
        (0, 4, 128, set()),
        (0, 4, 32, {"zero_ptr"}),
        (0, 8, 64, {"offset_ptr"}),
        (1, 4, 16, set()),
        (2, 4, 64, {"table_ptr"}),
        (3, 8, 4096, set()),
    )
    for target, (numbers, bits, group, given) in itertools.product(
        few((HOPPER, AMPERE, BLACKWELL, RTX), 1, 3), few(kinds, 1, 2, 4)
    ):
        constants = {"NUMBERS": numbers, "MIDDLE": 8, "BITS": bits, "GROUP": group, "GROUPS": 4096 // group}
        constants |= dict.fromkeys({"zero_ptr", "offset_ptr", "table_ptr", "bias_ptr"} - given)
        constants |= follows(target)
        for rows in few((16, 64)):
            made = compiled(
                packed_matmul_kernel, types, constants | {"ROWS": rows}, target, num_warps=4, num_stages=4
            )
            assert made.metadata.shared <= ROOM[ADA], (target, constants)
            sys.stdout.write(f"packed_matmul_kernel {rows} {target.arch} {made.metadata.shared}\n")
        size = compiled(
            dequantize_kernel, types, constants | {"K": 4096, "GATED": False}, target, num_warps=4
        ).metadata.shared
        sys.stdout.write(f"dequantize_kernel {numbers} {target.arch} {size}\n")


def compile_packed_hopper() -> None:
    """Codes of 4 and 8 bits, for few and for many rows; split and gated."""
    half = LINE_BYTES.value // DTYPE.itemsize
    tiles = ((1, 16, 8, 2, None), (2, 64, 4, 4, None), (3, 16, 6, 1, "silu"), (3, 128, 4, 1, None))
    kinds = (
        (Numbers.INTEGER, 4, 128, set()),
        (Numbers.INTEGER, 4, 32, {"zero_ptr", "offset_ptr"}),
        (Numbers.E2M1, 4, 16, set()),
        (Numbers.TABLE, 4, 64, {"bias_ptr"}),
        (Numbers.INTEGER, 8, 32, set()),
        (Numbers.E4M3, 8, 128, set()),
    )
    of_few = [(tiles[0], kinds[1]), (tiles[0], kinds[3]), (tiles[2], kinds[5])]
    for (groups, rows, stages, splits, act), (numbers, bits, group, given) in (
        itertools.product(tiles, kinds) if ALL else of_few
    ):
        if bits == 8 and rows == 128:
            continue
        layouts = [gl.NVMMASharedLayout(128, width, 2) for width in (16, 32)]
        types = {"x": f"tensordesc<bf16{[rows, half]},{layouts[0]!r}>"}
        types |= {"words": f"tensordesc<i32{[8 * bits, 32]},{layouts[1]!r}>", "partial_ptr": "*fp32"}
        types |= dict.fromkeys(("scale_ptr", "zero_ptr", "offset_ptr", "arrivals_ptr"), "*i32")
        types |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16")
        types |= dict.fromkeys(("num_rows", "num_out", "num_tiles"), "i32")
        assembly = assembly_of(numbers, bits, DTYPE, tuple(range(16)), has_offset="offset_ptr" in given)
        constants = {"ASM": assembly, "ADD": "add.rn.bf16x2 $0, $1, $2;", "MIDDLE": 0x43084308, "BITS": bits}
        constants |= {"GROUP": group, "NUM_GROUPS": 4096 // group, "PADDED": 256, "ROWS": rows, "ACT": act}
        constants |= {"GROUPS": groups, "STAGES": stages, "SPLITS": splits}
        constants |= dict.fromkeys({"zero_ptr", "offset_ptr", "bias_ptr"} - given)
        if splits == 1:
            constants |= {"partial_ptr": None, "arrivals_ptr": None}
        registers = {"maxnreg": 128} if rows <= 64 else {}
        made = compiled(packed_hopper_kernel, types, constants, num_warps=4, **registers)
        sys.stdout.write(f"hopper_packed {groups}x{rows} {made.metadata.shared}\n")


def compile_packed_gemv() -> None:
    """The same for a row: gated, and with whole steps and not."""
    types = dict.fromkeys(("x_ptr", "words_ptr", "scale_ptr", "zero_ptr", "offset_ptr"), "*i32")
    types |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16")
    types["num_out"] = "i32"
    ends = ((4096, "silu"), (1096, None))
    kinds = (
        (Numbers.INTEGER, 4, 128, set()),
        (Numbers.INTEGER, 4, 32, {"zero_ptr", "offset_ptr"}),
        (Numbers.E2M1, 4, 16, set()),
        (Numbers.TABLE, 4, 64, {"bias_ptr"}),
        (Numbers.E4M3, 8, 128, set()),
        (Numbers.INTEGER, 8, 32, set()),
    )
    of_few = [(ends[0], kinds[1]), (ends[0], kinds[3]), (ends[0], kinds[4]), (ends[1], kinds[0])]
    for (num_in, act), (numbers, bits, group, given) in itertools.product(ends, kinds) if ALL else of_few:
        assembly = products(
            *(numbers, bits, DTYPE, tuple(range(16))), middle=0x43084308, has_zero="zero_ptr" in given,
            has_offset="offset_ptr" in given, group=min(4, group * bits // 64),
        )  # fmt: skip
        constants = {"ASM": assembly, "BITS": bits, "GROUP": group, "NUM_GROUPS": 4096 // group, "K": num_in}
        tile = gemv_tile(num_in, numbers, bits)
        constants |= {"WARPS": tile.num_warps, "DEPTH": tile.depth}
        pairs = writing_pairs(tuple(range(16)), tile.num_warps) if numbers is Numbers.TABLE else None
        constants["WRITE_PAIRS"] = pairs
        constants |= {"ACT": act} | dict.fromkeys({"zero_ptr", "offset_ptr", "bias_ptr"} - given)
        size = compiled(packed_gemv_kernel, types, constants, num_warps=tile.num_warps).metadata.shared
        sys.stdout.write(f"hopper_packed_gemv {numbers.name} {num_in} {size}\n")


def compile_packed_experts() -> None:
    """Codes of experts on any GPU: products of few rows, and made numbers."""
    pointers = ("x_ptr", "scale_ptr", "zero_ptr", "offset_ptr", "table_ptr", "bias_ptr", "out_ptr")
    types = dict.fromkeys(pointers, "*bf16") | {"words_ptr": "*i32", "weights_ptr": "*fp32"}
    types |= dict.fromkeys(("order_ptr", "starts_ptr", "tiles_ptr"), "*i32")
    types |= dict.fromkeys(("x_stride", "num_experts", "first_block", "num_out"), "i32")
    types |= dict.fromkeys(("limit", "alpha"), "fp32")
    kinds = ((0, 4, 128, {"zero_ptr"}), (1, 4, 32, {"bias_ptr"}), (3, 8, 4096, set()))
    for target, (numbers, bits, group, given) in itertools.product(
        few((HOPPER, AMPERE, BLACKWELL, RTX), 1), few(kinds, 0, 1)
    ):
        constants = {"NUMBERS": numbers, "MIDDLE": 8, "BITS": bits, "GROUP": group, "GROUPS": 4096 // group}
        constants |= dict.fromkeys({"zero_ptr", "offset_ptr", "table_ptr", "bias_ptr", "weights_ptr"} - given)
        constants |= {"TOP_K": 4, "NUM_BLOCKS": 48} | follows(target)
        tiles = ((16, True), (64, False))
        for rows, is_gated in tiles if ALL else (tiles[numbers],):
            own = {"NUM_OUT": 3072, "NUM_IN": 4096, "NUM_STEPS": 64, "ACT": "silu", "ROWS": rows}
            made = compiled(
                packed_grouped_kernel, types, constants | own | {"GATED": is_gated}, target,
                num_warps=4, num_stages=4,
            )  # fmt: skip
            assert made.metadata.shared <= ROOM[ADA], (target, constants)
            sys.stdout.write(f"packed_grouped_kernel {rows} {target.arch} {made.metadata.shared}\n")
        own = {"K": 4096, "GATED": True}
        size = compiled(write_numbers_kernel, types, constants | own, target, num_warps=4).metadata.shared
        sys.stdout.write(f"write_numbers_kernel {numbers} {target.arch} {size}\n")
    types |= dict.fromkeys(("ids_ptr", "places_ptr"), "*i32")
    own = {"DIM": 2880, "TOP_K": 4, "BLOCK": 4096} | follows(HOPPER)
    size = compiled(gather_pairs_kernel, types, own, HOPPER, num_warps=16).metadata.shared
    sys.stdout.write(f"gather_pairs_kernel {HOPPER.arch} {size}\n")
    own = {"DIM": 2880, "PADDED": 4096, "TOP_K": 4, "E": 32, "TILE": 16, "BLOCK": 1024} | follows(HOPPER)
    types |= dict.fromkeys(("num_pairs", "num_tiles"), "i32")
    size = compiled(sort_rows_kernel, types, own, HOPPER, num_warps=4).metadata.shared
    sys.stdout.write(f"sort_rows_kernel {HOPPER.arch} {size}\n")


def compile_packed_experts_hopper() -> None:
    """The same on Hopper, in all tiles."""
    half = LINE_BYTES.value // DTYPE.itemsize
    kinds = (
        (Numbers.E2M1, 4, 32, {"bias_ptr"}),
        (Numbers.INTEGER, 4, 128, {"zeros"}),
        (Numbers.E4M3, 8, 128, set()),
    )
    of_few = ((8, 90, kinds[0]), (16, 32, kinds[2]))
    for rows, num_blocks, (numbers, bits, group, given) in (
        itertools.product((8, 16, 32, 64, 128), (90, 32), kinds) if ALL else of_few
    ):
        tile = expert_tile(rows, num_blocks, bits, 4 if num_blocks == 32 else 132)
        layouts = [gl.NVMMASharedLayout(128, width, 2) for width in (16, 32)]
        types = {"x": f"tensordesc<bf16{[part_of(rows), half]},{layouts[0]!r}>"}
        types |= {"words": f"tensordesc<i32{[8 * bits, 32]},{layouts[1]!r}>"}
        groups = f"tensordesc<i32{[groups_of_step(group), 32]},{gl.NVMMASharedLayout(0, 32, 2)!r}>"
        types |= dict.fromkeys(("scales", "zeros", "offsets"), groups)
        types |= dict.fromkeys(("order_ptr", "starts_ptr", "tiles_ptr"), "*i32")
        types |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16")
        types |= dict.fromkeys(("num_experts", "num_out", "num_tiles"), "i32")
        types |= dict.fromkeys(("limit", "alpha"), "fp32")
        assembly = assembly_of(numbers, bits, DTYPE, tuple(range(16)), is_folded=numbers is Numbers.E2M1)
        constants = {"ASM": assembly, "ADD": "add.rn.bf16x2 $0, $1, $2;", "MIDDLE": 0x43084308, "BITS": bits}
        constants |= {"GROUP": group, "NUM_GROUPS": 2880 // group, "NUM_BLOCKS": num_blocks}
        constants |= {
            "TOP_K": 4,
            "FEW": rows == 8,
            "IN_TURN": rows in (16, 64),
            "ROWS": rows,
            "GROUPS": tile.groups,
            "STAGES": tile.stages,
        }
        constants |= {"GATED": num_blocks == 90, "ACT": None, "ODD": num_blocks == 90}
        constants |= dict.fromkeys({"zeros", "offsets", "bias_ptr"} - given)
        at_first, constants["REGISTERS"] = registers_of_experts(tile)
        made = compiled(packed_experts_hopper_kernel, types, constants, num_warps=4, maxnreg=at_first)
        sys.stdout.write(
            f"hopper_packed_experts {tile.rows} {tile.groups} {tile.stages} {bits} {made.metadata.shared}\n"
        )


def compile_scaled_products() -> None:
    """Of FP8 numbers with scales of blocks and of rows, and of plain numbers with weights of a byte.

    An A100 cannot convert FP8, and an A10 has no more shared memory than an L4.
    """
    for target, x, weight, dtypes in (
        (HOPPER, "*fp8e4nv", "*fp8e4nv", ["*bf16"]),
        (ADA, "*fp8e4nv", "*fp8e4nv", ["*bf16"]),
        (BLACKWELL, "*fp8e4nv", "*fp8e4nv", ["*bf16"]),
        (RTX, "*fp8e4nv", "*fp8e4nv", ["*bf16"]),
        (AMPERE, "*i8", "*i8", ["*bf16"]),
        (AMPERE, None, "*u8", ["*bf16", "*fp16"]),
        (HOPPER, None, "*i8", ["*bf16"]),
    ):
        blocks = (4096,) if x == "*i8" else (128, 4096)
        sizes = itertools.product(dtypes, (1, 64, 1000), blocks)
        for dtype, num_tokens, block in sizes if ALL else ((dtypes[0], 64, blocks[0]),):
            itemsize = 2 if x is None else 1
            rows, columns, warps = tile_for(num_tokens)
            constants = {"N": 4096, "K": 4096, "BLOCK": block, "STEP": step_for(itemsize, block)}
            constants |= {"ROWS": rows, "COLUMNS": columns} | ({"x_scale_ptr": None} if x is None else {})
            types = {"x_ptr": x or dtype, "weight_ptr": weight, "out_ptr": dtype, "num_tokens": "i32"}
            options = {"num_warps": warps, "num_stages": scaled_stages(itemsize)}
            made = compiled(scaled_matmul_kernel, FP8_TYPES | types, constants, target, **options)
            size = made.metadata.shared
            assert target is HOPPER or size <= ROOM[ADA], (target, constants)
            sys.stdout.write(f"{scaled_matmul_kernel.fn.__name__} {num_tokens} {target.arch} {size}\n")


if __name__ == "__main__":
    main()
