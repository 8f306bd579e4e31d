"""Memory that workers take themselves, and readers reach by its address: CUDA's handles, NIXL."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pellucid.connectors.base import Ended, Job, WorkerDoor
from pellucid.connectors.config import KVTransferConfig
from pellucid.connectors.peer import device, mapped, nixl
from pellucid.connectors.peer.lender import Lender
from pellucid.connectors.peer.options import PeerOptions, way_of
from pellucid.connectors.peer.reader import Refused
from pellucid.connectors.peer.shelf import Shelf
from pellucid.connectors.peer.wire import Key
from pellucid.connectors.peer.worker import PeerWorker
from pellucid.schedule.plan import ints

STRIDE, NUM = 64, 6
FACTS = {"the model": "tiny"}
SECRET = b"known to both"


class ToyDriver:
    """Memory of this process.  Handles are addresses, and copies are done at once."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}
        self.opened: list[int] = []
        self.num_copies = 0

    def take(self, num_bytes: int) -> int:
        memory = ctypes.create_string_buffer(num_bytes)
        self.taken[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def give_back(self, pointer: int) -> None:
        del self.taken[pointer]

    def handle(self, pointer: int) -> bytes:
        return pointer.to_bytes(device.HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, pointer: int) -> None:
        self.opened.remove(pointer)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.num_copies += 1
        ctypes.memmove(target, source, num_bytes)


class ToyAgent:
    """NIXL's calls, in one process: a transfer is done when its state is asked for."""

    others: dict[bytes, ToyAgent] = {}

    def __init__(self) -> None:
        self.name = f"agent {len(self.others)}".encode()
        self.others[self.name] = self
        self.registered: list[tuple[int, int]] = []
        self.known: list[bytes] = []
        self.handles: dict[int, Any] = {}
        self.fails = False

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        self.registered += [(start, size) for start, size, _, _ in reg_list]
        return reg_list

    def deregister_memory(self, dereg_list: Any) -> None:
        for start, size, _, _ in dereg_list:
            self.registered.remove((start, size))

    def get_agent_metadata(self) -> bytes:
        return self.name

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.known.append(metadata)
        return metadata

    def remove_remote_agent(self, agent: bytes) -> None:
        self.known.remove(agent)

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: Any) -> int:
        assert operation == "READ" and remote_agent in self.known
        for descs, agent in ((local_descs, self), (remote_descs, self.others[remote_agent])):
            for start, size, _ in descs:
                assert any(a <= start and start + size <= a + n for a, n in agent.registered), (
                    "not registered"
                )
        self.handles[len(self.handles)] = local_descs, remote_descs
        return len(self.handles) - 1

    def transfer(self, handle: int) -> str:
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        if self.fails:
            return "ERR"
        for (here, size, _), (there, _, _) in zip(*self.handles[handle], strict=True):
            ctypes.memmove(here, there, size)
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        del self.handles[handle]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ToyDriver:
    made = ToyDriver()
    monkeypatch.setattr(device, "Cuda", lambda: made)
    return made


