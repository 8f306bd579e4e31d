"""Does anybody's request stall a server for everybody else?

    python benchmarks/stalls.py [--url URL] [--attacks regexes bombs tokenize body schemas all]

While requests that are dear to take in are being handled, each kind alone and all together, another process
asks for /health without a pause, reads one plain stream, and asks again and again for an answer of a language
that the server knows.  It prints the worst of each; a first line, `nothing`, is the control, and `late` says
how late that process itself woke at worst: the machine's share of all the others.  The exit code is 1 if
/health took longer than 0.25 s, the stream was silent for 0.5 s longer than in the control, or a known
language took more than 1 s to its first token.

Without --url a server of the bundled model is started.  --scale 0.1 sends a tenth of everything.  --busy is
for a machine that does other things: each figure may then be longer by the control's, and by `late`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import httpx

SERVE = ("serve", "--device", "cpu", "--num-threads", "1", "--cpu-kv-cache-gib", "0.1", "--port", "0")
HEALTH, GAP, KNOWN = 0.25, 0.5, 1.0  # seconds that each may take, a gap beyond the control's
KNOWN_LANGUAGE = {"response_format": {"type": "json_object"}}
CALM = 1.0  # seconds before an attack begins, and of the control
LONGEST = 60.0  # seconds of an attack; what is unanswered then is given up
Attack = Callable[[httpx.AsyncClient, float], Awaitable[object]]


@dataclass
class Worst:
    """The longest of each, in seconds."""

    health: float = 0.0
    gap: float = 0.0
    known: float = 0.0
    late: float = 0.0


class Watch:
    """Notes how long each thing takes, also what has not ended yet."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def begin(self, name: str) -> None:
        self._began[name] = time.perf_counter()

    def end(self, name: str) -> None:
        seconds = time.perf_counter() - self._began.pop(name)
        self._longest[name] = max(self._longest.get(name, 0.0), seconds)

    def take(self) -> dict[str, float]:
        """The longest since this was asked last."""
        for name in list(self._began):
            began = self._began[name]
            self.end(name)
            self._began[name] = began
        longest, self._longest = self._longest, {}
        return longest


# What a victim sees, in a process of its own


async def ask_health(client: httpx.AsyncClient, clock: Watch) -> None:
    while True:
        clock.begin("health")
        (await client.get("/health")).raise_for_status()
        clock.end("health")
        await asyncio.sleep(0.01)


async def chunks(client: httpx.AsyncClient, **fields: object) -> AsyncGenerator[str, None]:
    """Read a stream to its end."""
    body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, **fields}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield line


async def read_stream(client: httpx.AsyncClient, clock: Watch) -> None:
    while True:
        clock.begin("gap")  # from the request to its first chunk, too
        async for _ in chunks(client, max_tokens=3000):
            clock.end("gap")
            clock.begin("gap")


async def ask_known(client: httpx.AsyncClient, clock: Watch) -> None:
    while True:
        clock.begin("known")
        num_chunks = 0
        async for _ in chunks(client, max_tokens=4, ignore_eos=False, **KNOWN_LANGUAGE):
            num_chunks += 1
            if num_chunks == 1:
                clock.end("known")
        await asyncio.sleep(0.1)


async def note_lateness(_: httpx.AsyncClient, clock: Watch) -> None:
    while True:
        clock.begin("late")
        await asyncio.sleep(0.01)
        clock.end("late")


async def watch(url: str, wire: Connection) -> None:
    """Measure until told to stop; each message on the wire asks for the worst since the one before."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, **KNOWN_LANGUAGE})
        clock = Watch()
        victims = [victim(client, clock) for victim in (ask_health, read_stream, ask_known, note_lateness)]
        tasks = [asyncio.create_task(victim) for victim in victims]
        wire.send(None)
        while await asyncio.to_thread(wire.recv):
            for task in tasks:
                if task.done():
                    task.result()  # raises what has ended it
            wire.send(clock.take())
        for task in tasks:
            task.cancel()


def run_watch(url: str, wire: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(watch(url, wire))


# The attacks; each returns when all its requests have been answered


async def complete(client: httpx.AsyncClient, content: bytes, *, leave_after: float | None = None) -> int:
    """Send a completion's body; the status of the answer, or 0 for a client that has left."""
    headers = {"Content-Type": "application/json"}
    try:
        answer = await client.post("/v1/completions", content=content, headers=headers, timeout=leave_after)
    except httpx.TransportError:  # a time-out is one; so is a refusal before the whole body is sent
        return 0
    return answer.status_code


def constrained(**wish: object) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 4, **wish}).encode()


def regex(size: int, salt: int) -> bytes:
    alternatives = "|".join(f"{(i + salt * size) * 7919:09d}" for i in range(size))
    return constrained(structured_outputs={"regex": alternatives})


async def regexes(client: httpx.AsyncClient, scale: float) -> None:
    """Six regular expressions of 50,000 alternatives."""
    bodies = [regex(int(50_000 * scale), time.time_ns() % 997 + i) for i in range(6)]
    await asyncio.gather(*(complete(client, body) for body in bodies))


