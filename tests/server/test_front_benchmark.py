"""benchmarks/front.py gives the server a device of its own, so it breaks when executors change."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


def test_it_serves_over_a_device_that_is_a_clock() -> None:
    command = [sys.executable, "benchmarks/front.py", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.match(r"ready: (http://\S+) ", process.stdout.readline())
            assert found is not None
            body = {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
            answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60).json()
            tokens = answer["choices"][0]["token_ids"]
            assert len(set(tokens)) == 3 and all(0 <= token < 151_936 for token in tokens)
        finally:
            process.terminate()