@pytest.fixture(params=["cuda", "nixl"])
def way(request: pytest.FixtureRequest, driver: ToyDriver, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(nixl, "make_agent", ToyAgent)
    return request.param


def worker_of(said: list[Ended], fill: int = 0, num: int = NUM) -> PeerWorker:
    door = WorkerDoor(
        resolved=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        rank=0,
        num_ranks=1,
        done=lambda *ended: said.append(Ended(*ended)),
        load_seconds=5.0,
    )
    worker = PeerWorker(door, {})
    pages = torch.full((num, STRIDE), fill, dtype=torch.uint8) + torch.arange(num, dtype=torch.uint8)[:, None]
    worker.register(pages, None)  # type: ignore[arg-type]
    return worker


def do(worker: PeerWorker, said: list[Ended], what: object, pages: list[int] | None = None) -> bool:
    job = Job(number=len(said), is_load="keys" in what, pages=ints(pages or []), what=what)  # type: ignore[operator]
    worker._do(job, None)
    assert said[-1].number == job.number
    return said[-1].ok


@pytest.fixture
def lent(way: str) -> Iterator[tuple[Lender, PeerWorker, dict[str, object], list[Key]]]:
    """Pages 1, 2 and 4 of an engine, which it lends, and where to ask."""
    keys = [(f"digest {i}".encode(), 0) for i in range(3)]
    shelf = Shelf(4, num_ranks=1)
    lender = Lender(f"{way}-{os.getpid()}", FACTS, shelf, num_ranks=1, stride=STRIDE, way=way)
    peer: dict[str, object] = {"engine_id": lender.engine_id, "host": None, "port": None, "facts": FACTS}
    said = list[Ended]()
    worker = worker_of(said, fill=10)
    assert do(worker, said, {"attach": peer, "way": way, "num_places": 4, "stride": STRIDE})
    new = shelf.put(keys)
    assert do(worker, said, {"places": [new[key] for key in keys]}, [1, 2, 4])
    shelf.written(new, ok=True)
    yield lender, worker, peer, keys
    lender.close()
    worker.close()


def test_pages_go_to_the_pages_of_another_engine(lent: Any, way: str, driver: ToyDriver) -> None:
    _, lends, peer, keys = lent
    said = list[Ended]()
    worker = worker_of(said)
    num_copies = driver.num_copies
    for order in ([0, 1, 2], [2, 1, 0]):
        wanted = {"peer": peer, "keys": [keys[i] for i in order], "request": "a"}
        assert do(worker, said, wanted, [3, 4, 0])
        assert worker._pages[[3, 4, 0], 5].tolist() == [[11, 12, 14][i] for i in order]
        assert worker._pages[[1, 2, 5], 5].tolist() == [1, 2, 5]
    assert [ended.seconds > 0 for ended in said] == [True, True]
    if way == "cuda":
        assert driver.num_copies - num_copies == 2 + 3, "what lies side by side is one copy"
    worker.close()
    assert not driver.opened and len(driver.taken) == (way == "cuda"), "and not what is another one's"
    lends.close()
    assert not driver.taken


def test_a_page_that_is_not_there_and_an_engine_that_does_not_fit(lent: Any, driver: ToyDriver) -> None:
    lender, _, peer, keys = lent
    said = list[Ended]()
    worker = worker_of(said)
    assert not do(worker, said, {"peer": peer, "keys": [(b"none", 0)], "request": "a"}, [0])
    assert not do(worker, said, {"peer": peer | {"facts": {}}, "keys": keys[:1], "request": "a"}, [0])
    assert do(worker, said, {"peer": peer, "keys": keys[:1], "request": "a"}, [0])
    lender.close()
    assert not do(worker, said, {"peer": peer, "keys": keys[:1], "request": "a"}, [0])
    num_taken = len(driver.taken), sum(len(each.registered) for each in ToyAgent.others.values())
    own = {"attach": peer, "way": lender._way, "num_places": 4, "stride": STRIDE}
    assert not do(worker, said, own), "nobody is there to be told where it would lend from"
    assert num_taken == (len(driver.taken), sum(len(each.registered) for each in ToyAgent.others.values()))
    worker.close()


def test_a_transfer_that_fails_is_a_load_that_fails(lent: Any, way: str, driver: ToyDriver) -> None:
    _, _, peer, keys = lent
    said = list[Ended]()
    worker, wanted = worker_of(said), {"peer": peer, "keys": keys, "request": "a"}
    assert do(worker, said, wanted, [0, 1, 2])
    if way == "nixl":
        agent = worker._ways["nixl"].agent  # type: ignore[attr-defined]
        agent.fails = True
        assert not do(worker, said, wanted, [0, 1, 2])
        assert not agent.handles
    else:

        def fails(*_: int) -> None:
            raise OSError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE")

        driver.copy = fails  # type: ignore[method-assign]
        assert not do(worker, said, wanted, [0, 1, 2])
    worker.close()


def test_a_place_that_memory_lacks_is_no_address(driver: ToyDriver) -> None:
    """Beyond it and before it lies what is somebody else's."""
    memory, address = device.CudaHandles(torch.zeros(1), driver).take(4, 16)
    opened = device.CudaHandles(torch.zeros(1), driver).open(address)
    pages = torch.zeros(1, 16, dtype=torch.uint8)
    for place in (4, 10**6, -1):
        for side in (memory, opened):
            with pytest.raises(LookupError, match="of memory with 4"):
                side.write([place], pages, [0])
    opened.write([3], pages, [0])


def test_a_way_that_is_not_here_is_refused_by_name(lent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, peer, keys = lent
    monkeypatch.setattr(mapped, "WAYS", {})
    monkeypatch.setattr("pellucid.connectors.peer.worker.WAYS", {})
    worker = worker_of([])
    with pytest.raises(Refused, match="which is not here"):
        worker._connect(peer)  # type: ignore[arg-type]
    worker.close()


def test_which_way() -> None:
    def config(**said: object) -> KVTransferConfig:
        return KVTransferConfig.from_fields({"kv_connector": "PeerConnector"} | said)

    assert way_of(config(), "cuda") is None and way_of(config(kv_buffer_device="cpu"), "cuda") is None
    assert way_of(config(kv_buffer_device="cuda"), "cuda") == "cuda"
    with pytest.raises(ValueError, match="has no GPU"):
        way_of(config(kv_buffer_device="cuda"), "cpu")
    with pytest.raises(ValueError, match="engines of other nodes cannot reach"):
        way_of(config(kv_buffer_device="cuda", kv_port=1), "cuda")
    with pytest.raises(ValueError, match="kv_buffer_device in kv_transfer_config is 'disk'"):
        config(kv_buffer_device="disk")
    places = PeerOptions(gpu_bytes_to_use=10 * STRIDE).num_places(100, STRIDE, 1, on_gpu=True)
    assert places == 10


LENDS_A_GPUS = """
import sys, torch
from pellucid.connectors.peer.device import CudaHandles
torch.cuda.set_device(0)
pages = torch.arange(6, dtype=torch.uint8, device="cuda")[:, None].repeat(1, 1 << 20)
memory, address = CudaHandles(pages).take(4, 1 << 20)
memory.write([2, 0], pages, [5, 1])
torch.cuda.synchronize()
print(address.hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_another_processs_gpu_outlives_it_where_it_is_read() -> None:
    """On two GPUs, if there are; who has it open can read on when its process is killed."""
    other = subprocess.Popen(
        [sys.executable, "-c", LENDS_A_GPUS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout
    address = bytes.fromhex(other.stdout.readline().strip().decode())
    here = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(here):
        pages = torch.zeros(4, 1 << 20, dtype=torch.uint8, device=here)
        memory = device.CudaHandles(pages).open(address)
        for is_killed in (False, True):
            pages.zero_()
            memory.read([2, 0], pages, [0, 3])
            assert pages[:, 7].tolist() == [5, 0, 0, 1], f"killed: {is_killed}"
            other.kill()
            other.wait()
        memory.close()


LENDS = """
import sys, torch
from pellucid.connectors.peer.nixl import Nixl
pages = torch.arange(6, dtype=torch.uint8)[:, None].repeat(1, 64)
way = Nixl(pages)
memory, address = way.take(4, 64)
memory.write([2, 0], pages, [5, 1])
print(address.hex(), flush=True)
sys.stdin.read()
"""


def test_nixl_itself_reads_from_another_process() -> None:
    pytest.importorskip("nixl._api")
    other = subprocess.Popen([sys.executable, "-c", LENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin and other.stdout
    lines = (line.strip().decode() for line in other.stdout)
    address = bytes.fromhex(next(line for line in lines if len(line) > 200 and " " not in line))
    pages = torch.zeros(4, STRIDE, dtype=torch.uint8)
    way = nixl.Nixl(pages)
    memory = way.open(address)
    memory.read([2, 0], pages, [0, 3])
    assert pages[:, 7].tolist() == [5, 0, 0, 1]
    memory.close()
    way.close()
    other.stdin.close()
    assert other.wait(60) == 0
