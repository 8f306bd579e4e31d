"""Events of blocks, as a subscriber has them over ZMQ: what he believes to be cached is what is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pellucid import LLM, EngineConfig, SamplingParams
from pellucid.connectors.config import KVEventsConfig
from pellucid.connectors.events import END, KVEvents, number, of_engine
from pellucid.kv.hashes import Prefix, root_digest
from pellucid.kv.kinds import Full, Window
from pellucid.lora.request import AdapterRef
from pellucid.schedule.scheduler import Scheduler
from tests.llm.test_invariance import BASE
from tests.patience import PATIENCE, eventually
from tests.schedule.device import Device, make_request, make_scheduler, run_to_end, step
from tests.schedule.store import Store, StoreTransfer


class Subscriber:
    """Believes what it hears, and counts messages."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._context = zmq.Context()
        self._heard, self._asks = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._heard.setsockopt_string(zmq.SUBSCRIBE, config.get("topic", ""))
        self._heard.connect(config["endpoint"])
        self._asks.connect(config["replay_endpoint"])
        self.next, self.events = 0, list[dict[str, Any]]()
        self.payloads: list[bytes] = []
        self.found: dict[int, set[int]] = {}  # by kind of KV, the hashes of what is there

    def ask(self, first: int) -> list[tuple[int, bytes]]:
        """Messages from this number on."""
        self._asks.send_multipart((b"", first.to_bytes(8, "big")))
        again: list[tuple[int, bytes]] = []
        while self._asks.poll(1000 * PATIENCE):
            _, num, payload = self._asks.recv_multipart()
            if num == END:
                assert payload == b""
                return again
            again.append((int.from_bytes(num, "big"), payload))
        raise TimeoutError

    def catch_up(self) -> None:
        """As one that comes late: a subscription takes its time, so nothing is missed that way."""
        for num, payload in self.ask(self.next):
            assert num == self.next
            self.next += 1
            self._believe(payload)

    def is_heard(self, scheduler: Scheduler) -> bool:
        """Has the subscription come there?  What is sent before that goes to nobody."""
        scheduler.clear_prefix_cache()
        return bool(self._heard.poll(20)) and bool(self._heard.recv_multipart())

    def hear(self) -> None:
        """The next message."""
        assert self._heard.poll(1000 * PATIENCE)
        topic, num, payload = self._heard.recv_multipart()
        assert (topic, int.from_bytes(num, "big")) == (b"kv-events", self.next)
        self.next += 1
        self._believe(payload)

    def _believe(self, payload: bytes) -> None:
        time, events, engine = msgspec.msgpack.decode(payload)
        assert time > 1e9 and engine == 0
        self.payloads.append(payload)
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.found.clear()
                continue
            assert event["medium"] == "GPU"
            names, found = event["block_hashes"], self.found.setdefault(event["group_idx"], set())
            if event["type"] == "BlockRemoved":
                assert found.issuperset(names)
                found.difference_update(names)
            else:
                assert not found.intersection(names)
                found.update(names)

    def stored(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == "BlockStored"]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/again",
        "topic": "kv-events",
    }


@contextmanager
def subscribed(config: dict[str, Any]) -> Iterator[Subscriber]:
    subscriber = Subscriber(config)
    try:
        yield subscriber
    finally:
        subscriber.close()


@contextmanager
def listening(config: dict[str, Any]) -> Iterator[tuple[KVEvents, Subscriber]]:
    """The feature alone, for a scheduler without an engine."""
    feature = KVEvents(SimpleNamespace(kv_events=KVEventsConfig(**config), replica=0))  # type: ignore[arg-type]
    with subscribed(config) as subscriber:
        yield feature, subscriber
        feature.shutdown()


