"""The engine's updates become the outputs that users get."""

from __future__ import annotations

from itertools import count

import pytest

from pellucid.sampling_params import SamplingParams
from pellucid.text.outputs import OutputKind, OutputProcessor, fan_out
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SeqUpdate,
    TokenLogprobs,
)

EOS = 2


def request(
    tokenizer: Tokenizer, sampling: SamplingParams, request_id: str = "r", prompt: str = "hi"
) -> Request:
    return Request(
        id=request_id,
        prompt_token_ids=tokenizer.encode("hi"),
        sampling=sampling,
        eos_token_ids=(EOS,),
        arrival=5.0,
    )


def run(
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    updates: list[SeqUpdate],
    kind: OutputKind = OutputKind.CUMULATIVE,
) -> tuple[list[RequestOutput], list[str]]:
    """All outputs of one request, and what must be aborted."""
    processor = OutputProcessor(tokenizer)
    processor.add(request(tokenizer, sampling), prompt="hi", kind=kind)
    outputs = [output for update in updates if (output := processor.update(update)) is not None]
    return outputs, processor.take_aborts()


def one_token_each(ids: list[int], finish: FinishReason | None = None) -> list[SeqUpdate]:
    updates = [SeqUpdate("r", [token]) for token in ids]
    updates[-1].finish_reason = finish
    return updates


def test_outputs_grow_until_the_request_is_finished(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello 😀!")
    outputs, aborts = run(byte_level, SamplingParams(), one_token_each(ids, FinishReason.LENGTH))
    assert [output.finished for output in outputs] == [False] * (len(ids) - 1) + [True]
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, len(ids) + 1))
    assert outputs[0].outputs[0].text == "hello"
    assert outputs[-1].outputs[0] == CompletionOutput(0, "hello 😀!", ids, finish_reason="length")
    assert (outputs[-1].prompt, outputs[-1].request_id, aborts) == ("hi", "r", [])


def test_deltas_join_to_the_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello 😀, the cat STOP sat")
    updates = one_token_each(ids, FinishReason.LENGTH)
    sampling = SamplingParams(stop=["STOP it"])
    outputs, _ = run(byte_level, sampling, updates, OutputKind.DELTA)
    assert len(outputs) == len(ids)
    assert "".join(output.outputs[0].text for output in outputs) == "hello 😀, the cat STOP sat"
    assert [token for output in outputs for token in output.outputs[0].token_ids] == ids


def test_final_only_shows_one_output(byte_level: Tokenizer) -> None:
    updates = one_token_each(byte_level.encode("hello world"), FinishReason.LENGTH)
    outputs, _ = run(byte_level, SamplingParams(), updates, OutputKind.FINAL_ONLY)
    assert [output["text"] for output in outputs] == ["hello world"]


@pytest.mark.parametrize("skip", [True, False])
def test_eos_is_among_the_ids_but_not_in_the_text(byte_level: Tokenizer, skip: bool) -> None:
    ids = [*byte_level.encode("hello"), EOS]
    sampling = SamplingParams(skip_special_tokens=skip)
    outputs, _ = run(byte_level, sampling, one_token_each(ids, FinishReason.STOP))
    assert outputs[-1].outputs[0] == CompletionOutput(0, "hello", ids, finish_reason="stop")


def test_a_stop_token_is_shown_if_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello.")
    update = SeqUpdate("r", ids, finish_reason=FinishReason.STOP, stop_reason=ids[-1])
    for include, text in ((True, "hello."), (False, "hello")):
        sampling = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
        outputs, _ = run(byte_level, sampling, [update])
        assert (outputs[0]["text"], outputs[0].outputs[0].stop_reason) == (text, ids[-1])


def test_the_text_goes_on_behind_the_prompt(byte_fallback: Tokenizer) -> None:
    """Prompt and text together are what the model has read and written, space between words included."""
    update = SeqUpdate("r", byte_fallback.encode("Paris"), finish_reason=FinishReason.LENGTH)
    outputs, _ = run(byte_fallback, SamplingParams(), [update])
    assert outputs[0]["text"] == " Paris"


