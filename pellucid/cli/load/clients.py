"""One load from one process or from several, and the CPU time that it took them."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from pellucid.cli.load.drive import Observed, drive
from pellucid.cli.load.http import Target
from pellucid.cli.load.workloads import Load, build_lanes

LEAD = 0.2  # seconds to the start, in which event loops are made and garbage is collected


def observe(target: Target, load: Load, *, num_processes: int, timeout: float) -> Observed:
    """Send a load and keep what comes back.  timeout: seconds a request may take."""
    num = load.parts(num_processes)
    if num == 1:
        return drive(target, build_lanes(load), timeout=timeout)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for part in range(num):
            here, there = context.Pipe()
            process = context.Process(target=_client, args=(there, target, load, part, num, timeout))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()  # it has built its part
        start = time.monotonic() + LEAD
        for pipe in pipes:
            pipe.send(start)
        return _joined([pipe.recv() for pipe in pipes])
    except EOFError:
        raise RuntimeError("a client process has died") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(LEAD)
            process.terminate()
            process.join()


def _client(pipe: Connection, target: Target, load: Load, part: int, num: int, timeout: float) -> None:
    """What a process does."""
    lanes = build_lanes(load, part, num)
    pipe.send("ready")
    start = pipe.recv()
    pipe.send(drive(target, lanes, start=start, timeout=timeout))


def _joined(parts: list[Observed]) -> Observed:
    records = [record for part in parts for record in part.records]
    return Observed(
        records=sorted(records, key=lambda record: record.sent),
        cpu_seconds=[seconds for part in parts for seconds in part.cpu_seconds],
    )
