"""The tiers in a worker: pages of pinned host memory, copies on a stream of their own, files by threads.

Loads, saves and files have a thread each, so none waits for another; a load's files are read and checked
by several at once, as one thread is slower than a disk.  What is to be copied is behind an event of the
stream on which steps are launched.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.connectors.base import Job, WorkerDoor
from pellucid.connectors.runs import runs
from pellucid.connectors.tiers import files
from pellucid.connectors.tiers.options import TierOptions

if TYPE_CHECKING:
    from pellucid.executor.base import Capacity

logger = logging.getLogger(__name__)
Event = torch.cuda.Event | None
LEAVE_SECONDS = 10.0  # that a thread has to finish
MAX_READERS = 8  # threads that read the files of one load


class HostPages:
    """Memory of the host that the device copies from and to; never swapped out if there is a device."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        self._memory = mmap.mmap(-1, num_pages * page_bytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_pages, page_bytes)
        self._view, self._page_bytes = memoryview(self._memory), page_bytes
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            error = cuda().cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, 0)
            if int(error):
                raise ValueError(
                    f"{self.tensor.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error "
                    f"{int(error)}); lower kv_offloading_size, or raise the limit of locked memory"
                )

    def views(self, pages: Sequence[int]) -> list[memoryview]:
        size = self._page_bytes
        return [self._view[page * size : (page + 1) * size] for page in pages]

    def close(self) -> None:
        if self._is_pinned:
            cuda().cudaHostUnregister(self.tensor.data_ptr())
            self._is_pinned = False


def cuda() -> Any:
    """The runtime's own functions."""
    return torch.cuda.cudart()


class Tiers:
    """The half in a worker."""

    def __init__(self, door: WorkerDoor, options: Mapping[str, object]) -> None:
        self._door, self._options = door, TierOptions.of(options)
        self._host: HostPages | None = None
        self._folder: Path | None = None
        self._lanes: dict[str, Lane] = {}
        self._readers = ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1), "kv reader")
        self._has_warned = False
        self.last_load = 0, 0.0  # bytes, and seconds of their copies

    def register(self, pages: Tensor, capacity: Capacity) -> None:
        self._pages = pages
        if self._host is None:
            num = self._options.num_host_pages(capacity, self._door.num_ranks)
            self._host = HostPages(1 + num, pages.shape[1], self._door.device)
            if self._options.folder is not None:
                self._folder = self._options.own_folder(self._door.resolved, capacity)
                self._folder.mkdir(parents=True, exist_ok=True)
            self._lanes = {name: Lane(f"kv {name}", self._door.device) for name in ("load", "save", "files")}

    def release(self) -> None:
        for lane in self._lanes.values():
            lane.wait()
        self._pages = torch.empty(0)

    def start(self, jobs: Sequence[Job]) -> None:
        behind = None
        if self._door.device.type == "cuda":
            behind = torch.cuda.Event()
            behind.record()
        for job in jobs:
            if "write" in job.what:
                self._lanes["files"].put(self._told(job, lambda lane, job=job: self._write(job)))
            elif job.is_load:
                self._lanes["load"].put(self._told(job, lambda lane, job=job: self._load(lane, job, behind)))
            else:
                self._lanes["save"].put(self._told(job, lambda lane, job=job: self._save(lane, job, behind)))

    def close(self) -> None:
        have_ended = [lane.close() for lane in self._lanes.values()]
        self._lanes = {}
        self._readers.shutdown(wait=all(have_ended), cancel_futures=True)
        if self._host is not None and all(have_ended):
            self._host.close()
            self._host = None

    def _told(self, job: Job, work: Callable[[Lane], None]) -> Callable[[Lane], None]:
        """Do it, and say whether it went well."""

        def run(lane: Lane) -> None:
            try:
                work(lane)
            except Exception as error:
                level = logging.DEBUG if self._has_warned else logging.WARNING
                logger.log(level, "a block of KV is left out: %s (further ones are not told of)", error)
                self._has_warned = True
                self._door.done(job.number, False)
            else:
                self._door.done(job.number, True)

        return run

    def _load(self, lane: Lane, job: Job, behind: Event) -> None:
        assert self._host is not None
        reads = [
            self._readers.submit(self._read, name, self._host.views(places))
            for name, places in job.what["read"]
        ]
        wait(reads)  # all of them, also behind one that fails: until then they fill the job's pages
        for read in reads:
            read.result()
        began = time.perf_counter()
        with lane.behind(behind):
            for page, place, num in runs(job.pages, job.what["places"]):
                self._pages[page : page + num].copy_(
                    self._host.tensor[place : place + num], non_blocking=True
                )

        self.last_load = len(job.pages) * self._pages.shape[1], time.perf_counter() - began

    def _save(self, lane: Lane, job: Job, behind: Event) -> None:
        assert self._host is not None
        with lane.behind(behind):
            for page, place, num in runs(job.pages, job.what["places"]):
                self._host.tensor[place : place + num].copy_(
                    self._pages[page : page + num], non_blocking=True
                )

    def _read(self, name: files.Name, pages: Sequence[memoryview]) -> None:
        assert self._folder is not None
        path = files.path_of(self._folder, name, self._door.rank)
        try:
            files.read(path, pages)
        except ValueError as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{path}: {error}") from None

    def _write(self, job: Job) -> None:
        assert self._folder is not None and self._host is not None
        for name in job.what["drop"]:
            files.path_of(self._folder, name, self._door.rank).unlink(missing_ok=True)
        for name, places in job.what["write"]:
            files.write(files.path_of(self._folder, name, self._door.rank), self._host.views(places))


class Lane:
    """A thread that does one thing after the other, with a stream for its copies."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._work: queue.SimpleQueue[Callable[[Lane], None] | None] = queue.SimpleQueue()
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[Lane], None]) -> None:
        self._work.put(work)

    def wait(self) -> None:
        """Until all is done that was put before."""
        done = threading.Event()
        self._work.put(lambda _: done.set())
        done.wait()

    def close(self) -> bool:
        """Finish, and end; False if it does not, as for a file system that hangs."""
        self._work.put(None)
        self._thread.join(LEAVE_SECONDS)
        return not self._thread.is_alive()

    def behind(self, event: Event) -> Copies:
        return Copies(self._stream, event)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work(self)


class Copies:
    """Copies behind an event, on a stream; they are done when it is left."""

    def __init__(self, stream: torch.cuda.Stream | None, event: Event) -> None:
        self._stream, self._event = stream, event

    def __enter__(self) -> None:
        if self._stream is not None and self._event is not None:
            self._stream.wait_event(self._event)
            self._entered = torch.cuda.stream(self._stream)
            self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._entered.__exit__(None, None, None)
            self._stream.synchronize()
