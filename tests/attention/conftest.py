"""Without a GPU, Triton's kernels run under its interpreter, known before Triton is imported."""

from __future__ import annotations

from tests.interpreter import interpret

interpret()
