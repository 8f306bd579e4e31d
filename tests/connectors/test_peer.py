"""Pages of one engine in memory that another one reads: who keeps what for how long, both ways to it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from mmap import mmap

import pytest
import torch
from msgspec.structs import replace

from pellucid.connectors.base import WorkerDoor
from pellucid.connectors.peer.lender import Lender
from pellucid.connectors.peer.mapped import Mapped, TensorMemory
from pellucid.connectors.peer.options import PeerOptions
from pellucid.connectors.peer.params import KVParams
from pellucid.connectors.peer.reader import Reader, Refused
from pellucid.connectors.peer.shelf import Shelf
from pellucid.connectors.peer.trust import Trust
from pellucid.connectors.peer.wire import Hello, Key, send
from pellucid.connectors.peer.worker import PeerWorker
from pellucid.nodes.connection import dial

STRIDE, SIZE = 64, 48
SECRET = b"known to both"
FACTS = {"the model": "tiny", "block_size": "16"}


def key(i: int) -> Key:
    return f"digest {i}".encode(), 0


def keys(*numbers: int) -> list[Key]:
    return [*map(key, numbers)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def full(num: int, **options: object) -> Shelf:
    """A shelf with a page at each of its places."""
    shelf = Shelf(num, num_ranks=1, **options)  # type: ignore[arg-type]
    shelf.written(shelf.put(keys(*range(num))), ok=True)
    return shelf


def test_what_is_longest_unused_makes_room() -> None:
    shelf = full(3)
    assert shelf.put(keys(0)) == {}, "it lies there already"
    new = shelf.put(keys(7))
    assert [*new] == keys(7)
    assert shelf.find(keys(0, 2), 0) is not None and shelf.find(keys(1), 0) is None


def test_nothing_makes_room_that_is_written_read_or_kept() -> None:
    shelf = full(3)
    assert (read := shelf.find(keys(0), 0)) is not None
    shelf.lend("a", keys(1), 9)
    shelf.written(shelf.put(keys(7)), ok=True)  # in the place of 2
    writing = shelf.put(keys(8))
    assert [*writing] == keys(8) and shelf.put(keys(9)) == {}
    shelf.release(read)
    assert [*shelf.put(keys(9))] == keys(9)


def test_what_could_not_be_written_is_not_there() -> None:
    shelf = Shelf(2, num_ranks=1)
    shelf.written(shelf.put(keys(1)), ok=False)
    assert shelf.find(keys(1), 0) is None and [*shelf.put(keys(1))] == keys(1)
    shelf = Shelf(1, num_ranks=1)
    new = shelf.put(keys(1))
    shelf.lend("a", keys(1), 9)
    shelf.written(new, ok=False)
    assert shelf.put(keys(2)) == {}, "it is kept for somebody"
    shelf.has_read("a", 0)
    assert [*shelf.put(keys(2))] == keys(2)


def test_a_reader_waits_for_what_is_being_written_and_for_nothing_else() -> None:
    shelf = Shelf(2, num_ranks=1)
    new = shelf.put(keys(1))
    threading.Timer(0.1, lambda: shelf.written(new, ok=True)).start()
    assert shelf.find(keys(1), 20) == [*new.values()]
    began = time.monotonic()
    assert shelf.find(keys(1, 2), 20) is None and time.monotonic() - began < 10


def test_kept_until_all_ranks_have_read_or_nobody_has_asked_in_time() -> None:
    clock = Clock()
    shelf = Shelf(2, num_ranks=2, clock=clock)
    shelf.written(shelf.put(keys(0, 1)), ok=True)
    shelf.lend("a", keys(0), 10)
    shelf.lend("b", keys(1), 20)
    shelf.has_read("a", 0)
    assert shelf.put(keys(2)) == {}
    shelf.has_read("a", 1)
    assert shelf.num_lent == 1 and len(shelf.put(keys(2))) == 1
    clock.now = 15
    assert shelf.expire() == 0
    clock.now = 21
    assert shelf.expire() == 1 and shelf.num_lent == 0


def test_what_is_forgotten_is_found_no_more_but_read_to_the_end() -> None:
    shelf = full(3)
    places = shelf.find(keys(0), 0)
    shelf.lend("a", keys(1), 9)
    shelf.forget()
    assert all(shelf.find(keys(i), 0) is None for i in range(3))
    assert places is not None and places[0] not in shelf.put(keys(4, 5)).values()


def test_what_is_forgotten_while_it_is_read_or_written_can_be_put_there_again() -> None:
    shelf = Shelf(4, num_ranks=1)
    shelf.written(shelf.put(keys(0)), ok=True)
    read, writing = shelf.find(keys(0), 0), shelf.put(keys(1))
    shelf.forget()
    again = shelf.put(keys(0, 1))
    assert [*again] == keys(0, 1) and read is not None
    assert not {*again.values()} & {*read, *writing.values()}
    shelf.written(writing, ok=True)
    assert shelf.find(keys(1), 0) is None, "what was written is from before"
    shelf.written(again, ok=True)
    assert shelf.find(keys(0, 1), 0) == [*again.values()]
    shelf.release(read)
    assert len(shelf.put(keys(2, 3))) == 2, "both old places are free"


@pytest.fixture
def lender() -> Iterator[Lender]:
    """Rank 1's memory has a page of sevens and one of eights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Lender(
        f"test-{os.getpid()}-{port}", FACTS, Shelf(4, num_ranks=2), num_ranks=2, stride=STRIDE,
        at=("127.0.0.1", port), secret=SECRET,
    )  # fmt: skip
    memory = mmap(made._memories[1], 0)
    new = made.shelf.put(keys(7, 8))
    for number, place in zip((7, 8), new.values(), strict=True):
        memory[place * STRIDE : place * STRIDE + SIZE] = bytes([number]) * SIZE
    made.shelf.written(new, ok=True)
    made.port = port  # type: ignore[attr-defined]
    yield made
    made.close()


