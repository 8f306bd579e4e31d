"""However a model is spread over ranks, in float32 every request's tokens are those of one process."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest

from pellucid import LLM, LLMEngine, RequestOutput, SamplingParams
from tests.llm.test_invariance import BASE, NGRAM, random_requests
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

ABORT_EVERY, ABORT_AFTER = 5, 8  # requests, steps
Layout = tuple[int, int, int]  # tensor, pipeline and data parallel size
MODELS = {
    "one kv head, odd vocabulary": {"num_key_value_heads": 1, "vocab_size": 331},
    "tied, three layers": {"tie_word_embeddings": True, "num_hidden_layers": 3},
    "tied, odd vocabulary": {"tie_word_embeddings": True, "vocab_size": 331},
}
COMPANIES = {
    "at ease": {"num_gpu_blocks_override": 200},
    "a pool that runs dry": {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 40},
    "drafts, small chunks": {
        "speculative_config": NGRAM, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 60,
    },
}  # fmt: skip
LAYOUTS: list[Layout] = [layout for layout in itertools.product((1, 2), repeat=3) if layout != (1, 1, 1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each kind, by name."""
    root = tmp_path_factory.mktemp("models")
    written = {
        name: str(write_checkpoint(root / str(i), **changes))
        for i, (name, changes) in enumerate(MODELS.items())
    }
    return written | {"sprout": "sprout"}


def options_for(layout: Layout) -> dict[str, object]:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return dict(zip(names, layout, strict=True))


@cache
def answers_of_one(folder: str) -> dict[str, RequestOutput]:
    return answers(folder, aborts=False)


def answers(folder: str, *, aborts: bool, **options: object) -> dict[str, RequestOutput]:
    """Of 16 requests by id.  aborts: end some of them early, wherever they are."""
    prompts, params = random_requests(16, seed=3)
    engine = LLMEngine.from_options(model=folder, **(BASE | options))
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(prompt, sampling, request_id=str(i))
    last: dict[str, RequestOutput] = {}
    try:
        for step in itertools.count():
            if not engine.has_unfinished_requests():
                return last
            if aborts and step == ABORT_AFTER:
                for i in range(0, len(prompts), ABORT_EVERY):
                    engine.abort(str(i))
            last |= {output.request_id: output for output in engine.step()}
    finally:
        engine.shutdown()
    raise AssertionError("unreachable")


def check(folder: str, layout: Layout, company: str) -> None:
    """Tokens and (but for rounding) logprobs are those of one process; of aborted requests what came."""
    expected = answers_of_one(folder)
    got = answers(folder, aborts=True, depth=3, **options_for(layout), **COMPANIES[company])
    assert got.keys() == expected.keys()
    if layout[2] == 1:  # several engines may be through before they hear of it
        assert any(output.outputs[0].finish_reason == "abort" for output in got.values())
    for request_id, output in got.items():
        mine, whole = output.outputs[0], expected[request_id].outputs[0]
        if mine.finish_reason == "abort":
            assert whole.token_ids[: len(mine.token_ids)] == mine.token_ids
            continue
        assert (mine.token_ids, mine.finish_reason) == (whole.token_ids, whole.finish_reason), request_id
        assert chosen(mine.logprobs) == pytest.approx(chosen(whole.logprobs), abs=1e-3)
        prompt, whole_prompt = output.prompt_logprobs, expected[request_id].prompt_logprobs
        assert chosen(prompt) == pytest.approx(chosen(whole_prompt), abs=1e-3)


def chosen(logprobs: list | None) -> list[float]:
    """Of each position the known token's, which comes first."""
    return [next(iter(entry.values())).logprob for entry in logprobs or [] if entry]


@pytest.mark.parametrize(
    ("layout", "model", "company"),
    [
        ((2, 1, 1), "one kv head, odd vocabulary", "at ease"),
        ((1, 2, 1), "tied, three layers", "a pool that runs dry"),
        ((2, 2, 1), "tied, odd vocabulary", "drafts, small chunks"),
        ((1, 2, 2), "one kv head, odd vocabulary", "at ease"),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one(
    folders: dict[str, str], layout: Layout, model: str, company: str
) -> None:
    check(folders[model], layout, company)


@pytest.mark.parallel
@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("model", [*MODELS, "sprout"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_of_every_model_does(
    folders: dict[str, str], layout: Layout, model: str, company: str
) -> None:
    check(folders[model], layout, company)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"pipeline_parallel_size": 3},
            "pipeline_parallel_size is 3, but the model has 2 layers; use at most 2",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_split": "2,1"},
            "pipeline_split is 2,1: 2 stages of 3 layers together, but pipeline_parallel_size is 2 and the "
            "model has 2 layers",
        ),
        ({"pipeline_split": "one"}, "pipeline_split is 'one', must be whole numbers, as 10,18"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0, must be at least 1"),
    ],
    ids=str,
)
def test_a_cut_that_does_not_fit_is_refused(tiny: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(str(tiny), **(BASE | options))


def test_sprout_says_the_same() -> None:
    prompts = [[*range(100 + i, 160 + 3 * i)] for i in range(4)]
    params = [SamplingParams(temperature=t, max_tokens=24, seed=7) for t in (0.0, 0.8, 1.0, 0.0)]

    def run(**options: object) -> list[list[int]]:
        with LLM("sprout", **(BASE | options)) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    assert run(pipeline_parallel_size=2, pipeline_split="3,5") == run()
