"""What goes wrong with one request ends it alone: others end as they do alone, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.worker.pipeline  # noqa: F401 (registers the executor "lazy")
from pellucid import LLM, RequestOutput, SamplingParams
from pellucid.engine.core import Engine
from pellucid.features.grammar.host import Grammars
from pellucid.features.logprobs import worker as logprobs_worker
from pellucid.sample.state import SamplingState
from pellucid.sampling_params import StructuredOutputsParams
from pellucid.schedule import scheduler as scheduler_module
from tests.llm.test_invariance import NGRAM

pytestmark = pytest.mark.usefixtures("forked_members")

NUM_SLOTS = 6
OPTIONS: dict[str, object] = {
    "dtype": "float32", "device": "cpu", "block_size": 16, "max_num_seqs": NUM_SLOTS, "depth": 2,
    "max_num_batched_tokens": 24, "check_invariants": True, "num_gpu_blocks_override": 60,
}  # fmt: skip
# Made a request for all that any of the places below deals with; the seed is what they know it by.
MARK = 666
CHOSEN = SamplingParams(
    max_tokens=8,
    min_tokens=2,
    seed=MARK,
    logprobs=7,
    prompt_logprobs=6,
    bad_words=["zq"],
    logit_bias={5: 1.0},
)
OTHERS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=9, seed=1, logprobs=2, prompt_logprobs=1, bad_words=["no"], min_tokens=3),
    SamplingParams(max_tokens=5, seed=2, top_p=0.9, presence_penalty=0.5, allowed_token_ids=range(40, 90)),  # type: ignore[arg-type]
    SamplingParams(max_tokens=20, seed=3, ignore_eos=True),
]
PROMPTS = [[3 + i * k % 300 for i in range(20 + k)] for k in (7, 11, 13, 17, 19)]
Break = Callable[[pytest.MonkeyPatch], None]


def fails_for(target: Any, name: str, is_chosen: Callable[..., bool]) -> Break:
    """Have a real function fail where it deals with the chosen request."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        real = getattr(target, name)

        def fails(*args: Any, **kwargs: Any) -> object:
            if is_chosen(*args, **kwargs):
                raise RuntimeError("on purpose")
            return real(*args, **kwargs)

        monkeypatch.setattr(target, name, fails)

    return patch