def reader_of(
    lender: Lender, *, is_near: bool, facts: dict[str, str] = FACTS, seconds: float = 5.0,
    secret: bytes | None = SECRET,
) -> Reader:  # fmt: skip
    name = lender.engine_id
    if is_near:
        return Reader(name, None, 1, facts, seconds)
    far = Reader.__new__(Reader)
    from pellucid.connectors.peer import reader as module

    local, module.local_address = module.local_address, lambda _: "\0nobody"  # type: ignore[assignment]
    try:
        far.__init__(name, ("127.0.0.1", lender.port), 1, facts, seconds, secret)  # type: ignore[attr-defined,misc]
    finally:
        module.local_address = local
    return far


@pytest.mark.parametrize("is_near", [True, False])
def test_pages_come_over_memory_or_a_connection(lender: Lender, is_near: bool) -> None:
    reader = reader_of(lender, is_near=is_near)
    assert (reader.memory is not None) == is_near
    places = reader.find(keys(8, 7), 0 if is_near else SIZE)
    for number, place in zip((8, 7), places, strict=True):
        if reader.memory is not None:
            page = reader.memory[place * STRIDE : place * STRIDE + SIZE]
        else:
            reader.take(memoryview(into := bytearray(SIZE)))
            page = bytes(into)
        assert page == bytes([number]) * SIZE
    reader.done("a")
    reader.close()


def test_on_another_node_whoever_does_not_know_the_secret_gets_nothing(lender: Lender) -> None:
    with pytest.raises(OSError, match="refuses: is PELLUCID_SECRET the same there"):
        reader_of(lender, is_near=False, secret=b"another one")
    with pytest.raises(ConnectionRefusedError, match="PELLUCID_SECRET is not set here"):
        reader_of(lender, is_near=False, secret=None)
    address = "127.0.0.1", lender.port  # type: ignore[attr-defined]
    with pytest.raises(OSError):
        dial(*address, SECRET, purpose=b"something else")
    with socket.create_connection(address, timeout=20) as unproved:  # as if there were no secret
        send(unproved, Hello(lender.engine_id, 1, FACTS))
        said = b"".join(iter(lambda: unproved.recv(4096), b""))
    assert len(said) == 32, "fresh numbers to prove it with, and nothing else"