def test_a_prompt_is_not_read_before_an_answer_comes(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing is at work but the host."""
    read, processor, spell = list[int](), OutputProcessor(byte_level), byte_level.token_bytes
    monkeypatch.setattr(byte_level, "token_bytes", lambda token: (read.append(token), spell(token))[1])
    processor.add(request(byte_level, SamplingParams()))
    assert not read
    processor.update(SeqUpdate("r", byte_level.encode("Paris")))
    assert read == byte_level.encode("hi") + byte_level.encode("Paris")


def test_a_text_that_a_grammar_ended_is_shown_to_its_last_token(byte_level: Tokenizer) -> None:
    update = SeqUpdate("r", byte_level.encode("{}"), finish_reason=FinishReason.STOP)
    outputs, _ = run(byte_level, SamplingParams(), [update])
    assert outputs[0]["text"] == "{}"


def test_ignored_eos_is_a_token_like_any_other(byte_level: Tokenizer) -> None:
    ids = [EOS, *byte_level.encode("hello"), EOS]
    sampling = SamplingParams(ignore_eos=True, skip_special_tokens=False)
    outputs, _ = run(byte_level, sampling, one_token_each(ids, FinishReason.LENGTH))
    assert outputs[-1]["text"] == "</s>hello</s>"


@pytest.mark.parametrize("per_step", [1, 2, 3, 100])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_it_alike_however_many_tokens_come_at_once(
    byte_level: Tokenizer, per_step: int, include: bool
) -> None:
    ids = byte_level.encode("hello world; the cat sat on the mat")
    updates = [SeqUpdate("r", ids[i : i + per_step]) for i in range(0, len(ids), per_step)]
    sampling = SamplingParams(stop=["t s", "; the cat"], include_stop_str_in_output=include)
    outputs, aborts = run(byte_level, sampling, updates)
    last = outputs[-1].outputs[0]
    assert last.text == ("hello world; the cat" if include else "hello world")
    assert last.token_ids == byte_level.encode("hello world; the cat")
    assert (last.finish_reason, last.stop_reason, aborts) == ("stop", "; the cat", ["r"])
    assert outputs[-1].finished


def test_a_request_that_the_engine_has_finished_is_not_aborted(byte_level: Tokenizer) -> None:
    update = SeqUpdate("r", byte_level.encode("hello world"), finish_reason=FinishReason.LENGTH)
    outputs, aborts = run(byte_level, SamplingParams(stop=["world"]), [update])
    assert (outputs[-1]["text"], outputs[-1].outputs[0].finish_reason, aborts) == ("hello ", "stop", [])


def test_updates_behind_a_stop_string_are_ignored(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello")
    updates = [SeqUpdate("r", ids), SeqUpdate("r", ids), SeqUpdate("r", finish_reason=FinishReason.ABORT)]
    outputs, aborts = run(byte_level, SamplingParams(stop="hell"), updates)
    assert (len(outputs), outputs[0]["text"], aborts) == (1, "", ["r"])


def test_stop_strings_count_only_behind_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a.b.c.d.")
    assert len(ids) == 8
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c")):
        sampling = SamplingParams(stop=["."], min_tokens=min_tokens)
        for updates in (one_token_each(ids), [SeqUpdate("r", ids)]):
            outputs, _ = run(byte_level, sampling, updates)
            assert outputs[-1]["text"] == text, min_tokens


def test_what_might_have_been_a_stop_string_is_shown_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello wor")
    for kind in (OutputKind.CUMULATIVE, OutputKind.DELTA):
        updates = one_token_each(ids, FinishReason.LENGTH)
        outputs, _ = run(byte_level, SamplingParams(stop=["world"]), updates, kind)
        texts = [output["text"] for output in outputs]
        assert (texts[-1] if kind is OutputKind.CUMULATIVE else "".join(map(str, texts))) == "hello wor"
        assert not str(texts[-2]).endswith("w")


def test_without_detokenizing_there_are_ids_alone(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello")
    outputs, _ = run(byte_level, SamplingParams(detokenize=False, logprobs=0), [SeqUpdate("r", ids)])
    assert (outputs[0]["text"], outputs[0]["token_ids"]) == ("", ids)
    processor = OutputProcessor(None)
    processor.add(request(byte_level, SamplingParams()))
    output = processor.update(SeqUpdate("r", ids))
    assert output is not None
    assert output["token_ids"] == ids


def test_logprobs_name_the_chosen_token_first_and_then_the_likeliest(byte_level: Tokenizer) -> None:
    chosen, first, second = byte_level.encode("abc")
    entry = TokenLogprobs([chosen, first, second], [-3.0, -0.5, -1.0], rank=7)
    update = SeqUpdate("r", [chosen], logprobs=[entry])
    [output], _ = run(byte_level, SamplingParams(logprobs=2), [update])
    assert output.outputs[0].logprobs == [
        {chosen: Logprob(-3.0, 7, "a"), first: Logprob(-0.5, 1, "b"), second: Logprob(-1.0, 2, "c")}
    ]
    assert list((output.outputs[0].logprobs or [{}])[0]) == [chosen, first, second]
    assert output.outputs[0].cumulative_logprob == -3.0


def test_a_chosen_token_among_the_likeliest_is_named_once(byte_level: Tokenizer) -> None:
    a, b = byte_level.encode("ab")
    entry = TokenLogprobs([b, a, b], [-1.0, -0.5, -1.0], rank=2)
    [output], _ = run(byte_level, SamplingParams(logprobs=2), [SeqUpdate("r", [b], logprobs=[entry])])
    assert output.outputs[0].logprobs == [{b: Logprob(-1.0, 2, "b"), a: Logprob(-0.5, 1, "a")}]


def test_logprobs_of_tokens_behind_a_stop_string_are_dropped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a.b")
    entries = [TokenLogprobs([token], [-1.0], rank=1) for token in ids]
    sampling = SamplingParams(logprobs=0, stop=["."])
    [output], _ = run(byte_level, sampling, [SeqUpdate("r", ids, logprobs=entries)])
    assert len(output.outputs[0].logprobs or ()) == len(output["token_ids"]) == 2
    assert output.outputs[0].cumulative_logprob == -2.0


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
def test_prompt_logprobs_come_in_chunks_and_begin_with_none(byte_level: Tokenizer, kind: OutputKind) -> None:
    x, y = byte_level.encode("xy")
    chunks = [[TokenLogprobs([x, y], [-2.0, -1.0], rank=2)], [TokenLogprobs([y], [-4.0], rank=9)]]
    updates = [SeqUpdate("r", prompt_logprobs=chunk) for chunk in chunks]
    updates += [SeqUpdate("r", [x]), SeqUpdate("r", [y], finish_reason=FinishReason.LENGTH)]
    outputs, _ = run(byte_level, SamplingParams(prompt_logprobs=1), updates, kind)
    assert len(outputs) == 2
    whole = [None, {x: Logprob(-2.0, 2, "x"), y: Logprob(-1.0, 1, "y")}, {y: Logprob(-4.0, 9, "y")}]
    assert outputs[0].prompt_logprobs == whole
    assert outputs[1].prompt_logprobs == (whole if kind is OutputKind.CUMULATIVE else [])


def test_n_completions_come_in_one_output(byte_level: Tokenizer) -> None:
    processor = OutputProcessor(byte_level)
    children = fan_out(request(byte_level, SamplingParams(n=3, seed=7)))
    assert [child.seed for child, _ in children] == [0, 1, 2]
    assert all(child.sampling.n == 1 for child, _ in children)
    for child, parent in reversed(children):
        processor.add(child, parent=parent, kind=OutputKind.FINAL_ONLY)
    ids = [child.id for child, _ in children]
    assert sorted(processor.engine_ids("r")) == ids
    assert len(set(ids)) == 3
    outputs = [
        processor.update(SeqUpdate(ids[i], byte_level.encode(text), finish_reason=FinishReason.LENGTH))
        for i, text in ((2, "two"), (0, "hello"), (1, "cat"))
    ]
    assert outputs[:2] == [None, None]
    assert outputs[2] is not None
    assert [(c.index, c.text) for c in outputs[2].outputs] == [(0, "hello"), (1, "cat"), (2, "two")]
    assert (outputs[2].request_id, outputs[2].finished) == ("r", True)
    assert (processor.num_requests, processor.engine_ids("r")) == (0, [])


def test_deltas_of_n_completions_show_the_one_that_changed(byte_level: Tokenizer) -> None:
    processor = OutputProcessor(byte_level)
    children = fan_out(request(byte_level, SamplingParams(n=2)))
    for child, parent in children:
        processor.add(child, parent=parent, kind=OutputKind.DELTA)
    ends = [
        processor.update(SeqUpdate(child.id, byte_level.encode("hello"), finish_reason=FinishReason.LENGTH))
        for child, _ in children
    ]
    assert [[c.index for c in output.outputs] for output in ends if output] == [[0], [1]]
    assert [output.finished for output in ends if output] == [False, True]


def test_of_n_completions_the_first_tells_of_the_prompt(byte_level: Tokenizer) -> None:
    """Each of them computes the prompt's log-probabilities, and all but the first find it in the cache."""
    processor = OutputProcessor(byte_level)
    children = fan_out(request(byte_level, SamplingParams(n=2, prompt_logprobs=0)))
    entry = TokenLogprobs([5], [-1.0], rank=1)
    for child, parent in children:
        processor.add(child, parent=parent)
    for i, (child, _) in enumerate(children):
        processor.update(SeqUpdate(child.id, prompt_logprobs=[entry], num_cached_tokens=64 * i))
    output = processor.update(SeqUpdate(children[1][0].id, [5]))
    assert output is not None
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs or ()) == 2


