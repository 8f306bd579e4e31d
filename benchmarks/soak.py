"""Does a server stay what it is under a crowd that never asks for the same twice?

    python benchmarks/soak.py [--url URL --pid PID] [--seconds 120] [--streams 100] [--json soak.json]

So many streams are open at any time, of which 40 % are left by their clients; each asks for something new: a
length, a grammar, a set of biases, of allowed tokens, of bad words, of stop strings.  Meanwhile come grammars
that take ever so long, whose clients leave, and texts of 3 MB to be tokenized.  It prints the memory of the
server's processes over time, how the requests ended, and what is left in the engine when all have.  The exit
code is 1 if a request ended otherwise than asked, anything is left, or the memory of the second half's end is
more than 5 % and 32 MiB above that of its beginning.

Without --url a server of the bundled model is started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

SERVE = ("serve", "--device", "cpu", "--num-threads", "1", "--cpu-kv-cache-gib", "0.1", "--port", "0")
VOCABULARY = 4000  # token ids below it are in any model's
LEAVE = 0.4  # share of the streams whose clients leave
EVERY = 5.0  # seconds between two looks at memory
HOSTILE = 10.0  # and between two bombs, and two long texts
PATIENCE = 300.0  # seconds for the last answers
MOST_GROWTH, LEAST_GROWTH = 0.05, 32.0  # share and MiB of the second half's beginning: less is noise
MIB = 2**20


@dataclass
class Soak:
    """What has been seen."""

    ends: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # seconds; MiB by process
    number: int = 0  # of the next request: its seed

    def total(self, index: int) -> float:
        """MiB of all but the grammars, of which the last 256 are kept, each in a process of some MiB."""
        return sum(mib for name, mib in self.memory[index][1].items() if name != "grammars")


def wish(rng: random.Random) -> dict[str, object]:
    """What a request asks for beside tokens; hardly ever the same."""
    ids = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]
    names = [f"f{rng.randrange(10**9)}" for _ in range(rng.randrange(1, 12))]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
    }
    return rng.choice(
        [
            {},
            {"logit_bias": {str(i): rng.uniform(-5, 5) for i in ids}},
            {"allowed_token_ids": sorted(set(ids))},
            {"bad_words": [f"w{i}" for i in ids[:20]]},
            {"stop": [f"s{i}" for i in ids[:4]]},
            {"logprobs": rng.randrange(1, 5), "n": 2},
            {"frequency_penalty": rng.random(), "repetition_penalty": 1 + rng.random(), "min_p": 0.1},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
            {"structured_outputs": {"regex": f"({'|'.join(names)})+"}},
            {"structured_outputs": {"choice": names}},
        ]
    )


def body_of(rng: random.Random) -> dict[str, object]:
    prompt = [rng.randrange(VOCABULARY) for _ in range(int(rng.lognormvariate(3.5, 1.2)) % 1500 + 1)]
    return {
        "prompt": prompt, "max_tokens": rng.randrange(1, 60), "stream": True, "seed": rng.randrange(10**6),
        "temperature": rng.random(), "top_p": 0.5 + rng.random() / 2, **wish(rng),
    }  # fmt: skip


async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
    """One stream; how it ended."""
    patience = rng.randrange(1, 20) if rng.random() < LEAVE else None
    async with client.stream("POST", "/v1/completions", json=body_of(rng)) as stream:
        if stream.status_code != 200:
            return f"{stream.status_code}: {(await stream.aread()).decode()[:200]}"
        last, num = "", 0
        async for line in stream.aiter_lines():
            if not line:
                continue
            if line.startswith('data: {"error"'):
                return line[:200]
            last, num = line, num + 1
            if num == patience:
                return "left"
        return "whole" if last == "data: [DONE]" else f"ended with {last[:200]}"


async def stream_on(client: httpx.AsyncClient, soak: Soak, until: float) -> None:
    while time.monotonic() < until:
        soak.number += 1
        soak.ends[await ask(client, random.Random(soak.number))] += 1


async def bomb(client: httpx.AsyncClient, soak: Soak, until: float) -> None:
    """Grammars that take ever so long, whose clients leave after two seconds."""
    while time.monotonic() < until:
        choice = [f"{time.time_ns()} {i}" for i in range(200_000)]
        body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": choice}}
        with suppress(httpx.TransportError):
            await client.post("/v1/completions", json=body, timeout=2.0)
        soak.ends["bomb"] += 1
        await asyncio.sleep(HOSTILE)


async def tokenize(client: httpx.AsyncClient, soak: Soak, until: float) -> None:
    while time.monotonic() < until:
        text = f"{time.time_ns()} " + "the quick brown fox " * 150_000
        reply = await client.post("/tokenize", json={"prompt": text})
        soak.ends["long text" if reply.status_code == 200 else f"long text: {reply.text[:200]}"] += 1
        await asyncio.sleep(HOSTILE)


async def weigh(owner: psutil.Process, soak: Soak) -> None:
    began = time.monotonic()
    while True:
        soak.memory.append((time.monotonic() - began, memory_of(owner)))
        seconds, parts = soak.memory[-1]
        print(f"{seconds:6.0f} s" + "".join(f"  {name} {mib:.0f}" for name, mib in parts.items()), flush=True)
        await asyncio.sleep(EVERY)


def memory_of(owner: psutil.Process) -> dict[str, float]:
    """MiB that each kind of process of a server has for itself."""
    parts = {"front": 0.0, "reader": 0.0, "engines": 0.0, "grammars": 0.0}
    for process in [owner, *owner.children(recursive=True)]:
        with suppress(psutil.Error):
            name = kind_of(process, owner)
            memory = process.memory_full_info()
            parts[name] += memory.uss / MIB
    return parts


def kind_of(process: psutil.Process, owner: psutil.Process) -> str:
    if process == owner:
        return "front"
    command = " ".join(process.cmdline())
    return "grammars" if "grammars" in command else "reader" if "server.reader" in command else "engines"


async def crowd(url: str, owner: psutil.Process, seconds: float, num_streams: int) -> Soak:
    soak = Soak()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        weighing = asyncio.create_task(weigh(owner, soak))
        until = time.monotonic() + seconds
        tasks = [stream_on(client, soak, until) for _ in range(num_streams)]
        await asyncio.gather(*tasks, bomb(client, soak, until), tokenize(client, soak, until))
        weighing.cancel()
        await until_idle(client)
    soak.memory.append((seconds, memory_of(owner)))
    return soak


async def until_idle(client: httpx.AsyncClient) -> None:
    """Raises AssertionError if something is left."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    for _ in range(100):
        text = (await client.get("/metrics")).text
        found = {name: re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names}
        if not any(float(value) for values in found.values() for value in values):
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"left in the engine: {found}")