def test_whoever_has_no_secret_reads_from_nobody_who_claims_to_have_kv() -> None:
    """An impostor gets no question, and so no page is taken from it."""
    asked = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(bytes(32))
                asked.append(connection.recv(4096))
                connection.sendall(bytes(32))
                asked.append(connection.recv(4096))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(OSError, match="does not know the secret"):
            Reader("nobody", impostor.getsockname(), 0, FACTS, 5.0, SECRET)
        thread.join()
    assert len(asked[0]) == 64 and asked[1] == b"", "a proof, and no greeting"


@pytest.mark.parametrize("is_near", [True, False])
def test_engines_that_do_not_fit_are_told_both_values(lender: Lender, is_near: bool) -> None:
    other = FACTS | {"block_size": "32"}
    with pytest.raises(
        Refused, match="block_size is 16 at the engine that has the KV, 32 at the one that asks"
    ):
        reader_of(lender, is_near=is_near, facts=other)


def test_what_is_not_there_is_an_error_and_the_next_question_is_answered(lender: Lender) -> None:
    reader = reader_of(lender, is_near=True)
    with pytest.raises(LookupError):
        reader.find(keys(7, 9), 0)
    assert reader.find(keys(7), 0)
    reader.close()


def test_a_reader_that_dies_holds_nothing(lender: Lender) -> None:
    reader = reader_of(lender, is_near=True)
    reader.find(keys(7, 8), 0)
    new = lender.shelf.put(keys(1, 2, 3))
    assert len(new) == 2, "they are being read"
    lender.shelf.written(new, ok=True)
    reader.close()
    until = time.monotonic() + 20
    while lender.shelf._holds and time.monotonic() < until:
        time.sleep(0.01)
    assert len(lender.shelf.put(keys(3, 4, 5, 6))) == 4


def test_a_lender_that_goes_is_noticed_before_what_was_read_counts(lender: Lender) -> None:
    reader = reader_of(lender, is_near=True)
    reader.find(keys(7), 0)
    lender.close()
    with pytest.raises((OSError, EOFError)):
        reader.done("a")
    with pytest.raises(ConnectionRefusedError):
        reader_of(lender, is_near=True)


def test_a_lender_that_says_nothing_is_waited_for_so_long() -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(f"\0pellucid-kv-silent-{os.getpid()}")
    silent.listen()
    began = time.monotonic()
    with pytest.raises(OSError):
        Reader(f"silent-{os.getpid()}", None, 0, FACTS, 0.3)
    assert time.monotonic() - began < 10
    silent.close()


def test_an_engine_that_has_been_started_again_is_not_read_from_the_memory_that_it_had() -> None:
    name = f"again-{os.getpid()}"
    door = WorkerDoor(resolved=None, device=torch.device("cpu"), rank=0, num_ranks=1, done=lambda *_: None)  # type: ignore[arg-type]
    worker, pages = PeerWorker(door, {}), torch.zeros(2, SIZE, dtype=torch.uint8)
    worker.register(pages, None)  # type: ignore[arg-type]
    job = {
        "peer": {"engine_id": name, "host": None, "port": None, "facts": FACTS},
        "keys": keys(1),
        "request": "a",
    }
    for number in (17, 34):
        lender = Lender(name, FACTS, Shelf(1, num_ranks=1), num_ranks=1, stride=STRIDE)
        (place,) = (new := lender.shelf.put(keys(1))).values()
        mmap(lender._memories[0], 0)[place * STRIDE : place * STRIDE + SIZE] = bytes([number]) * SIZE
        lender.shelf.written(new, ok=True)
        with suppress(OSError, EOFError, LookupError):  # over the connection to the one before
            worker._load(job, [0])
        worker._load(job, [1])
        assert pages[1].tolist() == [number] * SIZE
        lender.close()
    assert worker._memories, "nobody has looked since"
    with pytest.raises(ConnectionRefusedError):
        worker._connect(job["peer"])  # type: ignore[arg-type]
    assert not worker._memories and not worker._idle[name, None, None]
    worker.close()


