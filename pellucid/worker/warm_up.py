"""Steps of no sequence's: to measure the most memory that a step takes, and to compile what steps need.

A kernel has variants, by numbers of rows, tokens and drafts; one that is first needed in mid-run stalls it
for seconds.  So at start one step of each kind is gone through, to learn which there are and compile them
(kernels/compile/compilations.py).  All of them read and write page 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from pellucid.resolve import Resolved
from pellucid.sampling_params import MOST_LOGPROBS, SamplingParams
from pellucid.schedule.plan import Admission, Row, Rows, StepPlan, ints

PLAIN = SamplingParams(temperature=1.0)
EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=MOST_LOGPROBS,
    prompt_logprobs=MOST_LOGPROBS,
    logit_bias={0: 1.0},
    allowed_token_ids=[0, 1],
    bad_words=["x"],
    min_tokens=1,
)
OPTIONS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=200),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, presence_penalty=0.1, repetition_penalty=1.1),
    SamplingParams(temperature=1.0, logit_bias={0: 1.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=[0, 1], bad_words=["x"], min_tokens=1),
    SamplingParams(temperature=1.0, logprobs=5),
    SamplingParams(temperature=1.0, prompt_logprobs=1),
)
# Of a step of the warm-up with chunks; larger ones take the same kernels, or those of the largest step.
MOST_TOKENS = 4096
MOST_ROWS = 2048  # beyond it kernels have no variants, with one KV head either
SHORT = 2  # queries of chunks that attention takes as it does decodes
MOST_DRAWN = 8  # rows; to draw for more takes the same kernels


class Part(NamedTuple):
    """A row's share: its queries, the drafts among them, and the tokens before them."""

    num_query: int
    num_drafts: int = 0
    num_computed: int = 0
    sampling: SamplingParams = PLAIN

    @property
    def length(self) -> int:
        return self.num_computed + self.num_query


def largest_step(resolved: Resolved, pages_a_block: int, asked: int) -> StepPlan:
    """The step that needs the most memory: all slots sample and draft, with every option; the budget is full.

    Its pages are all page 0, so that it can run before there is a cache.
    """
    num_rows = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    length = max(1, min(resolved.max_num_batched_tokens // num_rows, resolved.max_model_len - 1))
    part = Part(length, min(resolved.num_spec, length - 1), sampling=EVERYTHING)
    return step_of([part] * num_rows, resolved, pages_a_block, asked)


def warm_up_steps(resolved: Resolved, pages_a_block: int, asked: int) -> Iterator[StepPlan]:
    """A step of each kind: decodes and verifications of few and many rows, chunks alone and in company.

    What takes longest to compile comes first: attention, of a long chunk and then of rows with few queries.
    What seldom takes a kernel that is new comes last.
    """
    budget, longest, most_rows = limits_of(resolved)
    most_drafts = min(resolved.num_spec, longest - 1)
    chunks = chunked(resolved, pages_a_block, asked)
    yield next(chunks)
    for num_rows in around_powers_of_two(most_rows):
        yield step_of([Part(1)] * num_rows, resolved, pages_a_block, asked)
        if most_drafts and num_rows * (1 + most_drafts) <= budget:
            yield step_of([Part(1 + most_drafts, most_drafts)] * num_rows, resolved, pages_a_block, asked)
    for num_rows in powers_of_two(most_rows):
        if num_rows - 1 + SHORT <= budget and longest >= SHORT:
            yield step_of([Part(1)] * (num_rows - 1) + [Part(SHORT)], resolved, pages_a_block, asked)
    for num_rows in powers_of_two(min(most_rows, MOST_DRAWN)):
        yield step_of([Part(1, sampling=EVERYTHING)] * num_rows, resolved, pages_a_block, asked)
    for num_drafts in range(1, most_drafts):
        step = step_of([Part(1 + num_drafts, num_drafts)], resolved, pages_a_block, asked)
        yield replace(step, num_propose=num_drafts)
    yield from chunks
    for sampling in OPTIONS:
        yield step_of([Part(min(3, longest), sampling=sampling)], resolved, pages_a_block, asked)


def chunked(resolved: Resolved, pages_a_block: int, asked: int) -> Iterator[StepPlan]:
    """Steps with chunks, the longest first and alone; of more tokens than a row has, several side by side."""
    budget, longest, most_rows = limits_of(resolved)
    for num_query in reversed(around_powers_of_two(min(longest, MOST_TOKENS))):
        yield step_of([Part(num_query)], resolved, pages_a_block, asked)
        if 2 * num_query + 1 <= min(budget, resolved.max_model_len - 1) and most_rows > 2:
            behind = Part(num_query, num_computed=num_query)
            yield step_of([Part(1), Part(num_query), behind], resolved, pages_a_block, asked)
    for num_tokens in around_powers_of_two(min(budget, MOST_TOKENS, most_rows * longest)):
        if longest < num_tokens:
            whole, rest = divmod(num_tokens, longest)
            parts = [Part(longest)] * whole + [Part(rest)] * (rest > 0)
            yield step_of(parts, resolved, pages_a_block, asked)


def limits_of(resolved: Resolved) -> tuple[int, int, int]:
    """Most tokens of a step, of a row, and most rows that are warmed up."""
    budget = resolved.max_num_batched_tokens
    return budget, min(budget, resolved.max_model_len - 1), min(resolved.max_num_seqs, MOST_ROWS, budget)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, .. and `most`: one of each class of sizes of which none is half as large as the next."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def around_powers_of_two(most: int) -> list[int]:
    """1, 2, 3, 4, 5, 8, 9, .. up to `most`: one of each class into which kernels sort their sizes."""
    return sorted({n for power in powers_of_two(most) for n in (power, power + 1) if n <= most})


def step_of(parts: Sequence[Part], resolved: Resolved, pages_a_block: int, asked: int) -> StepPlan:
    """A step in which every part is a row that samples; its result may be thrown away."""
    admitted = [
        Admission(
            seq_id=-1 - slot,  # no sequence's
            slot=slot,
            token_ids=ints([0] * part.length),
            prompt_len=part.length,
            num_computed=part.num_computed,
            limit=part.length + 1,
            seed=slot,
            sampling=part.sampling,
            stop_token_ids=(0,) if part.sampling.min_tokens else (),
            bad_words_token_ids=((0, 0), (1,)) if part.sampling.bad_words else (),
            asked=asked,
            pages=ints([0] * (-(-(part.length + 1) // resolved.block_size) * pages_a_block)),
        )
        for slot, part in enumerate(parts)
    ]
    rows = [Row(slot, part.num_query, part.num_drafts, num_logits(part)) for slot, part in enumerate(parts)]
    return StepPlan(
        id=-1,
        committed=-1,
        num_propose=resolved.num_spec,
        rows=Rows.of(rows),
        num_tokens=sum(part.num_query for part in parts),
        admitted=admitted,
        asked=asked,
    )


def num_logits(part: Part) -> int:
    """Those that are sampled, and those of known tokens that are scored."""
    scores = part.sampling.prompt_logprobs is not None
    return part.num_query if scores else 1 + part.num_drafts
