"""Counts kernels that are compiled while an engine serves: each one stalls the step that needs it.

Reading a kernel from Triton's cache on disk counts, too.  Knows nothing of which steps there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from pellucid.kernels.language import has_triton

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
        if has_triton():
            from triton import knobs

            self._next = knobs.runtime.jit_post_compile_hook
            knobs.runtime.jit_post_compile_hook = self.note

    def end(self) -> None:
        """Count no more, and leave no trace, unless somebody else has begun to listen meanwhile."""
        if has_triton():
            from triton import knobs

            if knobs.runtime.jit_post_compile_hook == self.note:
                knobs.runtime.jit_post_compile_hook = self._next  # type: ignore[assignment]

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
