"""When kernels are compiled: all at once before an engine serves, and counted if it is any later.

Each one that is compiled in mid-run stalls the step that needs it.  Reading a kernel from Triton's cache on
disk counts, too.  Knows nothing of which steps there are.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.kernels.compile.compilers import Compilers, Task
from pellucid.kernels.compile.keys import settle
from pellucid.kernels.lang.language import has_triton

logger = logging.getLogger(__name__)


class Named(Protocol):
    """A kernel, as Triton speaks of it."""

    name: str


Hook = Callable[..., bool | None]  # told of each kernel that Triton has compiled


class LateCompilations:
    """Variants of Triton kernels that this process has made ready since `begin`, on whosever behalf."""

    def __init__(self) -> None:
        self.num = 0
        self._next: Hook | None = None  # who was told before

    def begin(self) -> None:
        """Count from now on."""
        if (runtime := runtime_knobs()) is not None and hasattr(runtime, "jit_post_compile_hook"):
            self._next = runtime.jit_post_compile_hook
            runtime.jit_post_compile_hook = self.note

    def end(self) -> None:
        """Count no more, and leave no trace, unless somebody else has begun to listen meanwhile."""
        runtime = runtime_knobs()
        if getattr(runtime, "jit_post_compile_hook", None) == self.note:
            runtime.jit_post_compile_hook = self._next

    def note(  # noqa: PLR0913 Triton's names, by which it calls
        self, *, key: str, repr: str, fn: Named, compile: Mapping[str, object], is_manual_warmup: bool,
        already_compiled: bool,
    ) -> bool | None:  # fmt: skip
        """A kernel has been compiled."""
        self.num += 1
        logger.info("compiled in mid-run: %s", fn.name)
        if self._next is None:
            return None
        return self._next(
            key=key,
            repr=repr,
            fn=fn,
            compile=compile,
            is_manual_warmup=is_manual_warmup,
            already_compiled=already_compiled,
        )


def runtime_knobs() -> Any:
    """Where Triton keeps its hooks; None without Triton, and in versions that keep them elsewhere."""
    if not has_triton():
        return None
    import triton

    return getattr(getattr(triton, "knobs", None), "runtime", None)


def missing_names() -> list[str]:
    """Of Triton's inner names, by which kernels are noted instead of launched, those this version lacks.

    None of them is promised to stay.
    """
    import triton.runtime.cache
    from triton.runtime.jit import JITFunction

    def kernel() -> None: ...

    owners = {
        "knobs.runtime.jit_cache_hook": runtime_knobs(),
        "JITFunction.preload": JITFunction,
        "JITFunction.device_caches": JITFunction(kernel),
        "runtime.cache.triton_key": triton.runtime.cache,
    }
    return [name for name, owner in owners.items() if not hasattr(owner, name.rpartition(".")[2])]


class Unlaunched:
    """Stands for a kernel that has been noted: a launch of it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """Triton asks for it before each launch."""

    def run(self, *_: object) -> None:
        """What launches."""


class Noted(NamedTuple):
    """A variant of a kernel that is wanted."""

    kernel: Any
    key: str  # Triton's
    wanted: str  # what it takes to compile it