def test_a_subscriber_knows_what_is_cached(tiny: Path, config: dict[str, Any]) -> None:
    """Also where the pool is small, so that blocks are evicted, and when all are forgotten."""
    rng = random.Random(7)
    shared = [rng.randrange(1, 90) for _ in range(48)]
    prompts = [shared[: 16 * (i % 4)] + [rng.randrange(1, 90) for _ in range(20)] for i in range(12)]
    options = {**BASE, "num_gpu_blocks_override": 16, "kv_events_config": config, "max_num_seqs": 4}
    with LLM(str(tiny), **options) as llm, subscribed(config) as subscriber:
        pool = llm.llm_engine.engine.scheduler.kv.pool  # type: ignore[attr-defined]
        texts = list[list[int]]()
        for salt in (None, "mine"):
            given = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            outputs = llm.generate(given, params, use_tqdm=False)
            texts += [
                [*prompt, *output.outputs[0].token_ids]
                for prompt, output in zip(prompts, outputs, strict=True)
            ]
            subscriber.catch_up()
            assert subscriber.found == {0: {number(digest) for digest in pool.index(0)}}
        known = dict[int, tuple[int | None, list[int], str | None]]()
        for i, text in enumerate(texts):
            salt = "mine" if i >= len(prompts) else None
            prefix = Prefix(root_digest(None, salt), 16)
            prefix.extend(text)
            names: list[int | None] = [None, *map(number, prefix.digests)]
            for j, name in enumerate(names[1:]):
                assert name is not None
                known[name] = names[j], text[16 * j : 16 * j + 16], salt
        for event in subscriber.stored():
            above, tokens, num = event["parent_block_hash"], event["token_ids"], len(event["block_hashes"])
            assert (event["block_size"], len(tokens), len(event["extra_keys"])) == (16, 16 * num, num)
            assert (event["lora_id"], event["lora_name"]) == (None, None)
            for i, name in enumerate(event["block_hashes"]):
                found, text, salt = known[name]
                assert (found, text) == (above, tokens[16 * i : 16 * i + 16])
                assert event["extra_keys"][i] == ([salt] if salt and above is None else None)
                above = name
        assert any(event["type"] == "BlockRemoved" for event in subscriber.events)
        llm.reset_prefix_cache()
        llm.llm_engine.step()
        subscriber.catch_up()
        assert not subscriber.found and subscriber.events[-1] == {"type": "AllBlocksCleared"}
        assert [payload for _, payload in subscriber.ask(1)] == subscriber.payloads[1:]
        assert subscriber.ask(subscriber.next) == []


