"""The examples of docs/serving.md run as they stand there, but for the address."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.server.conftest import Running

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, flags=re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if language == "sh"]
CURLS = [text for language, text in BLOCKS if not language and text.startswith("curl ")]
NEEDS_ADAPTER = "_lora_adapter"  # tests/lora/test_routes.py has one
CURLS = [text for text in CURLS if NEEDS_ADAPTER not in text] + SHELL
SMALL = 'device="cpu", num_threads=1, cpu_kv_cache_gib=0.05, max_num_seqs=4'


def name(text: str) -> str:
    """What a test of an example is called."""
    return next((line for line in text.splitlines()[::-1] if "/v1/" in line or "client." in line), text)[:60]


def here(text: str, server: Running) -> str:
    return text.replace("http://127.0.0.1:8000", server.url).replace("AsyncLLM()", f"AsyncLLM({SMALL})")


@pytest.mark.parametrize("text", PYTHON, ids=map(name, PYTHON))
def test_python_runs(server: Running, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", here(text, server)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("text", CURLS, ids=map(name, CURLS))
def test_curl_is_answered(server: Running, text: str) -> None:
    script = here(text, server).replace("curl ", "curl --silent --show-error --fail-with-body ")
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_every_route_is_in_the_guide_with_an_example() -> None:
    from pellucid.server.app import ROUTERS

    paths = {route.path for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]
    examples = "\n".join(text for _, text in BLOCKS)
    for path in paths - {"/page/{name}", "/icon.svg"}:
        assert path.partition("{")[0].rstrip("/") in GUIDE.partition("## An example")[0], path
        pattern = re.sub(r"\\{[^}]*\\}", r"\\S+", re.escape(path))
        assert re.search(rf"{pattern}(?![\w/])", examples), f"{path} has no example"