def test_only_the_completion_with_the_stop_string_is_aborted(byte_level: Tokenizer) -> None:
    processor = OutputProcessor(byte_level)
    (first, _), (second, _) = children = fan_out(request(byte_level, SamplingParams(n=2, stop=["."])))
    for child, parent in children:
        processor.add(child, parent=parent)
    output = processor.update(SeqUpdate(first.id, byte_level.encode("a.")))
    assert output is not None
    assert not output.finished
    assert processor.take_aborts() == [first.id]
    assert processor.take_aborts() == []
    output = processor.update(SeqUpdate(second.id, byte_level.encode("b."), finish_reason=FinishReason.STOP))
    assert output is not None
    assert [c.text for c in output.outputs] == ["a", "b"]
    assert output.finished


def test_times_and_cached_tokens_are_reported(byte_level: Tokenizer) -> None:
    ticks = count(10)
    processor = OutputProcessor(byte_level, clock=lambda: float(next(ticks)))
    processor.add(request(byte_level, SamplingParams()))
    token = byte_level.encode("a")
    processor.update(SeqUpdate("r", first_scheduled=6.0))
    processor.update(SeqUpdate("r", token, num_cached_tokens=64, first_scheduled=6.0))
    output = processor.update(SeqUpdate("r", token, finish_reason=FinishReason.LENGTH, first_scheduled=6.0))
    assert output is not None
    assert output.num_cached_tokens == 64
    times = output.metrics
    assert (times.arrival_time, times.first_scheduled_time) == (5.0, 6.0)
    assert (times.first_token_time, times.finished_time) == (11.0, 12.0)