@contextmanager
def some_server(url: str | None, pid: int | None) -> Generator[tuple[str, psutil.Process], None, None]:
    """A running server, started if there is none."""
    if url is not None:
        assert pid is not None, "--url needs --pid, whose memory is looked at"
        yield url, psutil.Process(pid)
        return
    process = subprocess.Popen([sys.executable, "-m", "pellucid", *SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = re.match(r"ready: (http://\S+) ", process.stdout.readline())
        assert ready, "the server has not started"
        yield ready[1], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with some_server(args.url, args.pid) as (url, owner):
        print("MiB of each kind of process")
        soak = asyncio.run(crowd(url, owner, args.seconds, args.streams))
    half, end = soak.total(len(soak.memory) // 2), soak.total(-2)
    growth = end - half
    print(
        f"ends: {dict(soak.ends)}\n"
        f"memory: {half:.0f} MiB at half time, {end:.0f} at the end, then {soak.total(-1):.0f}"
    )
    if args.json:
        args.json.write_text(json.dumps({"ends": soak.ends, "memory": soak.memory}))
    is_good = set(soak.ends) <= {"whole", "left", "bomb", "long text"}
    return 0 if is_good and growth < max(MOST_GROWTH * half, LEAST_GROWTH) else 1


if __name__ == "__main__":
    sys.exit(main())