def test_a_port_that_is_taken_is_the_users_to_mend(lender: Lender) -> None:
    with pytest.raises(ValueError, match=r"cannot ask for KV at 127.0.0.1:\d+.*another kv_port"):
        Lender(
            "other", FACTS, Shelf(1, num_ranks=1), num_ranks=1, stride=64, at=("127.0.0.1", lender.port),  # type: ignore[attr-defined]
            secret=SECRET,
        )  # fmt: skip


HERE = KVParams(do_remote_prefill=True, remote_engine_id="x", remote_request_id="1")
ELSEWHERE = replace(HERE, remote_host="10.0.0.9", remote_port=9)


def test_only_what_is_sealed_or_listed_is_asked_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELLUCID_SECRET", raising=False)
    alone = Trust.of(())
    assert alone.refusal(HERE) is None and alone.sealed(HERE) == HERE
    assert "'x' at 10.0.0.9:9 is on another node" in (alone.refusal(ELSEWHERE) or "")
    for options in ({"peers": ["10.0.0.0/8"]}, {"peers": [], "has_port": True}):
        with pytest.raises(ValueError, match="PELLUCID_SECRET has 0 characters"):
            Trust.of(**options)  # type: ignore[arg-type]
    monkeypatch.setenv("PELLUCID_SECRET", "known to all")
    trust = Trust.of(())
    for params in (HERE, ELSEWHERE):
        sealed = trust.sealed(params)
        assert trust.refusal(sealed) is None and "no remote_seal" in (trust.refusal(params) or "")
        for change in ({"remote_request_id": "2"}, {"remote_engine_id": "y"}, {"remote_host": "10.0.0.8"}):
            assert trust.refusal(replace(sealed, **change)) is not None
    monkeypatch.setenv("PELLUCID_SECRET", "another secret")
    assert Trust.of(()).refusal(trust.sealed(ELSEWHERE)) is not None


@pytest.mark.parametrize(
    "peers,is_listed", [(["10.0.0.9"], True), (["10.0.0.0/24"], True), (["10.0.1.0/24", "name"], False)]
)
def test_hosts_may_be_listed(peers: list[str], is_listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_SECRET", "known to all")
    assert (Trust.of(peers).refusal(ELSEWHERE) is None) == is_listed


class Counting(TensorMemory):
    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_memory_of_an_engine_that_has_gone_is_let_go_of_behind_its_last_user() -> None:
    held = Counting(torch.zeros(4, STRIDE, dtype=torch.uint8))
    memory = Mapped((1, 2), held)
    with memory.used() as found:
        memory.retire()
        assert found is held and not held.num_closed
        with pytest.raises(LookupError), memory.used():
            pass
    memory.retire()
    assert held.num_closed == 1


def test_params_are_vllms_words() -> None:
    given = '{"do_remote_prefill":true,"remote_engine_id":"x","remote_block_ids":[1],"remote_host":null}'
    params = KVParams.of(given)
    assert params.do_remote_prefill and params.remote_block_ids == [1]
    assert KVParams.of(params.encode()) == params and KVParams.of(None) == KVParams()


def test_options_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown key 'lend_second' .* did you mean 'lend_seconds'"):
        PeerOptions.of({"lend_second": 3})
    with pytest.raises(ValueError, match="lend_seconds is 0, must be more than 0"):
        PeerOptions.of({"lend_seconds": 0})
