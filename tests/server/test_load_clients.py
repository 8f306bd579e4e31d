"""Loads that others make, in their own form: guidellm, and an asyncio client as vLLM's benchmark has it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import pellucid
from tests.patience import PATIENCE
from tests.server.conftest import Running

SPROUT = Path(pellucid.__file__).parent / "assets" / "sprout"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_guidellm(server: Running, tmp_path: Path, route: str) -> None:
    guidellm = shutil.which("guidellm", path=str(Path(sys.executable).parent))
    if guidellm is None:
        pytest.skip("guidellm is not installed")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            guidellm, "run", "--disable-console",
            "--backend", f"kind=openai_http,target={server.url},model=sprout,request_format={route}",
            "--tokenizer", f"kind=huggingface_auto,model={SPROUT}",
            "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", "kind=max_requests,count=12",
            "--output", f"kind=json,path={report}",
        ],
        capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0), totals


async def asked(session: Any, url: str, num_tokens: int) -> tuple[float, list[float], str, int]:
    """Seconds to the first token and between all others, the text, and how many tokens the usage says."""
    payload = {
        "model": "sprout", "prompt": "word " * 20, "temperature": 0.0, "max_tokens": num_tokens,
        "repetition_penalty": 1.0, "stream": True, "ignore_eos": True, "logprobs": None,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began = last = time.perf_counter()
    first, gaps, text, num = 0.0, list[float](), "", 0
    async with session.post(f"{url}/v1/completions", json=payload) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            chunk = line.strip().decode().removeprefix("data: ")
            if not chunk or chunk.startswith(":") or chunk == "[DONE]":
                continue
            data, now = json.loads(chunk), time.perf_counter()
            if data["choices"]:
                first, gaps = (first or now - began), [*gaps, *([now - last] if first else [])]
                last, text = now, text + (data["choices"][0]["text"] or "")
            elif data["usage"]:
                num = data["usage"]["completion_tokens"]
    return first, gaps, text, num


def test_a_load_as_vllms(server: Running) -> None:
    aiohttp = pytest.importorskip("aiohttp")

    async def load() -> list[tuple[float, list[float], str, int]]:
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(trust_env=True, timeout=timeout, connector=connector) as session:
            await asked(session, server.url, 2)
            return await asyncio.gather(*(asked(session, server.url, 16) for _ in range(40)))

    answers = asyncio.run(load())
    assert {num for _, _, _, num in answers} == {16}
    assert len({text for _, _, text, _ in answers}) == 1, "greedy answers to one prompt differ"
    assert all(first > 0 and gaps for first, gaps, _, _ in answers)
