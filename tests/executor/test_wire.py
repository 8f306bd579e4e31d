"""What goes over the wire comes out as it was: every field of every type, those yet to be added, too."""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields

import numpy as np
import pytest

from pellucid.executor.process import Call
from pellucid.executor.wire import decode, encode
from pellucid.schedule.plan import Admission, Extras, Growth, Row, StepPlan, StepResult, ints
from pellucid.types import SamplingParams, StructuredOutputsParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Job:
    """What a connector might send."""

    seq_id: int
    blocks: tuple[list[int], ...]
    digests: tuple[list[bytes], ...]


JOB = Job(7, ([1, 2],), ([b"\0\xff", b""],))
SAMPLING = SamplingParams(
    n=2,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=-(2**63),
    stop=["\n\n", "结束"],
    stop_token_ids=[5, 6],
    ignore_eos=True,
    max_tokens=None,
    min_tokens=3,
    logprobs=0,
    prompt_logprobs=2,
    detokenize=True,
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    logit_bias={11: -100.0, 12: 0.25},
    allowed_token_ids=[1, 2, 3],
    bad_words=["no"],
    structured_outputs=StructuredOutputsParams(json={"type": "object"}),
)
ADMISSION = Admission(
    seq_id=2**40,
    slot=3,
    token_ids=ints([0, 1, 2**17]),
    prompt_len=2,
    num_computed=1,
    limit=99,
    seed=2**63 - 1,
    sampling=SAMPLING,
    stop_token_ids=(1, 2),
    bad_words_token_ids=((3, 4), (5,)),
    blocks=([6, 7], [8]),
)
PLAN = StepPlan(
    id=41,
    committed=39,
    num_propose=4,
    rows=[Row(2**40, 3, 255, 1, 0, 1), Row(8, 0, 2, 16384, 0, 16384)],
    num_tokens=16385,
    admitted=[ADMISSION],
    grown=[Growth(1, [3, 255], [70000, 2])],
    retired=[9, 10],
    kv_meta=[JOB, {"load": [1, 2]}, "plain"],
    has_grammar=True,
)
ENTRY = TokenLogprobs([4, 9], [-0.25, float("-inf")], 1)
RESULT = StepResult(
    plan_id=41,
    token_ids=ints([1, 2, 3, 151643]),
    num_new=ints([1, 0, 3]),
    extras=Extras(logprobs={2: [ENTRY, ENTRY]}, prompt_logprobs={1: [ENTRY]}, drafts={0: [5, 6]}),
    kv_done=[JOB],
    num_late_compilations=2,
)
KEPT_AT_DEFAULT = {"detokenize"}  # stop strings need it


@pytest.mark.parametrize("message", [PLAN, RESULT], ids=lambda message: type(message).__name__)
def test_every_field_comes_through(message: object) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "example", [PLAN, ADMISSION, SAMPLING, RESULT, RESULT.extras], ids=lambda example: type(example).__name__
)
def test_the_examples_above_leave_no_field_at_its_default(example: StepPlan) -> None:
    for f in fields(example):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        assert getattr(example, f.name) != default or f.name in KEPT_AT_DEFAULT, (
            f"give {f.name} a value above"
        )


def test_detokenize_comes_through_too() -> None:
    (admission,) = decoded(admitted=SamplingParams(detokenize=False)).admitted
    assert admission.sampling == SamplingParams(detokenize=False)


def decoded(admitted: SamplingParams) -> StepPlan:
    admission = Admission(
        seq_id=0,
        slot=0,
        token_ids=ints([1]),
        prompt_len=1,
        num_computed=0,
        limit=9,
        seed=0,
        sampling=admitted,
    )
    plan = decode(encode(StepPlan(id=0, committed=-1, admitted=[admission])))
    assert isinstance(plan, StepPlan)
    return plan


@pytest.mark.parametrize("seed", range(50))
def test_random_plans_and_results_come_through(seed: int) -> None:
    rng = random.Random(seed)

    def number() -> int:
        return rng.randrange(1 << rng.randrange(1, 63))

    def numbers(most: int) -> list[int]:
        return [number() for _ in range(rng.randrange(most))]

    plan = StepPlan(
        id=number(),
        committed=number() - 1,
        rows=[Row(*(number() for _ in Row._fields)) for _ in range(rng.randrange(300))],
        grown=[Growth(number(), numbers(9), numbers(9)) for _ in range(rng.randrange(5))],
        retired=numbers(20),
    )
    result = StepResult(
        plan_id=number(),
        token_ids=ints(rng.randrange(1 << 31) for _ in range(rng.randrange(600))),
        num_new=ints(rng.randrange(6) for _ in range(rng.randrange(300))),
        extras=Extras({number(): [TokenLogprobs(numbers(9), [rng.gauss(0, 9) for _ in range(9)], number())]}),
    )
    assert decode(encode(plan)) == plan
    assert decode(encode(result)) == result


def test_numbers_of_numpy_become_pythons() -> None:
    given = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(7), logit_bias={np.int32(3): np.float64(1.5)}
    )
    (admission,) = decoded(admitted=given).admitted
    assert admission.sampling == SamplingParams(temperature=0.5, max_tokens=7, logit_bias={3: 1.5})
    assert type(admission.sampling.max_tokens) is int


def test_a_steady_plan_is_small() -> None:
    rows = [Row(10**6 + i, 2, i, 1, 0, 1) for i in range(256)]
    assert len(encode(StepPlan(id=10**6, committed=10**6, rows=rows))) < 20 * len(rows)


def test_what_is_rare_is_pickled() -> None:
    assert decode(encode(Call("measure", (1, {"a": {2}})))) == Call("measure", (1, {"a": {2}}))


def test_what_a_worker_could_not_import_is_refused_by_name() -> None:
    @dataclass
    class Local:
        pass

    with pytest.raises(TypeError, match="Local cannot be imported by name"):
        encode(StepPlan(id=0, committed=-1, kv_meta=[Local()]))