async def bombs(client: httpx.AsyncClient, scale: float) -> None:
    """Four grammars that take ever so long, whose clients leave after two seconds."""
    bodies = [
        constrained(
            structured_outputs={"choice": [f"{time.time_ns()} {j}" for j in range(int(200_000 * scale))]}
        )
        for _ in range(4)
    ]
    await asyncio.gather(*(complete(client, body, leave_after=2.0) for body in bodies))


async def tokenize(client: httpx.AsyncClient, scale: float) -> None:
    """A text of 3 MB to be tokenized."""
    text = "the quick brown fox " * int(150_000 * scale)
    await client.post("/tokenize", json={"prompt": text}, timeout=None)


async def body(client: httpx.AsyncClient, scale: float) -> None:
    """A body of 7.5 MB, most of it fields that there are not."""
    fields = {f"field{i}": i for i in range(int(400_000 * scale))}
    whole = json.dumps({"prompt": "x", **fields}).encode()
    await complete(client, whole)
    message = {"role": "user", "content": "word " * int(1_500_000 * scale)}
    await client.post("/v1/chat/completions", json={"messages": [message]}, timeout=None)


async def schemas(client: httpx.AsyncClient, scale: float) -> None:
    """48 schemas of 120 fields, from eight clients."""
    salt = time.time_ns()

    async def one_client(index: int) -> None:
        for number in range(6):
            names = [f"p{salt}_{index}_{number}_{i}" for i in range(int(120 * max(scale, 0.1)))]
            properties = {name: {"type": "integer"} for name in names}
            schema = {"type": "object", "properties": properties, "required": names}
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            await complete(client, constrained(response_format=form))

    await asyncio.gather(*map(one_client, range(8)))


async def everything(client: httpx.AsyncClient, scale: float) -> None:
    """All of them together."""
    await asyncio.gather(*(attack(client, scale) for name, attack in ATTACKS.items() if name != "all"))


ATTACKS: dict[str, Attack] = {
    "regexes": regexes,
    "bombs": bombs,
    "tokenize": tokenize,
    "body": body,
    "schemas": schemas,
    "all": everything,
}


# The run


@contextmanager
def some_server(url: str | None) -> Generator[str, None, None]:
    """The address of a running server, started if there is none."""
    if url is not None:
        yield url
        return
    command = [sys.executable, "-m", "pellucid", *SERVE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = re.match(r"ready: (http://\S+) ", process.stdout.readline())
        assert ready, "the server has not started"
        yield ready[1]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def watching(url: str) -> Generator[Callable[[], Worst], None, None]:
    """What gives the worst since it was called last."""
    wire, far = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=run_watch, args=(url, far), daemon=True)
    watcher.start()
    far.close()
    wire.recv()

    def worst() -> Worst:
        wire.send(True)
        return Worst(**wire.recv())

    try:
        yield worst
    finally:
        with suppress(OSError):
            wire.send(False)
        watcher.join(10)


async def attacked(url: str, attack: Attack, scale: float) -> float:
    """Seconds that an attack has taken."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        began = time.perf_counter()
        with suppress(TimeoutError):
            await asyncio.wait_for(attack(client, scale), LONGEST)
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--url")
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS], default=[*ATTACKS])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument(
        "--busy", action="store_true", help="allow for what the machine does besides: the control, and late"
    )
    args = parser.parse_args()
    is_good = True
    with some_server(args.url) as url, watching(url) as worst:
        print(f"{'seconds':10}{'health':>9}{'gap':>9}{'known':>9}{'late':>9}{'attack':>9}")
        time.sleep(CALM)
        worst()
        time.sleep(CALM * max(1.0, 5 * args.scale))
        control = worst()
        show("nothing", control, 0.0, "")
        for name in args.attacks:
            worst()
            seconds = asyncio.run(attacked(url, ATTACKS[name], args.scale))
            time.sleep(CALM)  # what has begun in the attack may end after it
            seen = worst()
            late = too_late(seen, control, is_busy=args.busy)
            show(name, seen, seconds, f"  too long: {', '.join(late)}" if late else "")
            is_good = is_good and not late
    return 0 if is_good else 1


def too_late(seen: Worst, control: Worst, *, is_busy: bool) -> list[str]:
    """What has taken longer than it may."""
    limits = {"health": HEALTH, "gap": GAP + control.gap, "known": KNOWN}
    if is_busy:
        limits = {"health": HEALTH + control.health, "gap": GAP + control.gap, "known": KNOWN + control.known}
    machine = seen.late if is_busy else 0.0
    return [key for key, limit in limits.items() if getattr(seen, key) > limit + machine]


def show(name: str, worst: Worst, seconds: float, remark: str) -> None:
    figures = [worst.health, worst.gap, worst.known, worst.late, seconds]
    print(f"{name:10}" + "".join(f"{figure:9.3f}" for figure in figures) + remark, flush=True)


if __name__ == "__main__":
    sys.exit(main())
