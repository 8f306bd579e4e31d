"""Engines for prompts, and engines that go on from there: the tokens of one engine, whoever is lost."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid import LLM, RequestOutput, SamplingParams
from pellucid.config import ParallelConfig
from pellucid.connectors.peer.params import KVParams
from pellucid.router import replicas
from pellucid.router.replicas import Replicas
from tests.llm.test_invariance import BASE, random_requests
from tests.processes import members

pytestmark = pytest.mark.usefixtures("forked_members")

NUM = 40
SOON = {"kv_connector": "PeerConnector", "kv_load_seconds": 2}


def mixed(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Every kind of sampling; some answers of one token, some that a string ends, three from one prompt."""
    prompts, params = random_requests(NUM, seed=seed)
    params[0] = SamplingParams(max_tokens=1)
    params[1] = SamplingParams(n=3, max_tokens=9, seed=7)
    params[2] = SamplingParams(stop=["e", "a "], max_tokens=60, seed=8)
    params[3] = SamplingParams(temperature=0, max_tokens=60, min_tokens=3, prompt_logprobs=0, logprobs=2)
    return prompts, params


def shown(outputs: list[RequestOutput]) -> list[object]:
    return [
        (o.error, len(o.prompt_logprobs or ()), [(c.text, c.token_ids, c.finish_reason) for c in o.outputs])
        for o in outputs
    ]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[object]:
    with LLM(str(tiny), **BASE) as llm:
        return shown(llm.generate(*mixed(3), use_tqdm=False))


def test_prompts_and_decodes_on_engines_of_their_own(tiny: Path, expected: list[object]) -> None:
    with LLM(str(tiny), prefill_engines=1, decode_engines=2, **BASE) as llm:
        outputs = llm.generate(*mixed(3), use_tqdm=False)
        first, *others = llm.llm_engine.stats_per_engine
        assert isinstance(llm.llm_engine.engine, Replicas)
        assert llm.llm_engine.engine.router.loads == [0, 0, 0]
    assert shown(outputs) == expected
    assert first.num_sampled_tokens == NUM + 1, "a token for each completion that goes on"
    assert min(other.num_sampled_tokens for other in others) > 100
    brought = sum(other.num_cached_tokens for other in others)
    blocks = 16 * sum(len(prompt) // 16 for prompt in mixed(3)[0][1:])
    assert brought >= blocks, "decode engines compute no block of a prompt"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", ["engine 0", "engine 1"])
def test_an_engine_of_either_role_may_be_lost(
    tiny: Path, expected: list[object], who: str, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other role's do its work; what was on its way between them is computed again."""
    monkeypatch.setattr(replicas, "GRACE", 0.0)
    others = members()
    options = BASE | {"worker_timeout": 4.0, "kv_transfer_config": SOON}
    with LLM(str(tiny), prefill_engines=1, decode_engines=1, **options) as llm:
        pids = {name: pid for pid, name in members().items() if pid not in others}
        engine, found = llm.llm_engine, dict[str, RequestOutput]()
        prompts, params = mixed(3)
        ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
            if len(found) > NUM // 3 and who in pids:
                os.kill(pids.pop(who), how)
        assert who not in pids
    assert shown([found[i] for i in ids]) == expected


def test_each_engine_has_gpus_of_its_own() -> None:
    parallel = ParallelConfig(prefill_engines=1, decode_engines=2, tensor_parallel_size=2)
    assert [parallel.first_gpu(replica) for replica in range(3)] == [0, 2, 4]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"prefill_engines": 1}, "prefill_engines is 1 and decode_engines 0: prompts need one of each"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, "LMCacheConnectorV1"),
        ({"prefill_engines": 1, "decode_engines": 1, "data_parallel_size": 3}, "data_parallel_size is 3"),
    ],
)
def test_what_is_not_served_is_refused(tiny: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny), **options, **BASE)


