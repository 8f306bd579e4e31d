"""What goes over a line comes out as it was: every field of every type, those yet to be added, too."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from msgspec import Struct, structs

from pellucid.cluster.messages import (
    Abort,
    Add,
    Answer,
    Call,
    ClearPrefixCache,
    Failed,
    Late,
    Meet,
    Message,
    Orders,
    Plan,
    Ready,
    Result,
    Said,
    Start,
    Stop,
    Turn,
    View,
    Watch,
    decode,
    decode_request,
    encode,
    pack,
    tagged,
    untagged,
)
from pellucid.config import EngineConfig, ModelConfig, SpeculativeConfig
from pellucid.connectors import base as connectors
from pellucid.connectors.base import Ended
from pellucid.engine.member import Facts
from pellucid.executor.base import Capacity
from pellucid.features.grammar.host import Drafts, Masks
from pellucid.features.logprobs.host import Entries
from pellucid.kv.kinds import Full, Window
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.draft import Draft
from pellucid.observe.statistics import EngineStats
from pellucid.observe.xray import Frame, SeqView, StepView
from pellucid.platform import Platform
from pellucid.resolve import resolve
from pellucid.sampling_params import SamplingParams, StructuredOutputsParams
from pellucid.schedule.plan import Admission, Growth, Row, Rows, StepPlan, StepResult, ints
from pellucid.spec.drafter import Drafter
from pellucid.types import FinishReason, Request, SeqUpdate, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Job:
    """What a feature might send."""

    seq_id: int
    blocks: tuple[list[int], ...]
    digests: tuple[list[bytes], ...]


JOB = Job(7, ([1, 2],), ([b"\0\xff", b""],))
JOBS = connectors.Jobs(
    [connectors.Job(number=3, is_load=True, pages=ints([1, 70000]), what={"a": [b"\0", 1]})]
)
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
    extra_args={"toy": [1, 2.5]},
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
    asked=4,
    ride={"toy": [1, {"a": 2.5}]},
    pages=ints([6, 7, 8, 0]),
)
PLAN = StepPlan(
    id=41,
    committed=39,
    num_propose=4,
    rows=Rows.of([Row(255, 1, 0, 1), Row(2, 16384, 3, 16384)]),
    num_tokens=16385,
    admitted=[ADMISSION],
    grown=Growth(ints([3, 255]), ints([70000, 2])),
    retired=[9, 10],
    asked=12,
    ride={"toy": JOB, "plain": {"load": [1, 2]}, "kv_transfer": JOBS},
    is_open=True,
)
ENTRY = TokenLogprobs([4, 9], [-0.25, float("-inf")], 1)
RESULT = StepResult(
    plan_id=41,
    token_ids=ints([1, 2, 3, 151643]),
    num_new=ints([1, 0, 3]),
    told={"logprobs": Entries({2: [ENTRY, ENTRY]}), "grammar": Drafts({0: [5, 6]}), "plain": [1]},
    failed={1: "no token is left"},
    num_late_compilations=2,
)
KEPT_AT_DEFAULT = {"detokenize"}  # stop strings need it


def through(thing: StepPlan | StepResult) -> object:
    """A plan or a result, as it arrives."""
    message = decode(encode(Plan.of(thing) if isinstance(thing, StepPlan) else Result.of(thing)))
    assert isinstance(message, Plan | Result)
    return message.whole()


@pytest.mark.parametrize("thing", [PLAN, RESULT], ids=lambda thing: type(thing).__name__)
def test_every_field_comes_through(thing: StepPlan | StepResult) -> None:
    assert through(thing) == thing


@pytest.mark.parametrize(
    "example", [PLAN, ADMISSION, SAMPLING, RESULT], ids=lambda example: type(example).__name__
)
def test_the_examples_above_leave_no_field_at_its_default(example: StepPlan) -> None:
    for f in structs.fields(example) if isinstance(example, Struct) else fields(example):
        default = f.default_factory() if callable(f.default_factory) else f.default
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
    plan = through(StepPlan(id=0, committed=-1, admitted=[admission]))
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
        rows=Rows.of(
            [Row(*(rng.randrange(1 << 31) for _ in Row._fields)) for _ in range(rng.randrange(300))]
        ),
        grown=Growth(*(ints(rng.randrange(1 << 31) for _ in range(rng.randrange(9))) for _ in range(2))),
        retired=numbers(20),
    )
    result = StepResult(
        plan_id=number(),
        token_ids=ints(rng.randrange(1 << 31) for _ in range(rng.randrange(600))),
        num_new=ints(rng.randrange(6) for _ in range(rng.randrange(300))),
        told={"logprobs": Entries({number(): [TokenLogprobs(numbers(9), [rng.gauss(0, 9)], number())]})},
    )
    assert through(plan) == plan
    assert through(result) == result


def test_numbers_of_numpy_become_pythons() -> None:
    bias = {np.int32(3): np.float64(1.5)}
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "max_tokens": np.int64(7), "logit_bias": bias}
    given = SamplingParams(**numbers)
    (admission,) = decoded(admitted=given).admitted
    assert admission.sampling == SamplingParams(temperature=0.5, max_tokens=7, logit_bias={3: 1.5})
    assert type(admission.sampling.max_tokens) is int


def test_a_steady_plan_is_small() -> None:
    rows = Rows(slots=np.arange(256))
    packed = encode(Plan.of(StepPlan(id=10**6, committed=10**6, rows=rows)))
    assert len(packed) < 6 * len(rows)
    decoded = decode(packed)
    assert isinstance(decoded, Plan)
    assert decoded.whole().rows == rows and decoded.whole().rows.num_query is None


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "a", b"b", [1, [2]], {"a": [None]}, JOB, Row(7)])
def test_a_call_is_given_and_answers_plain_data_and_what_can_be_imported(value: object) -> None:
    call = decode(encode(Call("measure", [tagged(1), tagged(value)])))
    assert isinstance(call, Call) and call.name == "measure"
    assert [*map(untagged, call.args)] == [1, value]
    answer = decode(encode(Answer(tagged(value))))
    assert isinstance(answer, Answer) and untagged(answer.value) == value


def test_what_a_worker_could_not_import_is_refused_by_name() -> None:
    @dataclass
    class Local:
        pass

    with pytest.raises(TypeError, match="Local cannot be imported by name"):
        Plan.of(StepPlan(id=0, committed=-1, ride={"x": Local()}))


def test_what_a_worker_says_out_of_turn_comes_through() -> None:
    said = decode(encode(Said("kv_transfer", tagged(Ended(7, ok=False)))))
    assert isinstance(said, Said) and untagged(said.said) == Ended(7, ok=False)


def test_masks_come_through() -> None:
    masks = {3: np.arange(6, dtype=np.int32).reshape(2, 3), 0: np.full((1, 3), -1, dtype=np.int32)}
    late = decode(encode(Late.of({"grammar": Masks({row: mask.data for row, mask in masks.items()})})))
    assert isinstance(late, Late)
    there = late.whole()["grammar"]
    assert isinstance(there, Masks) and there.rows.keys() == masks.keys()
    for row, mask in masks.items():
        assert np.array_equal(np.frombuffer(there.rows[row], dtype=np.int32).reshape(mask.shape), mask)


RESOLVED = resolve(
    EngineConfig.from_options(
        {
            "model": "sprout",
            "pipeline_parallel_size": 2,
            "pipeline_split": "3,5",
            "worker_timeout": 7,
        }
    ),
    Platform(device="cpu", name="CPU", memory_total=0, memory_free=0, num_cores=2, capability=(9, 0)),
    Checkpoint.open(ModelConfig(model="sprout")),
    Draft(
        SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        Checkpoint.open(ModelConfig(model="sprout-draft")),
    ),
    replica=1,
)
STATS = EngineStats(
    num_steps=1, num_step_tokens=2, num_steps_by_tokens=(3, 4), num_prompt_tokens=5, num_cached_tokens=6,
    num_sampled_tokens=7, num_preemptions=8, num_drafts=9, num_draft_tokens=10, num_accepted_tokens=11,
    num_accepted_per_position=(12,), host_seconds=0.5, wait_seconds=1.5, num_late_compilations=13,
    num_running=14, num_waiting=15, kv_usage=0.25, is_synthetic=True,
)  # fmt: skip
CAPACITY = Capacity(
    kinds=(Full(16, 2), Window(16, 1, 99)), num_pages=5, max_model_len=6, num_spec=7, drafter=Drafter.KEEPS_KV
)
FRAME = Frame(
    is_first=True, seconds=1.5, block_size=16, num_pages=5, max_num_tokens=9, num_running=1,
    num_waiting=1, running=[SeqView(1, "a", 2, 3, 4, 5, 6)], waiting=[SeqView(2, "b", 2, 3, 4, 5, 6)],
    steps=[StepView(1, [1, 2, 3, 4], 1, 0.5)], pages=[1, 2, 3, 4],
)  # fmt: skip
MESSAGES: list[Message] = [
    Start("module:function", tagged({"a": 1}), 30, {"kind": {"name": "module:Class"}}),
    Ready(tagged(CAPACITY)),
    Failed("worker 1 has died", is_echo=True, is_users=True),
    Stop(),
    Meet(4711),
    Orders([Abort("a"), ClearPrefixCache(), Watch(True)]),
    Turn([], STATS, 3, True, "dead"),
    View(FRAME),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_through(message: Message) -> None:
    assert decode(encode(message)) == message


def test_what_an_engine_has_resolved_comes_through() -> None:
    facts = Facts(RESOLVED, CAPACITY, STATS)
    assert untagged(tagged(facts)) == facts


RICH = SamplingParams(
    n=1, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.1, frequency_penalty=0.2,
    repetition_penalty=1.1, seed=-(2**63), stop=["a", "\n"], stop_token_ids=[3], ignore_eos=True,
    max_tokens=None, min_tokens=1, logprobs=2, prompt_logprobs=0, skip_special_tokens=False,
    include_stop_str_in_output=True, logit_bias={5: -1.5}, allowed_token_ids=[5, 6], bad_words=["x"],
)  # fmt: skip


def test_a_request_arrives_as_it_was_sent() -> None:
    request = Request(
        id="1_0", prompt_token_ids=[1, 2], sampling=RICH, seed=2**63 - 1, eos_token_ids=(0, 7),
        bad_words_token_ids=((1, 2), (3,)), lora="l", cache_salt="s", grammar="g", is_quiet=True,
        is_streamed=True, priority=-2, arrival=1.5, kv_transfer="k",
    )  # fmt: skip
    same = [f.name for f in fields(Request) if getattr(request, f.name) == f.default]
    assert not same, f"this test says nothing about {same}"
    assert arrived(request) == request


def arrived(request: Request) -> Request:
    message = decode(encode(Orders([Add.of(request)])))
    assert isinstance(message, Orders)
    (order,) = message.orders
    assert isinstance(order, Add) and order.request_id == request.id
    return decode_request(order.request)


def test_numpys_numbers_in_requests_arrive_as_pythons() -> None:
    sampling = SamplingParams(top_k=np.int64(3), logit_bias={np.int64(4): np.float32(0.5)})  # type: ignore[arg-type,dict-item]
    for given in (list(np.arange(3)), np.arange(3), ints([0, 1, 2])):
        request = Request(id="a", prompt_token_ids=given, sampling=sampling)  # type: ignore[arg-type]
        assert arrived(request) == Request(
            id="a", prompt_token_ids=[0, 1, 2], sampling=SamplingParams(top_k=3, logit_bias={4: 0.5})
        )


def test_an_update_arrives_as_it_was_sent() -> None:
    logprobs = [TokenLogprobs([5, 6], [-0.5, -1.5], 1)]
    updates = [
        SeqUpdate("a", [5]),
        SeqUpdate("b", [5, 6], logprobs, logprobs, FinishReason.STOP, "stop", 16, 1.25, "error"),
        SeqUpdate("c", [], stop_reason=7),
    ]
    turn = decode(encode(Turn([pack(update) for update in updates], STATS, 3, True, "dead")))
    assert isinstance(turn, Turn)
    assert [SeqUpdate(*packed) for packed in turn.updates] == updates
    assert turn.going == [] and not turn.num_new and not turn.tokens
    going = ["a", "b"], ints([1, 2]), ints([5, 0, 6, 7])
    turn = decode(encode(Turn([], STATS, 3, True, None, *going)))
    assert isinstance(turn, Turn) and (turn.going, turn.num_new, turn.tokens) == going
