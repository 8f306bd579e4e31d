"""The native code of this CPU, and of lesser ones that it also runs."""

from __future__ import annotations

import platform

import pytest

from pellucid.native.build import build
from pellucid.native.library import Library, library

LESSER = {"avx2": ("-O1", "-march=x86-64-v3"), "sse": ("-O1", "-march=x86-64-v2")}
is_x86 = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture(scope="session", params=["own", *LESSER])
def code(request: pytest.FixtureRequest) -> Library:
    """Each is compiled once, into the user's cache."""
    if request.param == "own":
        found = library()
        if found is None:
            pytest.skip("no native code here")
        return found
    if not is_x86 or library() is None:
        pytest.skip("no native code here, or another CPU's")
    path = build(target=LESSER[request.param])
    assert path is not None
    return Library(path)


@pytest.fixture
def own() -> Library:
    found = library()
    if found is None:
        pytest.skip("no native code here")
    return found
