"""Other processes that compile Triton's kernels, into Triton's cache on disk.

Triton compiles in Python, so threads would wait for each other.  `Compilers` is the owner's side: it starts a
process that imports Triton and our kernels while its owner does other things, and then forks workers, which
need no import of their own.  None of them touches a GPU or what is its owner's, so nothing is left to chance
in a process that has threads and a CUDA context.  What they could not compile, whatever the reason, is left
to the owner, who never waits for long.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from functools import cache, partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.kernels.compile.keys import settle
from pellucid.platform import has_triton

logger = logging.getLogger(__name__)
FEWEST_WORKERS = 4  # that are faster than threads, with the time that they take to start
MOST_WORKERS = 32  # an engine has about 60 kernels, of which one takes as long as all others in turn
FEW = 16  # kernels for which nobody waits until the processes are ready
PATIENCE = 60.0  # seconds without a word after which the owner does it by itself
FAREWELL = 2.0  # seconds for its workers' end
PR_SET_PDEATHSIG = 1  # Linux: a signal for a process whose parent ends
MAIN = "from pellucid.kernels.compile.compilers import main; main()"


class Share(NamedTuple):
    """Which of several ranks' equal shares of the kernels."""

    rank: int = 0
    size: int = 1


ALONE = Share()
EARLY: list[Compilers] = []  # one that has been started and nobody has yet


class Task(NamedTuple):
    """A variant of a kernel."""

    kernel: str  # "module:name"
    wanted: str  # how Triton describes the variant
    target: tuple[str, int | str, int]  # of which backend and architecture, and the threads of a warp


class Done(NamedTuple):
    """A task has ended, one way or another."""

    index: int
    seconds: float
    error: str = ""


@contextmanager
def compilers_for(configuration: str, num_workers: int, share: Share = ALONE) -> Iterator[Compilers | None]:
    """Within, there are processes to compile what a configuration needs; none where they would not pay.

    Which is where a start of the same configuration has ended well, so that all is in Triton's cache.
    """
    start_early(configuration, num_workers, share)
    compilers = EARLY.pop() if EARLY else None
    try:
        yield compilers
    finally:
        if compilers is not None:
            compilers.close()
    with suppress(OSError, ImportError):  # a cache that cannot be written to
        note = note_of(configuration)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


def start_early(configuration: str, num_workers: int, share: Share = ALONE) -> None:
    """Start the processes that a later `compilers_for` is to find: that takes as long as importing torch."""
    if EARLY or num_workers < FEWEST_WORKERS or not (sys.executable and has_triton()):
        return
    try:
        if not note_of(configuration).exists():
            EARLY.append(Compilers(min(num_workers, MOST_WORKERS), share))
    except OSError as error:
        logger.info("threads will compile: %r", error)


def end_early() -> None:
    """End what `start_early` has started and nobody has taken: a start has failed, or needs no kernels."""
    while EARLY:
        EARLY.pop().close()


