"""One load from one process or from several, and the CPU time that it took them."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from pellucid.cli.load.answer import Record
from pellucid.cli.load.drive import drive
from pellucid.cli.load.http import Target
from pellucid.cli.load.workloads import Lane, Load, build_lanes

LEAD = 0.05  # seconds from everybody's being ready to the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What clients have seen.  cpu_seconds: of each client process, from the start to its last answer."""

    records: list[Record]
    cpu_seconds: list[float]

    @property
    def began(self) -> float:
        return min(record.sent for record in self.records)

    @property
    def seconds(self) -> float:
        """From the first request to the last answer's end."""
        return max(record.ended for record in self.records) - self.began

    @property
    def busiest(self) -> float:
        """The busiest client process's share of a core; near 1, the figures are the client's own."""
        return max(self.cpu_seconds) / self.seconds


def observe(target: Target, load: Load, *, num_processes: int, timeout: float) -> Observed:
    """Send a load and keep what comes back.  timeout: seconds a request may take."""
    num = load.parts(num_processes)
    if num == 1:
        lanes = build_lanes(load)
        return _joined([_measured(target, lanes=lanes, start=time.monotonic(), timeout=timeout)])
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
    pipe.send(_measured(target, lanes=lanes, start=start, timeout=timeout))


def _measured(target: Target, *, lanes: list[Lane], start: float, timeout: float) -> Observed:
    began = time.process_time()
    records = drive(target, lanes, start=start, timeout=timeout)
    return Observed(records=records, cpu_seconds=[time.process_time() - began])


def _joined(parts: list[Observed]) -> Observed:
    records = [record for part in parts for record in part.records]
    return Observed(
        records=sorted(records, key=lambda record: record.sent),
        cpu_seconds=[seconds for part in parts for seconds in part.cpu_seconds],
    )