PLACES: dict[str, Break] = {
    "its parameters are read": fails_for(SamplingState, "prepare", lambda _, a: a.sampling.seed == MARK),
    "its numbers are read": fails_for(SamplingState, "_numbers_of", lambda _, a: a.seed == MARK),
    "its lists are read": fails_for(SamplingState, "_lists_of", lambda _, a: a.sampling.seed == MARK),
    "its logprobs are made": fails_for(logprobs_worker, "entries_of", lambda *_, num_top: num_top == 7),
    "its prompt's are made": fails_for(logprobs_worker, "entries_of", lambda *_, num_top: num_top == 6),
    "it is taken in": fails_for(Engine, "_add", lambda _, request: request.sampling.seed == MARK),
    "its blocks are begun": fails_for(scheduler_module, "root_digest", lambda _, salt: salt == "chosen"),
}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of each request by itself, the chosen one last."""
    return [tokens_of(ask(llm, [i])[0]) for i in range(5)]


def ask(llm: LLM, which: list[int], chosen: SamplingParams = CHOSEN) -> list[RequestOutput]:
    """Of the requests with these numbers; 4 is the chosen one."""
    prompts = [{"prompt_token_ids": PROMPTS[i], "cache_salt": "chosen" if i == 4 else "other"} for i in which]
    params = [[*OTHERS, chosen][i] for i in which]
    return llm.generate(prompts, params, use_tqdm=False)


def tokens_of(output: RequestOutput) -> list[int]:
    assert output.error is None, output.error
    return output.outputs[0].token_ids


def assert_whole(llm: LLM) -> None:
    """The engine lives, and has all its slots and blocks."""
    engine = llm.llm_engine.engine
    assert isinstance(engine, Engine) and engine.error is None
    for _ in range(3):  # what is still in flight
        engine.step()
    engine.scheduler.check([])
    assert len(engine.scheduler._slots) == NUM_SLOTS and engine.stats().kv_usage == 0


def assert_isolated(llm: LLM, alone: list[list[int]], words: str, chosen: SamplingParams = CHOSEN) -> None:
    outputs = ask(llm, [0, 4, 1, 2, 3], chosen)
    failed = outputs.pop(1)
    assert failed.outputs[0].finish_reason == "error" and words in str(failed.error)
    assert [tokens_of(output) for output in outputs] == alone[:4]
    assert_whole(llm)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_request_that_fails_on_its_way_in_fails_alone(
    llm: LLM, alone: list[list[int]], place: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch)
    assert_isolated(llm, alone, "on purpose")
    monkeypatch.undo()
    assert [tokens_of(output) for output in ask(llm, [4, 3, 0])] == [alone[4], alone[3], alone[0]]


@pytest.mark.parametrize("name", ["prepare", "_row"])
def test_a_grammar_that_fails_ends_its_own_request(
    llm: LLM, alone: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    wish = CHOSEN.clone(structured_outputs=StructuredOutputsParams(regex="[a-z ]+"))
    assert len(tokens_of(ask(llm, [4, 0], wish)[0])) == 8
    fails_for(Grammars, name, lambda *_: True)(monkeypatch)
    assert_isolated(llm, alone, "on purpose", wish)


COMPANIES: dict[str, dict[str, object]] = {
    "drafts": {"speculative_config": NGRAM},
    "stages": {"executor": "lazy", "pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("options", COMPANIES.values(), ids=COMPANIES.keys())
def test_so_it_does_beside_drafts_and_in_a_pipeline(
    tiny: Path, alone: list[list[int]], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny), **(OPTIONS | options)) as llm:
        PLACES["its parameters are read"](monkeypatch)
        assert_isolated(llm, alone, "on purpose")
        monkeypatch.undo()
        assert_isolated(llm, alone, "no token is left", stuck(llm))


def stuck(llm: LLM) -> SamplingParams:
    """Parameters that leave no token behind the first: the only one that may come may not come twice."""
    tokenizer = llm.llm_engine.tokenizer
    assert tokenizer is not None
    for letter in "zqxjkv":
        first, *rest = tokenizer.encode(2 * letter, add_special_tokens=False)
        if rest == [first]:
            return SamplingParams(max_tokens=8, allowed_token_ids=[first], bad_words=[2 * letter])
    raise AssertionError("no letter is a token of its own")


def test_masks_that_contradict_each_other_behind_some_text_are_that_requests_error(
    llm: LLM, alone: list[list[int]]
) -> None:
    chosen = stuck(llm)
    assert_isolated(llm, alone, "no token is left that may come next: allowed_token_ids, bad_words", chosen)
    (output,) = ask(llm, [4], chosen)
    assert output.outputs[0].token_ids == chosen.allowed_token_ids


def test_what_leaves_no_token_or_asks_for_more_than_a_slot_holds_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no token could come first: min_tokens=1 holds back all of allowed"):
        ask(llm, [4], SamplingParams(allowed_token_ids=[0, 9], stop_token_ids=[9], min_tokens=1))  # 0 is eos
    with pytest.raises(ValueError, match="no token could come first: bad_words holds back all of allowed"):
        ask(llm, [4], stuck(llm).clone(bad_words=["z", "q", "x", "j", "k", "v"]))
    words = [letter * 120 for letter in "abcdefghijklmnopqrstuvwxyz" * 3]
    with pytest.raises(ValueError, match=r"bad_words has [0-9,]+ tokens, max_listed_tokens is 4,096"):
        ask(llm, [4], SamplingParams(bad_words=words))
    assert_whole(llm)


def test_a_token_that_does_not_exist_is_its_requests_error_and_leaves_the_prefix_cache_right(
    llm: LLM, alone: list[list[int]]
) -> None:
    engine, prompt = llm.llm_engine, [5 + i * 23 % 300 for i in range(40)]
    (tokens,) = engine.tokenize([prompt])
    (expected,) = llm.generate(prompt, OTHERS[0], use_tqdm=False)
    llm.reset_prefix_cache()
    tokens.token_ids[-1] = 10**6  # behind the check
    engine.add_tokens(tokens, OTHERS[0])
    ended = []
    while not engine.is_finished():
        ended += [output for output in engine.step() if output.finished]
    assert "token id 1000000 is out of range" in str(ended[0].error)
    (again,) = llm.generate(prompt, OTHERS[0], use_tqdm=False)
    assert again.num_cached_tokens >= 32 and tokens_of(again) == tokens_of(expected)
    assert_whole(llm)


IDS = [[45, 50, 61], (45, 50, 61), {45, 50, 61}, frozenset((45, 50, 61)), np.array([45, 50, 61])]


def test_containers_of_any_kind_say_the_same_in_one_process_and_in_several(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        SamplingParams(max_tokens=4, seed=np.int64(3), allowed_token_ids=ids, stop_token_ids=range(3))  # type: ignore[arg-type]
        for ids in IDS
    ]
    ids = PROMPTS[0]
    prompts: list[Any] = [np.array(ids), ids, range(3, 30), {"prompt_token_ids": np.array(ids)}, ids]
    several = LLM(str(tiny), **(OPTIONS | {"tensor_parallel_size": 2, "depth": 1}))
    with several:
        here, there = (engine.generate(prompts, params, use_tqdm=False) for engine in (llm, several))
        assert [tokens_of(output) for output in here] == [tokens_of(output) for output in there]
        assert len({tuple(tokens_of(here[i])) for i in (0, 1, 3, 4)}) == 1
        # What no check has seen, each rank finds by itself.
        monkeypatch.setattr(several.llm_engine, "spell", lambda words: ((10**6,),) * bool(words))
        assert_isolated_in_ranks(several, llm)


def assert_isolated_in_ranks(several: LLM, llm: LLM) -> None:
    expected = tokens_of(ask(llm, [0])[0])
    failed, other = ask(several, [4, 0])
    assert "bad_words has token id 1000000" in str(failed.error) and tokens_of(other) == expected
    assert several.llm_engine.stats.kv_usage == 0 and several.llm_engine.stats.num_running == 0
