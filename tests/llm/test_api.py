"""The offline API as its users know it from vLLM and nano-vllm."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pellucid import LLM, SamplingParams
from pellucid.sampling_params import StructuredOutputsParams
from tests.tiny import TEXT, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), dtype="float32", device="cpu", block_size=16, check_invariants=True) as llm:
        yield llm


def test_strings_ids_and_mixtures_are_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the quick")
    outputs = llm.generate(["the quick", ids, {"prompt": "the quick"}], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert [output.prompt for output in outputs] == ["the quick", None, "the quick"]
    assert len({output["text"] for output in outputs}) == 1
    assert outputs[0]["token_ids"] == outputs[0].outputs[0].token_ids and len(outputs[0]["token_ids"]) == 12
    assert outputs[0].finished and outputs[0].outputs[0].finish_reason == "length"


def test_one_prompt_may_stand_without_a_list(llm: LLM) -> None:
    (text,) = llm.generate("the quick", GREEDY, use_tqdm=False)
    (ids,) = llm.generate(text.prompt_token_ids, GREEDY, use_tqdm=False)
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids


def test_parameters_are_the_engines_own_from_the_beginning(llm: LLM) -> None:
    given = GREEDY.clone()
    stream = llm.stream("the quick", given)
    next(stream)
    given.max_tokens = 1
    assert len(list(stream)[-1].outputs[0].token_ids) == 12


def test_who_names_no_request_gets_an_id_that_nobody_has_taken(llm: LLM) -> None:
    engine = llm.llm_engine
    first = engine.add_request("the", GREEDY)
    taken = {str(int(first) + i) for i in (2, 3, 5)}
    for request_id in taken:
        engine.add_request("the", GREEDY, request_id=request_id)
    own = {engine.add_request("the", GREEDY) for _ in range(4)}
    assert len(own) == 4 and not own & taken
    while not engine.is_finished():
        engine.step()


def test_the_garbage_collector_is_left_as_it_was(llm: LLM) -> None:
    assert gc.get_freeze_count(), "as tests/conftest.py does"
    llm.generate("the quick", GREEDY, use_tqdm=False)
    assert gc.get_freeze_count(), "the user's own freeze is not undone"
    gc.unfreeze()
    llm.generate("the quick", GREEDY, use_tqdm=False)
    assert not gc.get_freeze_count()
    gc.freeze()


def test_parameters_for_each_prompt_must_be_as_many(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY], use_tqdm=False)


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="length is 256 tokens, .* contains 300 input tokens"):
        llm.generate([[1], [1] * 300], GREEDY, use_tqdm=False)
    assert llm.llm_engine.is_finished()


def test_a_refused_request_leaves_none_of_its_neighbours_queued(llm: LLM) -> None:
    engine = llm.llm_engine
    with pytest.raises(ValueError, match="priority is 'high'"):
        llm.generate(["the"] * 5, GREEDY.clone(n=2), use_tqdm=False, priority=[0, 0, "high", 0, 0])  # type: ignore[list-item]
    assert engine.is_finished(), "nobody will step for those before it"
    (alone,) = llm.generate(["fox"], GREEDY, use_tqdm=False)
    stream = llm.stream("fox", GREEDY)
    next(stream)
    with pytest.raises(ValueError, match="priority is 'high'"):
        llm.generate(["the"] * 2, GREEDY, use_tqdm=False, priority=[0, "high"])  # type: ignore[list-item]
    assert engine.outputs.num_requests == 1, "the stream's"
    assert list(stream)[-1]["token_ids"] == alone["token_ids"]


def test_a_priority_that_nobody_looks_at_is_warned_of_once(
    llm: LLM, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"^priority is 'high', must be an integer"):
        llm.generate(["fox"], GREEDY, use_tqdm=False, priority=["high"])  # type: ignore[list-item]
    (expected, _) = llm.generate(["fox", "dog"], GREEDY, use_tqdm=False, priority=[None, 1])  # type: ignore[list-item]
    llm.generate(["dog"], GREEDY, use_tqdm=False, priority=[2])
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "pellucid.llm_engine")
    assert warning.startswith("a request has priority 1, ")
    with LLM(str(tiny), dtype="float32", device="cpu", scheduling_policy="priority") as other:
        caplog.clear()
        (output,) = other.generate(["fox"], GREEDY, use_tqdm=False, priority=[np.int64(-1)])  # type: ignore[list-item]
    assert output["token_ids"] == expected["token_ids"] and not caplog.records


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'max_model_length'; did you mean 'max_model_len'"):
        LLM("sprout", max_model_length=8192)


def test_nano_vllms_options_are_accepted(tiny: Path) -> None:
    options = {
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "kvcache_block_size": 256,
        "num_kvcache_blocks": 8,
    }
    with LLM(str(tiny), device="cpu", max_model_len=128, **options) as llm:
        assert llm.llm_engine.capacity.num_pages == 8
        assert llm.llm_engine.resolved.block_size == 256
        assert len(llm.generate(["Benchmark: "], SamplingParams(), use_tqdm=False)) == 1


def test_a_cache_too_small_for_the_wished_length_says_how_much_it_lacks(tiny: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len 256 needs .* lower max_model_len to 64"):
        LLM(str(tiny), device="cpu", max_model_len=256, block_size=16, num_gpu_blocks_override=4)
    with LLM(str(tiny), device="cpu", block_size=16, num_gpu_blocks_override=4) as llm:
        assert llm.llm_engine.capacity.max_model_len == 64
        (output,) = llm.generate([[1] * 60], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4


def test_n_completions_come_in_one_output_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(["the quick"], params, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    (again,) = llm.generate(["the quick"], params, use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (full,) = llm.generate(["dog"], GREEDY.clone(max_tokens=40), use_tqdm=False)
    stop = full.outputs[0].text[4:7]
    (cut,) = llm.generate(["dog"], GREEDY.clone(max_tokens=40, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == full.outputs[0].text[: full.outputs[0].text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert len(cut.outputs[0].token_ids) < 40


def test_a_stop_token_ends_it_too_but_not_before_min_tokens(llm: LLM) -> None:
    (full,) = llm.generate(["dog"], GREEDY, use_tqdm=False)
    token = full.outputs[0].token_ids[3]
    first = full.outputs[0].token_ids.index(token)
    (cut,) = llm.generate(["dog"], GREEDY.clone(stop_token_ids=[token]), use_tqdm=False)
    assert cut.outputs[0].token_ids == full.outputs[0].token_ids[: first + 1]
    assert cut.outputs[0].stop_reason == token
    (later,) = llm.generate(["dog"], GREEDY.clone(stop_token_ids=[token], min_tokens=8), use_tqdm=False)
    assert len(later.outputs[0].token_ids) >= 8 and token not in later.outputs[0].token_ids[:8]


def test_streams_grow_and_join_to_the_whole(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.stream("你好", GREEDY)]
    (whole,) = llm.generate(["你好"], GREEDY, use_tqdm=False)
    assert texts[-1] == whole.outputs[0].text
    assert all(longer.startswith(shorter) for shorter, longer in zip(texts, texts[1:], strict=False))


def test_two_streams_run_side_by_side(llm: LLM) -> None:
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0]["text"] for prompt in ("fox", "dog")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("fox", "dog")]
    last = ["", ""]
    for pair in zip(*streams, strict=True):
        last = [output["text"] for output in pair]
    assert last == alone


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("the", GREEDY.clone(max_tokens=200))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.llm_engine.is_finished()
    assert llm.llm_engine.stats.kv_usage == 0


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "fox"}], GREEDY, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    batch = llm.chat(
        [[{"role": "user", "content": "fox"}], [{"role": "user", "content": "dog"}]], GREEDY, use_tqdm=False
    )
    assert batch[0]["text"] == output["text"] and len(batch) == 2


def test_logprobs_are_those_of_the_raw_logits(llm: LLM) -> None:
    params = GREEDY.clone(temperature=0.7, seed=3, logprobs=4, prompt_logprobs=2, top_k=3)
    prompt = [5, 9, 200, 17, 3]
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token and 4 <= len(entry) <= 5
        assert [e.rank for e in entry.values() if e.rank and e.rank <= 4][:1]
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == prompt[1:]
    # A prompt's logprobs are what the same tokens get when they are generated.
    whole = prompt + completion.token_ids
    (scored,) = llm.generate([whole], GREEDY.clone(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert scored.prompt_logprobs is not None
    for position, token in enumerate(completion.token_ids, start=len(prompt)):
        entry = scored.prompt_logprobs[position]
        assert entry is not None
        generated = completion.logprobs[position - len(prompt)][token]
        assert math.isclose(entry[token].logprob, generated.logprob, abs_tol=1e-4)
        assert entry[token].rank == generated.rank


def test_prompt_logprobs_survive_chunks_and_preemption(tiny: Path) -> None:
    prompts = [[1 + (7 * i + j) % 300 for j in range(90)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, prompt_logprobs=1)
    with LLM(str(tiny), dtype="float32", device="cpu", block_size=16) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    small = {
        "max_num_batched_tokens": 20,
        "num_gpu_blocks_override": 16,
        "check_invariants": True,
        "depth": 2,
    }
    with LLM(str(tiny), dtype="float32", device="cpu", block_size=16, **small) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.llm_engine.stats.num_preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs is not None and wanted.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 90
        for entry, other in zip(output.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            assert entry is not None and other is not None and list(entry) == list(other)
            assert all(math.isclose(entry[t].logprob, other[t].logprob, abs_tol=1e-4) for t in entry)


def test_eos_ends_the_text_and_stays_in_the_ids(tiny: Path) -> None:
    with LLM(str(tiny), dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=20, logit_bias={0: 100.0})
        (output,) = llm.generate(["fox"], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [0] and output.outputs[0].text == ""
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_the_tokenizers_eos_ends_a_text_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", eos_token_id=2)  # the tokenizer names <|endoftext|>, 0
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        for token in (0, 2):
            params = SamplingParams(temperature=0, max_tokens=20, logit_bias={token: 100.0})
            (output,) = llm.generate(["fox"], params, use_tqdm=False)
            assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([token], "stop")


def test_an_eos_token_beyond_the_vocabulary_ends_nothing_and_harms_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", eos_token_id=[-1, 320, 50256])  # of ids 0 to 319
    wishes = [
        GREEDY.clone(ignore_eos=False, min_tokens=12, logit_bias={319: 100.0}),
        GREEDY.clone(structured_outputs=StructuredOutputsParams(choice=["fox"]), ignore_eos=False),
    ]
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        assert llm.llm_engine.eos_token_ids == (0,)  # the tokenizer's
        held, constrained = llm.generate(["fox"] * 2, wishes, use_tqdm=False)
    assert held.outputs[0].token_ids == [319] * 12
    assert (constrained["text"], constrained.outputs[0].finish_reason) == ("fox", "stop")


def test_a_bad_word_beyond_the_vocabulary_harms_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", vocab_size=256)  # of the tokenizer's 320
    with LLM(str(folder), dtype="float32", device="cpu") as llm:
        words = [text for text in TEXT[0].split() if max(llm.tokenizer.encode(text)) >= 256]
        plain, with_words = llm.generate(["a"] * 2, [GREEDY, GREEDY.clone(bad_words=words)], use_tqdm=False)
    assert words and with_words["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("said", [{"top_p": 0}, {"top_k": 50.5}, {"max_new_tokens": 0}], ids=str)
def test_a_recommendation_that_no_request_may_follow_is_refused_at_the_start(
    tmp_path: Path, said: dict[str, object]
) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="so says generation_config.json; generation_config='none'"):
        LLM(str(folder), dtype="float32", device="cpu")
    with LLM(str(folder), dtype="float32", device="cpu", generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_requests_without_a_seed_differ_and_a_new_engine_repeats_them(tiny: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    runs = []
    for _ in range(2):
        with LLM(str(tiny), dtype="float32", device="cpu", seed=5) as llm:
            runs.append([o["token_ids"] for o in llm.generate(["fox", "fox"], params, use_tqdm=False)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_start_up_adds_little_to_torchs_own_import() -> None:
    """In processor time, which a busy machine lengthens little, and of both alike."""
    code = (
        "import time; import torch; torchs = time.process_time(); import pellucid.llm; import sys;"
        "assert 'transformers' not in sys.modules; print(torchs, time.process_time() - torchs)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True) for _ in range(2)
    ]
    torchs, ours = map(min, zip(*(map(float, run.stdout.split()) for run in runs), strict=True))
    assert ours < torchs / 3, f"pellucid.llm took {ours:.2f} s beside torch's {torchs:.2f}"