def note_of(configuration: str) -> Path:
    """The file that says that Triton's cache has what a configuration needs, for as long as it may be so."""
    from triton import __version__, knobs

    digest = hashlib.sha256(f"{configuration} {__version__}".encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return Path(knobs.cache.dir) / f"pellucid-{digest.hexdigest()}"


class Compilers:
    """Processes that compile what is submitted.

    num_workers: how many at once.  share: this rank's; what is others' is compiled behind it, and by then
    most of it will have been.
    """

    def __init__(self, num_workers: int, share: Share = ALONE) -> None:
        self._tasks: list[Task] = []
        self._share = share
        self._unsent: list[int] = []  # of this rank's share
        self._later: list[int] = []
        self._is_listening = self._is_gone = False
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # -P: only what its owner could import, which need not be what lies in the current folder.
        command = [sys.executable, "-P", "-c", MAIN, str(theirs.fileno()), str(num_workers)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is the owner's to hear
            )

    def submit(self, task: Task) -> None:
        """Have a variant compiled, by the time that `finished` yields its index.  Does not wait."""
        is_own = zlib.crc32(task.wanted.encode()) % self._share.size == self._share.rank
        (self._unsent if is_own else self._later).append(len(self._tasks))
        self._tasks.append(task)
        self._send(seconds=0)

    def finished(self) -> Iterator[int]:
        """The indices of all that was submitted, in the order in which they are done with.

        To be called once.
        """
        left, began = dict.fromkeys(range(len(self._tasks))), time.perf_counter()
        self._unsent += self._later
        self._send(seconds=PATIENCE if len(left) > FEW else 0)
        if not self._is_listening:
            yield from left
            return
        while left and (done := self._receive(seconds=PATIENCE)) is not None:
            del left[done.index]
            said = f", in vain: {done.error}" if done.error else ""
            logger.debug("%s: %.1f s%s", self._tasks[done.index].kernel, done.seconds, said)
            yield done.index
        seconds = time.perf_counter() - began
        logger.debug("%.1f s for other processes, which left %d kernels", seconds, len(left))
        yield from left

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            # It ends its workers, and waits for them: nobody else may, in a container without an init.
            self._process.wait(FAREWELL if self._is_listening else 0)
        self._process.kill()  # its workers are told by the system
        self._process.wait()

    def _send(self, *, seconds: float) -> None:
        """Pass on what has not been, once the other side listens: it always reads, so this cannot block."""
        self._is_listening = self._is_listening or self._receive(seconds=seconds) is not None
        if self._is_gone or not self._is_listening:
            return
        try:
            while self._unsent:
                index = self._unsent.pop(0)
                self._connection.send((index, self._tasks[index]))
        except OSError:
            self._is_gone = True

    def _receive(self, *, seconds: float) -> Done | None:
        """What comes within so many seconds."""
        try:
            if not self._is_gone and self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            self._is_gone = True
        return None


def main() -> None:
    """The life of the process that imports Triton and forks; it ends when its owner closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner, num_workers = Connection(int(sys.argv[1])), int(sys.argv[2])
    prepare()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(num_workers, context, end_with_parent, (os.getpid(),))
    pool.submit(int).result()  # which forks all of them, before there are threads
    owner.send(Done(-1, 0.0))  # now it listens

    def tell(index: int, future: Future[float]) -> None:
        error = future.exception()
        with suppress(OSError):  # the owner has gone
            owner.send(Done(index, 0.0, repr(error)) if error else Done(index, future.result()))

    while True:
        try:
            index, task = owner.recv()
            pool.submit(compile_task, task).add_done_callback(partial(tell, index))
        except (EOFError, OSError, RuntimeError):  # the owner has gone, or a worker has
            workers = multiprocessing.active_children()
            for worker in workers:
                worker.kill()
            for worker in workers:  # which end beside each other
                worker.join()
            os._exit(0)


def prepare() -> None:
    """Import, and have at hand, whatever workers would need.  Leaves no threads."""
    from triton.runtime.cache import triton_key

    import pellucid.kernels

    with ThreadPoolExecutor(2) as beside:
        made = [beside.submit(utilities), beside.submit(triton_key)]  # by a C compiler; of all of Triton
        for module in pkgutil.walk_packages(pellucid.kernels.__path__, "pellucid.kernels."):
            import_module(module.name)
    for future in made:
        future.result()


def end_with_parent(parent: int) -> None:
    """End this process when the one that forked it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def compile_task(task: Task) -> float:
    """Compile a kernel, and what launches it.  How many seconds that took."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    began = time.perf_counter()
    driver.set_active(Absent(GPUTarget(*task.target)))  # type: ignore[arg-type]
    module, name = task.kernel.split(":")
    kernel = getattr(import_module(module), name)
    settle(kernel)
    compiled = kernel.preload(task.wanted)
    if utilities() is not None and hasattr(nvidia, "CudaLauncher"):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)  # which is C, and compiled as well
    return time.perf_counter() - began


@cache
def utilities() -> Any:
    """What Triton has written in C to load and launch kernels; None where nothing could be launched."""
    from triton.backends.nvidia import driver as nvidia

    has_them = find_library("cuda") is not None and hasattr(nvidia, "CudaUtils")
    return nvidia.CudaUtils() if has_them else None


class Absent:
    """A driver of a GPU that is not there: kernels can be compiled, and not be launched."""

    def __init__(self, target: Any) -> None:
        self._target, self.utils = target, utilities()

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
