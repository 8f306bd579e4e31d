"""Pages of KV between two processes, by each way that the peer connector has, beside one plain copy.

The first process lends, with the first GPU, the second one loads, with the last.  `whole` is a load as an
engine has it done, from the question to the word that all was there; `copies` is its copies alone.  A plain
copy is one of as many bytes by the GPU that loads, as a load's are, and by the other one.

    python benchmarks/kv_ways.py                           # 125 pages of 64 tokens of Qwen3-8B
    python benchmarks/kv_ways.py --busy                    # all of it while the GPU that loads works
    python benchmarks/kv_ways.py --device cpu --page-bytes 65536 --pages 64
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection

import torch

from pellucid.connectors.base import Ended, Job, WorkerDoor
from pellucid.connectors.peer.device import Cuda
from pellucid.connectors.peer.lender import Lender
from pellucid.connectors.peer.shelf import Shelf
from pellucid.connectors.peer.wire import Facts, Key
from pellucid.connectors.peer.worker import PeerWorker
from pellucid.schedule.plan import ints

FACTS: Facts = {"the model": "none"}


def worker_of(device: torch.device, num_pages: int, page_bytes: int) -> tuple[PeerWorker, list[Ended]]:
    """A worker's half with that many pages, and what it has said of its jobs."""
    said = list[Ended]()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    door = WorkerDoor(
        resolved=None,  # type: ignore[arg-type]
        device=device, rank=0, num_ranks=1, done=lambda *ended: said.append(Ended(*ended)),
    )  # fmt: skip
    worker = PeerWorker(door, {})
    pages = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
    worker.register(pages, None)  # type: ignore[arg-type]
    return worker, said


def do(worker: PeerWorker, said: list[Ended], what: dict[str, object], pages: Sequence[int] = ()) -> float:
    """One job, and wait for it; seconds of its copies."""
    number = len(said)
    worker.start([Job(number=number, is_load="keys" in what, pages=ints(pages), what=what)])
    while len(said) == number:
        time.sleep(20e-6)
    assert said[number].ok, "the log says why"
    return said[number].seconds


def peer_of(name: str) -> dict[str, object]:
    return {"engine_id": name, "host": None, "port": None, "facts": FACTS}


def keys_of(num: int) -> list[Key]:
    return [(i.to_bytes(32, "little"), 0) for i in range(num)]


def lend(name: str, way: str | None, device: str, num: int, page_bytes: int, line: Connection) -> None:
    """The first process."""
    shelf = Shelf(num, num_ranks=1)
    lender = Lender(name, FACTS, shelf, num_ranks=1, stride=page_bytes, way=way)
    worker, said = worker_of(torch.device(device), num + 1, page_bytes)
    worker._pages.copy_(torch.arange(num + 1, device=device)[:, None] % 251)
    own = {"attach": peer_of(name), "way": way, "num_places": num, "stride": page_bytes}
    do(worker, said, own)
    new = shelf.put(keys_of(num))
    do(worker, said, {"places": list(new.values())}, range(1, num + 1))
    shelf.written(new, ok=True)
    line.send("ready")
    line.recv()
    worker.close()
    lender.close()


def load(name: str, device: str, num: int, page_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of whole loads, and of their copies."""
    worker, said = worker_of(torch.device(device), num + 1, page_bytes)
    wanted = {"peer": peer_of(name), "keys": keys_of(num), "request": "a"}
    whole, copies = list[float](), list[float]()
    for _ in range(repeats + 1):
        worker._pages.zero_()
        if device != "cpu":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        copies.append(do(worker, said, wanted, range(1, num + 1)))
        whole.append(time.perf_counter() - began)
    expected = torch.arange(num + 1, device=device) % 251
    assert torch.equal(worker._pages[:, -1].long(), expected), "other bytes have come"
    worker.close()
    return whole[1:], copies[1:]


def plain_copy(source: str, target: str, num_bytes: int, by: str) -> float:
    """Seconds of one copy of as many bytes, the middle of ten.  by: the device that copies."""
    a = torch.empty(num_bytes, dtype=torch.uint8, device=source)
    b = torch.empty(num_bytes, dtype=torch.uint8, device=target)
    b.copy_(a)  # lets each GPU see the other's memory
    took = list[float]()
    with torch.cuda.device(by) if by != "cpu" else nullcontext():
        for _ in range(10):
            began = time.perf_counter()
            if by == "cpu":
                b.copy_(a)
            else:
                Cuda().copy(b.data_ptr(), a.data_ptr(), num_bytes)
                torch.cuda.current_stream().synchronize()
            took.append(time.perf_counter() - began)
    return statistics.median(took)


@contextmanager
def busy(target: str) -> Iterator[None]:
    """The GPU that loads adds up numbers meanwhile, as fast as its memory gives them."""
    is_on, is_over = threading.Event(), threading.Event()
    a = torch.ones(1 << 28, dtype=torch.float16, device=target)
    b = torch.empty_like(a)

    def add() -> None:
        stream = torch.cuda.Stream(target)
        with torch.cuda.stream(stream):
            while not is_over.is_set():
                for _ in range(8):
                    torch.add(a, 1, out=b)
                stream.synchronize()
                is_on.set()

    thread = threading.Thread(target=add)
    thread.start()
    is_on.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--pages", type=int, default=125)
    parser.add_argument("--page-bytes", type=int, default=64 * 36 * 2 * 8 * 128 * 2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["host", "cuda"], choices=("host", "cuda", "nixl"))
    parser.add_argument("--busy", action="store_true", help="the GPU that loads works meanwhile")
    given = parser.parse_args(args)
    if given.busy and given.device == "cpu":
        parser.error("--busy is for GPUs")
    source = target = "cpu"
    if given.device == "cuda":
        source, target = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
    with busy(target) if given.busy else nullcontext():
        measure(given, source, target)


def measure(given: argparse.Namespace, source: str, target: str) -> None:
    """Print the plain copies, and what each way has of the first."""
    num_bytes = given.pages * given.page_bytes
    by = {device: plain_copy(source, target, num_bytes, device) for device in (target, source)}
    rates = (f"by {device} {num_bytes / seconds / 1e9:.1f} GB/s" for device, seconds in by.items())
    print(f"{num_bytes / 1e6:.0f} MB from {source} to {target}: plain copy {', '.join(rates)}", flush=True)
    plain = by[target]
    for way in given.ways:
        if way == "cuda" and given.device == "cpu":
            continue
        context, name = mp.get_context("spawn"), f"{way} {os.getpid()}"
        ours, theirs = context.Pipe()
        sizes = given.pages, given.page_bytes
        lender = context.Process(
            target=lend, args=(name, None if way == "host" else way, source, *sizes, theirs)
        )
        lender.start()
        assert ours.recv() == "ready"
        took = load(name, target, *sizes, given.repeats)
        for title, seconds in zip(("whole", "copies"), took, strict=True):
            best, middle = min(seconds), statistics.median(seconds)
            print(
                f"{way:5s} {title:6s} {1e3 * middle:8.2f} ms, {num_bytes / middle / 1e9:6.1f} GB/s, "
                f"{plain / middle:.0%} of the plain copy (best {plain / best:.0%})",
                flush=True,
            )
        ours.send("end")
        lender.join()


if __name__ == "__main__":
    main()
