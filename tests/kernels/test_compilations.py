"""Kernels that are compiled late are counted, and others who listen still hear of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from pellucid.kernels.compile.compilations import (
    Collected,
    LateCompilations,
    any_compiled,
    compiled_together,
    missing_names,
)

knobs = pytest.importorskip("triton").knobs


class Kernel:
    """As much of one as is looked at.  device_caches: its variants and more, by device."""

    def __init__(self, name: str, *, num_failures: int = 0) -> None:
        self.name = self.__name__ = self.cache_key = name
        self.fn = compile_kernel
        self.device_caches = {0: ({}, {}, "a target")}
        self.num_failures, self.is_ready = num_failures, False

    def preload(self, wanted: str) -> Kernel:
        """Compile, which fails at first."""
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise RuntimeError("it has failed")
        return self

    @property
    def run(self) -> None:
        self.is_ready = True


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What somebody else's hook has heard, who came before."""
    before, names = knobs.runtime.jit_post_compile_hook, []
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: names.append(fn.name)
    yield names
    knobs.runtime.jit_post_compile_hook = before


def compile_kernel(name: str) -> None:
    """What Triton does."""
    knobs.runtime.jit_post_compile_hook(
        key="", repr=name, fn=Kernel(name), compile={}, is_manual_warmup=False, already_compiled=False
    )


def test_only_what_is_compiled_between_begin_and_end_is_counted(heard: list[str]) -> None:
    late = LateCompilations()
    compile_kernel("early")
    late.begin()
    compile_kernel("late")
    compile_kernel("later")
    late.end()
    compile_kernel("at last")
    assert late.num == 2
    assert heard == ["early", "late", "later", "at last"]


def test_two_engines_of_a_process_count_alike_and_may_end_in_any_order(heard: list[str]) -> None:
    first, second = LateCompilations(), LateCompilations()
    first.begin()
    second.begin()
    compile_kernel("one")
    first.end()
    compile_kernel("two")
    second.end()
    assert second.num == 2 and first.num >= 1
    assert heard == ["one", "two"]


@pytest.mark.parametrize("name", ["preload", "triton_key", "jit_cache_hook", "jit_post_compile_hook"])
def test_a_triton_with_other_inner_names_costs_time_and_not_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything then runs, and the log says why the start takes longer."""
    runtime = pytest.importorskip("triton.runtime")
    owners = {"preload": runtime.jit.JITFunction, "triton_key": runtime.cache}
    if name in owners:
        monkeypatch.delattr(owners[name], name)
    else:
        kept = {key: None for key in ("jit_cache_hook", "jit_post_compile_hook") if key != name}
        monkeypatch.setattr(knobs, "runtime", SimpleNamespace(**kept))
    late = LateCompilations()
    late.begin()
    with compiled_together(torch.device("cpu")):
        assert torch.ones(2).new_empty(1).shape == (1,)
    late.end()
    if name != "jit_post_compile_hook":
        assert f".{name}: kernels are compiled one after the other" in caplog.text
        assert any_compiled(), "so they run in the warm-up"


def test_this_triton_has_the_names() -> None:
    assert missing_names() == []


def test_only_kernels_that_are_to_run_are_launched_while_others_are_noted() -> None:
    runs, waits = Kernel("a kernel"), Kernel("another")
    collected = Collected(running=(runs,), compilers=None)
    assert [collected.note(key="k", fn=Launched(kernel), compile=VARIANT) for kernel in (runs, waits)] == [
        False, True,
    ]  # fmt: skip
    assert [list(kernel.device_caches[0][0]) for kernel in (runs, waits)] == [[], ["k"]]
    collected.forget()
    assert not waits.device_caches[0][0], "it is launched from now on"


def test_what_fails_beside_others_is_tried_again_by_itself() -> None:
    clumsy, hopeless = Kernel("clumsy", num_failures=1), Kernel("hopeless", num_failures=2)
    collected = Collected(running=(), compilers=None)
    for kernel in (clumsy, hopeless):
        collected.note(key="k", fn=Launched(kernel), compile=VARIANT)
    collected.compile(torch.device("cpu"))
    assert clumsy.is_ready and not hopeless.is_ready


VARIANT = {"specialization_data": "", "device": 0}


@dataclass
class Launched:
    """What Triton tells of a kernel that is launched."""

    jit_function: Kernel