def test_a_place_that_is_too_small_for_all_costs_time_alone(tiny: Path, expected: list[object]) -> None:
    few = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 30_000}}
    with LLM(str(tiny), prefill_engines=1, decode_engines=1, kv_transfer_config=few, **BASE) as llm:
        assert shown(llm.generate(*mixed(3), use_tqdm=False)) == expected


ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_two_engines_of_one_device_hand_a_prompt_over(tiny: Path, device: str) -> None:
    prompt = [3 + i * 37 % 300 for i in range(100)]
    options = BASE | {"device": device, "gpu_memory_utilization": 0.3}
    lends = {"kv_connector": "PeerConnector", "kv_role": "kv_producer", "engine_id": f"test-{os.getpid()}"}
    borrows = lends | {"kv_role": "kv_consumer", "engine_id": None}
    with (
        LLM(str(tiny), kv_transfer_config=lends, **options) as first,
        LLM(str(tiny), kv_transfer_config=borrows, **options) as second,
    ):
        _, name = answer(first, prompt, 1, KVParams(do_remote_decode=True))
        expected, _ = answer(first, prompt, 20)
        where = KVParams(
            do_remote_prefill=True, remote_engine_id=str(lends["engine_id"]), remote_request_id=name
        )
        brought, _ = answer(second, prompt, 20, where)
        features: Any = first.llm_engine.engine.scheduler.features  # type: ignore[union-attr]
        shelf = features._features["kv_transfer"].connector._lender.shelf
        assert shelf.num_lent == 0, "all is read"
        answer(first, prompt, 1, KVParams(do_remote_decode=True))
        assert shelf.num_lent == 1
        shelf._clock = lambda: math.inf
        answer(first, prompt, 1)
        assert shelf.num_lent == 0, "nobody has asked in time"
        page_bytes = second.llm_engine.engine.executor.worker.layout.page_bytes  # type: ignore[union-attr]
        lent, told = first.llm_engine.stats.of_features, second.llm_engine.stats.of_features
    assert (told["kv_peer_loads"], told["kv_peer_failed_loads"]) == (1, 0)
    assert told["kv_peer_pages_loaded"] == 6 <= lent["kv_peer_pages_saved"]
    assert told["kv_peer_bytes_loaded"] == 6 * page_bytes
    assert told["kv_peer_load_microseconds"] > told["kv_peer_copy_microseconds"] > 0
    assert brought.outputs[0].token_ids == expected.outputs[0].token_ids
    assert brought.num_cached_tokens == 96


def test_tiers_beside_another_engines_kv(tiny: Path) -> None:
    """What has come from another engine comes back from the host when the cache has lost it."""
    prompts = [[3 + (i * 37 + seed * 11) % 300 for i in range(100)] for seed in range(5)]
    tiers = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [tiers, {"kv_connector": "PeerConnector"}]},
    }
    options = BASE | {
        "num_gpu_blocks_override": 20,
        "block_size": 16,
        "max_num_seqs": 2,
        "max_model_len": 160,
    }
    lends = both | {"kv_role": "kv_producer", "engine_id": f"multi-{os.getpid()}"}
    with (
        LLM(str(tiny), kv_transfer_config=lends, **options) as first,
        LLM(str(tiny), kv_transfer_config=both | {"kv_role": "kv_consumer"}, **options) as second,
    ):
        _, name = answer(first, prompts[0], 1, KVParams(do_remote_decode=True))
        expected, _ = answer(first, prompts[0], 20)
        where = KVParams(
            do_remote_prefill=True, remote_engine_id=str(lends["engine_id"]), remote_request_id=name
        )
        brought, _ = answer(second, prompts[0], 20, where)
        assert brought.num_cached_tokens == 96
        for llm in (first, second):
            for prompt in prompts[1:]:
                answer(llm, prompt, 2)
            again, _ = answer(llm, prompts[0], 20)
            assert again.num_cached_tokens == 96 and llm.llm_engine.stats.of_features["kv_tiers_hits"] == 1
            assert again.outputs[0].token_ids == expected.outputs[0].token_ids
    assert brought.outputs[0].token_ids == expected.outputs[0].token_ids
    for wrong, message in (
        ({}, '"connectors"'),
        ({"connectors": [{"kv_connector": "MultiConnector"}]}, "one of its own connectors"),
        ({"connectors": [tiers | {"kv_load_seconds": 1.0}]}, "beside MultiConnector"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(str(tiny), kv_transfer_config=both | {"kv_connector_extra_config": wrong}, **options)


def answer(
    llm: LLM, prompt: list[int], num: int, params: KVParams | None = None
) -> tuple[RequestOutput, str]:
    """And what the engine calls the request."""
    engine = llm.llm_engine
    sampling = engine.own_sampling(SamplingParams(temperature=0, max_tokens=num, ignore_eos=True))
    (tokens,) = engine.tokenize([{"prompt_token_ids": prompt}])
    name = engine.queue(tokens, sampling, kv_transfer=None if params is None else params.encode())
    last = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()][-1]
    return last, name