def test_an_output_does_not_change_after_it_was_given(byte_level: Tokenizer) -> None:
    updates = one_token_each(byte_level.encode("abxyz"), FinishReason.LENGTH)
    outputs, _ = run(byte_level, SamplingParams(logprobs=0), updates)
    assert [len(output["token_ids"]) for output in outputs] == [1, 2, 3, 4, 5]
    assert outputs[0].metrics.finished_time is None
    assert outputs[-1].metrics.finished_time is not None


def test_every_request_ends_in_an_output_when_the_engine_dies(byte_level: Tokenizer) -> None:
    processor = OutputProcessor(byte_level)
    processor.add(request(byte_level, SamplingParams()), kind=OutputKind.FINAL_ONLY)
    for child, parent in fan_out(request(byte_level, SamplingParams(n=2), "s")):
        processor.add(child, parent=parent, kind=OutputKind.FINAL_ONLY)
    processor.update(SeqUpdate("r", byte_level.encode("hello")))
    ends = processor.fail_all("worker 3 died")
    assert [(end.request_id, end.finished, end.error) for end in ends] == [
        ("r", True, "worker 3 died"),
        ("s", True, "worker 3 died"),
    ]
    assert ends[0]["text"] == "hello"
    assert ends[0].outputs[0].finish_reason == "error"
    assert processor.num_requests == 0


def test_an_id_that_is_running_is_refused(byte_level: Tokenizer) -> None:
    processor = OutputProcessor(byte_level)
    processor.add(request(byte_level, SamplingParams()))
    with pytest.raises(ValueError, match="'r' is already running"):
        processor.add(request(byte_level, SamplingParams()))