class Collected:
    """Notes which variants of kernels are asked for, in the stead of launching them, and compiles them.

    running: kernels that are launched all the same.  compilers: whom to tell of each as soon as it is noted.
    """

    def __init__(self, running: Collection[Any], compilers: Compilers | None) -> None:
        self._running, self._compilers = running, compilers
        self.noted: list[Noted] = []
        self._caches: list[dict[str, Any]] = []  # Triton's, of each one's variants that are compiled

    def note(self, *, key: str, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        """A kernel is launched that has not been compiled.  True: it shall not be."""
        kernel, wanted = fn.jit_function, compile["specialization_data"]
        settle(kernel)
        if kernel in self._running:
            return False
        compiled, _, target = kernel.device_caches[compile["device"]][:3]
        compiled[key] = Unlaunched()
        self._caches.append(compiled)
        self.noted.append(Noted(kernel, key, wanted))
        if self._compilers is not None:
            place = f"{fn.module}:{fn.name}"
            self._compilers.submit(Task(place, wanted, (target.backend, target.arch, target.warp_size)))
        return True

    def forget(self) -> None:
        """From now on, what was noted is launched."""
        for noted, compiled in zip(self.noted, self._caches, strict=True):
            del compiled[noted.key]

    def compile(self, device: torch.device) -> None:
        """Have all of them ready to be launched: from Triton's cache on disk, or compiled here by threads."""
        logger.info("compiling %d kernels", len(self.noted))
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        indices = range(len(self.noted)) if self._compilers is None else self._compilers.finished()
        with ThreadPoolExecutor(os.cpu_count(), "compile", set_device) as pool:
            tries = {index: pool.submit(make_ready, self.noted[index]) for index in indices}
        for index, first in tries.items():
            # What has failed beside others may succeed by itself.
            if first.exception() is not None and (error := failure(self.noted[index])) is not None:
                name = self.noted[index].kernel.__name__
                logger.warning("%s: to be compiled when it is launched: %r", name, error)


def make_ready(noted: Noted) -> None:
    """Compile a kernel and load it."""
    compiled = noted.kernel.preload(noted.wanted)
    compiled.run  # noqa: B018 which Triton makes, with what launches it, when it is first asked for


def failure(noted: Noted) -> Exception | None:
    """Why a kernel cannot be made ready; None if it can."""
    try:
        make_ready(noted)
    except Exception as error:
        return error
    return None


@contextmanager
def compiled_together(
    device: torch.device, *, running: Collection[Any] = (), compilers: Compilers | None = None
) -> Iterator[None]:
    """Within, launch what will be needed: it is noted, does not run, and all is compiled at once behind it.

    What kernels should have written is zero, which has to be in range wherever torch's own kernels look by it
    (tests/worker/warm_up.py).  running: those that do run.  compilers: processes that compile meanwhile;
    threads do so behind, since they would take Python's lock from the one that launches.  Where Triton has
    other inner names than ours (`missing_names`) everything runs, and is compiled as it is launched.
    """
    if missing := missing_names():
        from triton import __version__

        told = "Triton %s has no %s: kernels are compiled one after the other, so the start takes longer"
        logger.warning(told, __version__, " and no ".join(missing))
        yield
        return
    from triton.runtime.cache import triton_key

    collected = Collected(running, compilers)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(triton_key)  # a digest of all of Triton, made without Python's lock
        with noted_by(collected):
            yield
    collected.compile(device)


def any_compiled() -> bool:
    """Whether this process has compiled kernels of ours: such variants are not noted, they run.

    So does everything with a Triton that has other inner names than ours.
    """
    from triton.runtime.jit import JITFunction

    if missing_names():
        return True
    modules = [module for name, module in sys.modules.items() if name.startswith("pellucid.kernels.")]
    values = [value for module in modules for value in vars(module).values()]
    kernels = [value for value in values if isinstance(value, JITFunction)]
    return any(caches[0] for kernel in kernels for caches in kernel.device_caches.values())


@contextmanager
def noted_by(collected: Collected) -> Iterator[None]:
    """Within, kernels that are not compiled yet are noted, and what they should have written is zero."""
    from triton import knobs

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, collected.note
    try:
        with ZerosForEmpty():
            yield
    finally:
        knobs.runtime.jit_cache_hook = before
        collected.forget()


ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class ZerosForEmpty(TorchDispatchMode):
    """Makes zeros of memory that would be left as it is."""

    EMPTY = tuple(getattr(torch.ops.aten, name) for name in ALLOCATIONS)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in self.EMPTY else made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's compiler is not told to leave this alone, for which it would have to be imported."""
        return False
