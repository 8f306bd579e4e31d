"""Triton where it is installed.  Where it is not, kernel files can still be imported for their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pellucid.platform import has_triton

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:

        class Missing:
            """Stands for Triton: decorates kernels that nobody may launch, and holds their constants."""

            def __init__(self, value: object = None) -> None:
                self.value = value

            @staticmethod
            def constexpr(value: object) -> Any:
                return Missing(value)

            @staticmethod
            def jit(function: Callable[..., Any] | None = None, **_: object) -> Any:
                return Missing() if function is not None else lambda function: Missing()

            def __getattr__(self, name: str) -> Any:
                raise ImportError(f"triton.{name} is needed, but Triton is not installed: pip install triton")

            def __getitem__(self, grid: object) -> Any:
                raise ImportError("a kernel was launched, but Triton is not installed: pip install triton")

        triton = tl = Missing()

__all__ = ["has_triton", "tl", "triton"]