def test_kinds_and_loads(config: dict[str, Any]) -> None:
    """A load's blocks are told of like those that were computed; of windows, what is there."""
    store = StoreTransfer(Store(num_tokens=8))
    with listening(config) as (feature, subscriber):
        scheduler = make_scheduler(
            store=store, features={"kv_events": feature}, kinds=(Full(4), Window(4, 1, 8)), num_blocks=60
        )
        for i in range(6):
            scheduler.add(make_request(f"{i}", 10 + 5 * i))
        device = Device()
        while scheduler.has_unfinished:
            step(scheduler, device)
            store.say_all()
        subscriber.catch_up()
        pool = scheduler.kv.pool
        assert subscriber.found == {kind: {*map(number, pool.index(kind))} for kind in (0, 1)}
        kinds = {
            (event["group_idx"], event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window"))
            for event in subscriber.stored()
        }
        assert kinds == {(0, "full_attention", None), (1, "sliding_window", 8)}
        assert store.store.over and all(ok for _, ok in store.store.over), "there were loads"


def test_what_was_loaded_belongs_to_whom_it_was_loaded_for(config: dict[str, Any]) -> None:
    store = StoreTransfer(Store(num_tokens=8))
    with listening(config) as (feature, subscriber):
        scheduler = make_scheduler(features={"kv_transfer": store, "kv_events": feature})
        scheduler.add(replace(make_request("a", 13), cache_salt="mine"))
        device = Device()
        while scheduler.has_unfinished:
            step(scheduler, device)
            store.say_all()
        subscriber.catch_up()
        assert store.store.over, "there was a load"
        first = subscriber.stored()[0]
        assert len(first["block_hashes"]) == 2 and first["extra_keys"] == [["mine"], None]


def test_an_adapter_is_named_and_so_is_a_topic(config: dict[str, Any]) -> None:
    request = replace(make_request("a", 9), lora=AdapterRef("tuned", "/nowhere", "content").encode())
    with listening(config) as (feature, subscriber):
        scheduler, device = make_scheduler(features={"kv_events": feature}), Device()
        eventually(lambda: subscriber.is_heard(scheduler))
        subscriber.next = subscriber.ask(0)[-1][0] + 1
        scheduler.add(request)
        run_to_end(scheduler, device)
        subscriber.hear()
        event = subscriber.stored()[0]
        assert event["lora_name"] == "tuned" and event["extra_keys"] == [["tuned"]] * 2


def test_events_that_were_lost_leave_a_gap(config: dict[str, Any]) -> None:
    config["max_queue_size"] = 2
    with listening(config) as (feature, subscriber):
        scheduler = make_scheduler(features={"kv_events": feature})
        publisher = feature._publisher
        assert publisher is not None
        wake, publisher._wake = publisher._wake, lambda: None  # it comes to nothing meanwhile
        for _ in range(3):
            scheduler.clear_prefix_cache()
        wake()
        eventually(lambda: len(publisher._noted) == 0)
        publisher._wake = wake
        scheduler.clear_prefix_cache()
        assert [num for num, _ in subscriber.ask(0)] == [0, 2]


def test_whoever_notes_lives_on_when_nobody_sends(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with listening(config) as (feature, _):
        scheduler = make_scheduler(features={"kv_events": feature})
        publisher = feature._publisher
        assert publisher is not None
        publisher._encoder = None
        scheduler.clear_prefix_cache()
        publisher._thread.join(PATIENCE)
        assert "events of blocks are sent no more" in caplog.text
        for _ in range(3):
            scheduler.clear_prefix_cache()
        assert not publisher._noted
        feature.shutdown()
        scheduler.clear_prefix_cache()


def test_nothing_is_kept_that_nobody_can_ask_for(config: dict[str, Any]) -> None:
    del config["replay_endpoint"]
    feature = KVEvents(SimpleNamespace(kv_events=KVEventsConfig(**config), replica=0))  # type: ignore[arg-type]
    scheduler = make_scheduler(features={"kv_events": feature})
    scheduler.clear_prefix_cache()
    feature.shutdown()
    assert feature._publisher is not None and (feature._publisher._next, len(feature._publisher._kept)) == (
        1,
        0,
    )


def test_each_engine_has_its_own_ports() -> None:
    assert of_engine("tcp://*:5557", 0) == "tcp://*:5557"
    assert of_engine("tcp://[::]:5557", 2) == "tcp://[::]:5559"
    assert of_engine("ipc:///tmp/x", 1) == "ipc:///tmp/x_dp1"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"enable_kv_cache_event": True}, "did you mean 'enable_kv_cache_events'"),
        ({"publisher": "nats"}, "publisher in kv_events_config is 'nats'"),
        ({"enable_kv_cache_events": "false"}, "enable_kv_cache_events in kv_events_config is 'false'"),
        ({"hwm": 0}, "hwm in kv_events_config is 0"),
        ({"hwm": True}, "hwm in kv_events_config is True"),
        ({"topic": 3}, "topic in kv_events_config is 3"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        KVEventsConfig.of(EngineConfig.from_options({"kv_events_config": given}).cache)


def test_nobody_is_told_unless_it_is_asked_for() -> None:
    for given in (None, {}, {"enable_kv_cache_events": True, "publisher": "null"}, '{"topic": "a"}'):
        assert KVEventsConfig.of(EngineConfig.from_options({"kv_events_config": given}).cache) is None
