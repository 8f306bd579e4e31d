"""Every family in the whole engine, however it is spread: 64 greedy tokens of transformers a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from pellucid import LLM, SamplingParams
from pellucid.models.loader import torch_module
from tests.llm.test_invariance import BASE, NGRAM
from tests.models.cases import CASES, VOCAB, Reference
from tests.models.fp8 import write_fp8
from tests.models.harness import Harness, load
from tests.models.margins import LEAST_MARGIN, noted_margins

pytestmark = pytest.mark.usefixtures("forked_members")

NUM_TOKENS, MAX_LEN = 64, 160
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LEAST_LEAD = 1e-5  # of a greedy token's logit over the next one's
FAMILIES = (
    "phi3", "phi3 with longrope", "gemma2", "gemma3", "glm", "glm4 with one kv head, tied", "granite",
    "olmo2", "olmo2 with biases, one kv head", "olmo3", "smollm3 with windows, biases, untied",
    "seed-oss with other biases, tied", "qwen3moe with dense layers, unnormalised, with biases",
    "qwen2moe with windows in even layers, no bias, an odd number of experts", "mixtral with a window",
    "olmoe", "granitemoe with factors, tied", "granitemoe beside a shared one", "granite 4",
    "glm4moe of groups, normalized heads, biases", "gptoss",
    "deepseek v2 with experts in groups", "deepseek v2 with biases on latents, dense", "deepseek v3",
    "deepseek v3 with yarn", "glm4 moe lite", "exaone4",
    "llama4", "llama4 with dense layers, biases, plain heads",
)  # fmt: skip
SPREADS = {
    "chunks and drafts": {"max_num_batched_tokens": 24, "depth": 2, "speculative_config": NGRAM},
    "two ranks": {"tensor_parallel_size": 2, "speculative_config": NGRAM, "max_num_batched_tokens": 40},
    "two stages": {"pipeline_parallel_size": 2, "depth": 3, "max_num_batched_tokens": 24},
}
POINTED = [  # in every run of the tests; the others where all layouts are asked for
    ("chunks and drafts", "gemma3"),  # windows in two layers of three
    ("chunks and drafts", "smollm3 with windows, biases, untied"),  # layers without positions
    ("chunks and drafts", "gptoss"),  # sinks
    ("chunks and drafts", "deepseek v2 with experts in groups"),  # latents
    ("two ranks", "olmo2 with biases, one kv head"),  # norms over the whole width; keys on every rank
    ("two ranks", "gptoss"),  # sinks, biases of experts
    ("two ranks", "deepseek v3"),  # latents, and experts beside a shared one
    ("two stages", "gemma2"),  # norms on both sides, windows
]


@dataclass(frozen=True)
class Answers:
    """What transformers says of a family's prompts."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def answers_of(name: str, root: Path) -> Answers:
    """Ragged prompts, some of which share a beginning.  No router nor argmax on their way is near a tie."""
    (case,) = (case for case in CASES if case.name == name)
    folder = root / str(CASES.index(case))
    reference = Reference(case, folder)
    shared = torch.randint(VOCAB, (40,)).tolist()
    prompts = [*reference.prompts, shared, [*shared[:33], 5, 6], [*shared, *reference.prompts[0]]]
    built = load(folder, max_model_len=MAX_LEN)
    with noted_margins(torch_module(built.model)) as margins:
        tokens = Harness(built, num_seqs=len(prompts), max_len=MAX_LEN).generate(prompts, NUM_TOKENS)
    assert min(margins, default=1.0) > LEAST_MARGIN, "routers are near a tie: take another seed"
    for prompt, output in zip(prompts, tokens, strict=True):
        best = reference.logits(prompt + output)[len(prompt) - 1 : -1].topk(2)
        assert output == best.indices[:, 0].tolist()
        assert float((best.values[:, 0] - best.values[:, 1]).min()) > LEAST_LEAD, "take another seed"
    return Answers(folder, prompts, tokens)


def check(answers: Answers, **options: object) -> None:
    """Also of prompts whose beginnings are there already."""
    with LLM(
        str(answers.folder), **(BASE | {"skip_tokenizer_init": True, "max_model_len": MAX_LEN} | options)
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(answers.prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == answers.tokens
        assert sum(output.num_cached_tokens for output in outputs) >= 6 * 16


@pytest.mark.parametrize(("spread", "name"), POINTED)
def test_tokens_are_those_of_transformers(spread: str, name: str, root: Path) -> None:
    check(answers_of(name, root), **SPREADS[spread])


@pytest.mark.parallel
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("spread", SPREADS)
def test_those_of_every_family_are_however_it_is_spread(spread: str, name: str, root: Path) -> None:
    check(answers_of(name, root), **SPREADS[spread])


def check_fp8(name: str, root: Path) -> None:
    """Two ranks give the tokens of one, though blocks of codes are cut between them."""
    answers = answers_of(name, root)
    folder = write_fp8(answers.folder, root / f"fp8 {name}")
    options = BASE | {"skip_tokenizer_init": True, "max_model_len": MAX_LEN}
    tokens = []
    for size in (1, 2):
        with LLM(str(folder), **options, tensor_parallel_size=size) as llm:
            outputs = llm.generate(answers.prompts, GREEDY, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1] != answers.tokens


def test_fp8_blocks_of_fused_matrices_are_cut_between_ranks(root: Path) -> None:
    check_fp8("phi3", root)


@pytest.mark.parallel
@pytest.mark.parametrize(
    "name",
    ("glm", "gemma3", "olmo2", "deepseek v3", "mixtral with a window", "llama4")
    + ("qwen3moe with dense layers, unnormalised, with biases",),
)
def test_so_are_those_of_every_mould(name: str, root: Path) -> None:
    check_fp8(name, root)
