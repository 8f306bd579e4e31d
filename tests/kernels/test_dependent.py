"""The law of dependent launches, held by reading: what each kernel does before it waits.

No test on a CPU can see a race between kernels, and on a GPU it may be lost once in a million.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "pellucid" / "kernels"
PRIMITIVES = ("let_next_start", "wait")
CONSTANT = (
    "weight",
    "words",
    "w_at",
    "b_at",
    "codes_ptr",
    "post_ptr",
    "bias_ptr",
    "added_ptr",
)  # what no kernel writes once an engine is ready
# They leave it to `copy_first`, for which all others of a program wait, or to `begin`, of experts.
DELEGATES = (
    *("hopper_matmul_kernel", "packed_hopper_kernel", "copy_steps", "multiply_steps"),
    *("packed_experts_hopper_kernel", "begin", "copy_rows_of_steps", "multiply_tile", "multiply_rows"),
)


# What they read early was written before the kernel before them, which says so only behind its wait.
BEHIND = {"few_down_kernel": ("few_gate_up_kernel", ("ids_ptr",))}


def kernels() -> list[ast.FunctionDef]:
    """Functions that may be launched dependently."""
    files = [ast.parse(path.read_text()) for path in sorted(KERNELS.rglob("*.py"))]
    functions = [node for file in files for node in file.body if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if f.name not in PRIMITIVES and "DEPENDENT" in [a.arg for a in f.args.args]]


def calls(nodes: list[ast.stmt]) -> list[ast.Call]:
    return [node for stmt in nodes for node in ast.walk(stmt) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def hands_on(stmt: ast.stmt) -> bool:
    """Whether it is a call, or a choice of calls, of a function that is to wait."""
    passed = [ast.unparse(arg) for node in ast.walk(stmt) if isinstance(node, ast.Tuple) for arg in node.elts]
    passed += [ast.unparse(arg) for call in calls([stmt]) for arg in call.args]
    return "DEPENDENT" in passed and "let_next_start" not in map(name_of, calls([stmt]))


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_before_a_kernel_waits_it_reads_what_no_kernel_writes(kernel: ast.FunctionDef) -> None:
    at = [i for i, stmt in enumerate(kernel.body) if ast.unparse(stmt) == "wait(DEPENDENT)"]
    waits = len(at) == 1
    assert waits or kernel.name in DELEGATES, "waits once, whatever it is to do"
    if not waits:
        at = [i for i, stmt in enumerate(kernel.body) if hands_on(stmt)]
    before = kernel.body[: at[0]]
    _, early = BEHIND.get(kernel.name, ("", ()))
    says_late = kernel.name in [name for name, _ in BEHIND.values()]
    assert not waits or says_late != ("let_next_start" in map(name_of, calls(before)))
    assert not says_late or ast.unparse(kernel.body[at[0] + 1]) == "let_next_start(DEPENDENT)"
    assert not [node for stmt in before for node in ast.walk(stmt) if isinstance(node, ast.Return)]
    for call in calls(before):
        if name_of(call) == "copy_weights":  # to where only this program looks
            pointers = [name for name in map(ast.unparse, call.args) if name.endswith("_ptr")]
            assert pointers == ["weight_ptr"], ast.unparse(call)
            continue
        assert not name_of(call).startswith(("store", "atomic", "async")), ast.unparse(call)
        if name_of(call) in ("load", "load_part") or name_of(call).startswith("copy"):
            assert ast.unparse(call.args[0]).startswith((*CONSTANT, *early)), ast.unparse(call)


def test_many_kernels_are_looked_at() -> None:
    assert len(kernels()) >= 20
