"""The peer connector in a worker: pages into this engine's memory for others, and from theirs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pellucid.connectors.base import Job, Options, WorkerDoor
from pellucid.connectors.peer.mapped import WAYS, Mapped, Memory, TensorMemory, Way
from pellucid.connectors.peer.options import PeerOptions
from pellucid.connectors.peer.reader import Reader, Refused, offer
from pellucid.connectors.peer.trust import Trust
from pellucid.registry import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.executor.base import Capacity

logger = logging.getLogger(__name__)
NUM_THREADS = 16  # jobs at once; they wait for other engines


class PeerWorker:
    """See `WorkerConnector`.  Each job is done by a thread, on a GPU on a stream of that thread's own."""

    def __init__(self, door: WorkerDoor, options: Options) -> None:
        self._door = door
        self._secret = Trust.of(PeerOptions.of(options).peers).secret
        self._is_gpu = door.device.type == "cuda"
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv transfer")
        self._jobs: set[Future[None]] = set()
        self._lock = threading.RLock()
        self._ways: dict[str, Way] = {}  # by name, those that are in use here
        self._idle: dict[tuple[object, ...], list[Reader]] = {}  # connections to engines, by id and address
        self._memories: dict[str, Mapped] = {}  # of engines on this node, the last that each had
        self._own: Mapped | None = None  # of these, this engine's
        self._has_own = threading.Event()  # whether it could be mapped has been seen
        self._refused: set[str] = set()  # engines of which that has been said
        self._local = threading.local()

    def register(self, pages: Tensor, capacity: Capacity) -> None:
        self._pages, self._page_bytes = pages, pages.shape[1]

    def release(self) -> None:
        wait(self._jobs)
        self._pages = torch.empty(0)

    def start(self, jobs: Sequence[Job]) -> None:
        launched = torch.cuda.Event() if self._is_gpu else None
        if launched is not None:
            launched.record()
        for job in jobs:
            future = self._threads.submit(self._do, job, launched)
            self._jobs.add(future)
            future.add_done_callback(self._jobs.discard)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for readers in self._idle.values():
            for reader in readers:
                reader.close()
        self._idle.clear()
        for memory in self._memories.values():
            memory.retire()
        self._memories.clear()
        for way in self._ways.values():
            way.close()

    # In a thread

    def _do(self, job: Job, launched: torch.cuda.Event | None) -> None:
        ok, seconds = False, 0.0
        try:
            with torch.inference_mode(), self._stream(launched):
                seconds = self._carry_out(job)
            ok = True
        except (OSError, EOFError, LookupError, Refused) as error:
            self._tell(job.what, error)
        except Exception:
            logger.exception("a transfer of KV has failed")
        finally:
            self._door.done(job.number, ok, seconds)

    def _tell(self, what: Any, error: Exception) -> None:
        """Why a transfer did not work; of engines that never fit once."""
        peer = str((what.get("peer") or what.get("attach") or {}).get("engine_id", "here"))
        if isinstance(error, Refused):
            if peer in self._refused:
                return
            self._refused.add(peer)
            logger.error("engine %s gives no KV: %s", peer, error)
        else:
            logger.warning(
                "a transfer of KV with engine %s has failed: %s", peer, error or type(error).__name__
            )

    def _stream(self, launched: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """Behind all that had been launched when the job came."""
        if launched is None:
            return nullcontext()
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._door.device)
            self._local.stream = torch.cuda.Stream(self._door.device)
        self._local.stream.wait_event(launched)
        return torch.cuda.stream(self._local.stream)

    def _carry_out(self, job: Job) -> float:
        """Returns seconds of a load's copies."""
        what: dict[str, Any] = job.what
        if job.is_load:
            return self._load(what, job.pages.tolist())
        if "attach" in what:
            self._attach(what["attach"], what["way"], what["num_places"], what["stride"])
        else:
            self._save(what["places"], job.pages.tolist())
        return 0.0

    def _wait(self) -> None:
        """For what this thread's stream has, and what that waits for."""
        if self._is_gpu:
            self._local.stream.synchronize()

    def _attach(self, peer: dict[str, Any], way: str | None, num_places: int, stride: int) -> None:
        """Have memory to lend from: this engine's lender's, or this rank's own."""
        engine_id = peer["engine_id"]
        try:
            if way is None:
                self._connect(peer).close()
            else:
                memory, address = self._way(way).take(num_places, stride)
                try:
                    offer(engine_id, self._door.rank, address, self._door.load_seconds)
                except BaseException:  # nobody will ever read there
                    memory.close()
                    raise
                self._memories[engine_id] = Mapped((way, address), memory)
            self._own = self._memories[engine_id]
        finally:
            self._has_own.set()

    def _save(self, places: list[int], pages: list[int]) -> None:
        self._has_own.wait(self._door.load_seconds)
        if self._own is None:
            raise LookupError("its memory could not be mapped")
        there = [i for i, place in enumerate(places) if place >= 0]
        with self._own.used() as memory:
            try:
                memory.write([places[i] for i in there], self._pages, [pages[i] for i in there])
            finally:  # whoever is told that it has ended gives its pages away
                self._wait()

    def _load(self, what: dict[str, Any], pages: list[int]) -> float:
        peer = what["peer"]
        with self._lock:
            idle = self._idle.setdefault((peer["engine_id"], peer["host"], peer["port"]), [])
            reader = idle.pop() if idle else None
        reader = reader or self._connect(peer)
        try:
            seconds = self._read(reader, peer["engine_id"], what["keys"], pages)
            reader.done(what["request"])
        except BaseException as error:
            reader.close()
            if isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError):
                self._forget(peer["engine_id"], reader.identity)
            raise
        with self._lock:
            idle.append(reader)
        return seconds

    def _read(self, reader: Reader, engine_id: str, keys: list[tuple[bytes, int]], pages: list[int]) -> float:
        size, memory = self._page_bytes, self._memories.get(engine_id)
        if reader.identity is not None:
            if memory is None or reader.identity != memory.identity:
                raise LookupError(f"engine {engine_id} has been started again")
            with memory.used() as theirs:
                places = reader.find(keys, 0)
                self._wait()  # for steps that were launched before: they may use these pages
                began = time.perf_counter()
                try:
                    theirs.read(places, self._pages, pages)
                finally:
                    self._wait()
            return time.perf_counter() - began
        reader.find(keys, size)
        came, began = bytearray(size), time.perf_counter()
        for page in pages:
            reader.take(memoryview(came))
            self._pages[page].copy_(torch.frombuffer(came, dtype=torch.uint8))
        self._wait()
        return time.perf_counter() - began

    def _forget(self, engine_id: str, identity: object) -> None:
        """An engine has gone: let go of its memory."""
        with self._lock:
            memory = self._memories.get(engine_id)
            if memory is not None and memory is not self._own and memory.identity == identity:
                self._memories.pop(engine_id).retire()

    def _let_go(self) -> None:
        """Of all engines that have gone since they were last asked."""
        with self._lock:
            gone = [(key, reader) for key, idle in self._idle.items() for reader in idle if reader.has_gone]
            for key, reader in gone:
                self._idle[key].remove(reader)
        for key, reader in gone:
            reader.close()
            self._forget(str(key[0]), reader.identity)

    def _connect(self, peer: dict[str, Any]) -> Reader:
        host, port, engine_id = peer["host"], peer["port"], peer["engine_id"]
        address = None if host is None or port is None else (host, port)
        rank, seconds = self._door.rank, self._door.load_seconds
        self._let_go()
        reader = Reader(engine_id, address, rank, peer["facts"], seconds, self._secret)
        if reader.identity is not None:
            with self._lock:
                known = self._memories.get(engine_id)
                if known is None or reader.identity != known.identity:
                    self._memories[engine_id] = Mapped(reader.identity, self._open(reader))
                    if known is not None:
                        known.retire()
        return reader

    def _open(self, reader: Reader) -> Memory:
        if reader.memory is not None:
            tensor = torch.frombuffer(reader.memory, dtype=torch.uint8).view(-1, reader.stride)
            return TensorMemory(tensor, pins=self._is_gpu)
        assert reader.way is not None, "what is reached neither here nor there has no identity"
        return self._way(reader.way).open(reader.address)

    def _way(self, name: str) -> Way:
        """Raises Refused if this machine lacks what it takes."""
        with self._lock:
            if name not in self._ways:
                try:
                    self._ways[name] = load_object(WAYS[name])(self._pages)
                except (KeyError, ImportError) as error:
                    raise Refused(f"its KV is reached by {name}, which is not here: {error}") from error
            return self._ways[name]
