"""Structured outputs on the bundled model: every text is of its language, whatever it is combined with."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xgrammar")

from pellucid import LLM, SamplingParams, StructuredOutputsParams
from pellucid.types import RequestOutput
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_members")

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 512,
    "check_invariants": True,
    "num_gpu_blocks_override": 200,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
}
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"'
WISHES = {
    "json": StructuredOutputsParams(json=PERSON),
    "regex": StructuredOutputsParams(regex=r"[a-f]{2,5}-\d{1,4}(\.x)?"),
    "choice": StructuredOutputsParams(choice=["red", "dark red", 'with "quotes"', "é\n✓"]),
    "grammar": StructuredOutputsParams(grammar=SUM),
    "json_object": StructuredOutputsParams(json_object=True),
}
PROMPTS = ["What is 2 + 3?", "Sort these: 5 1 4", "Name a person."]
QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}

STARVED = {"num_gpu_blocks_override": 11, "block_size": 16, "max_model_len": 160}


def check(kind: str, output: RequestOutput) -> None:
    """The text is of the language, or the beginning of one that max_tokens has cut."""
    answer, text = output.outputs[0], output.outputs[0].text
    assert answer.finish_reason in ("stop", "length"), output.error
    is_whole = answer.finish_reason == "stop"
    match kind:
        case "choice":
            assert text in ["red", "dark red", 'with "quotes"', "é\n✓"]
        case "regex":
            assert re.fullmatch(r"[a-f]{2,5}-\d{1,4}(\.x)?", text)
        case "grammar":
            assert set(text) <= set("0123456789+()")
            assert not is_whole or re.fullmatch(r"[\d+]*", re.sub(r"[()]", "", text))
        case "json" if is_whole:
            person = json.loads(text)
            assert set(person) == set(PERSON["properties"]) and len(person["name"]) <= 12
            assert 0 <= person["age"] <= 999 and set(person["colours"]) <= {"red", "blue"}
        case _ if is_whole:
            assert isinstance(json.loads(text), dict)
        case _:
            assert re.match(r"\s*\{", text)


def sampling(kind: str, seed: int = 0, **changes: Any) -> SamplingParams:
    params: dict[str, Any] = {"seed": seed, "max_tokens": 120, "structured_outputs": WISHES[kind]}
    return SamplingParams(**(params | changes))


@pytest.fixture(scope="module")
def llm() -> Generator[LLM, None, None]:
    with LLM("sprout", **OPTIONS) as llm:
        yield llm


def texts(llm: LLM, **changes: Any) -> list[str]:
    """Of every kind and of none, all at once; some of them are cut."""
    changes = {"max_tokens": 40} | changes
    params = [sampling(kind, seed, **changes) for seed, kind in enumerate([*WISHES] * 2)]
    params += [SamplingParams(seed=7, **changes)]
    prompts = [PROMPTS[i % 3] for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for kind, output in zip([*WISHES] * 2, outputs, strict=False):
        check(kind, output)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[str]:
    return texts(llm)


def test_every_text_is_of_its_language(llm: LLM) -> None:
    kinds = [kind for kind in WISHES for _ in range(6)]
    params = [sampling(kind, seed % 6) for seed, kind in enumerate(kinds)]
    outputs = llm.generate([PROMPTS[i % 3] for i in range(len(kinds))], params, use_tqdm=False)
    ended = set()
    for kind, output in zip(kinds, outputs, strict=True):
        check(kind, output)
        ended |= {kind} if output.outputs[0].finish_reason == "stop" else set()
    assert ended >= {*WISHES} - {"json_object"}


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 32},
        STARVED,
        {"tensor_parallel_size": 2, **NGRAM},
        {"pipeline_parallel_size": 2, **NGRAM},
        pytest.param(
            {"data_parallel_size": 2}, marks=pytest.mark.parallel
        ),  # as test_data_parallel.py has it
    ],
    ids=str,
)
def test_how_it_is_run_changes_no_text(expected: list[str], options: dict) -> None:
    with LLM("sprout", **(OPTIONS | options)) as llm:
        assert texts(llm) == expected
        assert options is not STARVED or llm.llm_engine.stats.num_preemptions


@pytest.mark.parametrize(
    "drafts",
    [
        {"model": "sprout-eagle3"},
        {"method": "mtp", "speculative_eagle_topk": 2, "num_speculative_tokens": 8},
        pytest.param({"method": "mtp"}, marks=pytest.mark.parallel),
        pytest.param({"model": "sprout-medusa"}, marks=pytest.mark.parallel),
        pytest.param({"model": "sprout-draft"}, marks=pytest.mark.parallel),
        pytest.param({"method": "suffix"}, marks=pytest.mark.parallel),
    ],
    ids=str,
)
def test_what_drafts_changes_no_text(expected: list[str], drafts: dict[str, object]) -> None:
    config = {"num_speculative_tokens": 3, **drafts, "adaptive": False}
    with LLM("sprout", **OPTIONS, speculative_config=config) as llm:
        assert texts(llm) == expected
        assert llm.llm_engine.stats.num_accepted_tokens > 10


def test_texts_of_the_standard_test_of_drafts_are_of_their_language() -> None:
    config = {**NGRAM["speculative_config"], "rejection_sample_method": "standard"}
    with LLM("sprout", **OPTIONS, speculative_config=config) as llm:
        assert texts(llm)


def test_what_a_grammar_forces_is_drafted_and_changes_no_text(llm: LLM, expected: list[str]) -> None:
    wish = StructuredOutputsParams(regex=r"(red|blue) and nothing but red and blue in all of it, \d")
    greedy = SamplingParams(temperature=0, max_tokens=60, structured_outputs=wish)
    alone = llm.generate(PROMPTS[:1], greedy, use_tqdm=False)[0].outputs[0]
    config = {"method": "grammar", "num_speculative_tokens": 8}
    with LLM("sprout", **OPTIONS, speculative_config=config) as drafting:
        before = drafting.llm_engine.stats
        (output,) = drafting.generate(PROMPTS[:1], greedy, use_tqdm=False)
        after = drafting.llm_engine.stats
        assert output.outputs[0].token_ids == alone.token_ids
        num_steps, num_tokens = after.num_steps - before.num_steps, len(alone.token_ids)
        assert num_steps < num_tokens * 0.75, (num_steps, num_tokens)
        assert after.of_features["grammar_forced_drafts"] >= after.num_draft_tokens > 10
        assert texts(drafting) == expected


def test_drafts_of_a_constrained_text_are_verified_and_change_no_text(expected: list[str]) -> None:
    repeating = "(ab){20,30}c"
    wish = StructuredOutputsParams(regex=repeating)
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=wish)
    with LLM("sprout", **OPTIONS, **NGRAM) as llm:
        (output,) = llm.generate("abab", params, use_tqdm=False)
        assert re.fullmatch(repeating, output.outputs[0].text)
        assert llm.llm_engine.stats.num_accepted_tokens > 10
        assert texts(llm) == expected


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], sampling("choice", logprobs=2, prompt_logprobs=1), use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_n_completions_each_have_their_own_place_in_the_grammar(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], sampling("regex", n=4), use_tqdm=False)
    assert all(re.fullmatch(r"[a-f]{2,5}-\d{1,4}(\.x)?", answer.text) for answer in output.outputs)


@pytest.mark.parametrize("changes", [{"min_tokens": 60}, {"ignore_eos": True}], ids=str)
def test_a_text_ends_with_its_language(llm: LLM, changes: dict) -> None:
    (output,) = llm.generate(PROMPTS[0], sampling("choice", **changes), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in WISHES["choice"].choice  # type: ignore[operator]


@pytest.mark.parametrize(
    "options,eos,min_tokens",
    [
        ({}, None, 0),
        (NGRAM, 7, 40),
        pytest.param({}, 7, 40, marks=pytest.mark.matrix),
        pytest.param(NGRAM, None, 0, marks=pytest.mark.matrix),
    ],
)
def test_a_text_that_no_token_may_end_ends_with_its_language(
    tmp_path: Path, options: dict, eos: int | None, min_tokens: int
) -> None:
    folder = write_checkpoint(tmp_path / "tiny", eos_token_id=eos)
    (folder / "tokenizer_config.json").unlink()  # it names another one
    wish = StructuredOutputsParams(choice=["fox" * 6])
    params = SamplingParams(max_tokens=50, min_tokens=min_tokens, structured_outputs=wish)
    with LLM(str(folder), **(OPTIONS | {"max_model_len": 128} | options)) as llm:
        (output,) = llm.generate("fox" * 5, params, use_tqdm=False)
    assert (output["text"], output.outputs[0].finish_reason) == ("fox" * 6, "stop"), output.error


def test_what_other_parameters_leave_nothing_of_is_an_error(llm: LLM) -> None:
    only = llm.get_tokenizer().encode("zzz", add_special_tokens=False)
    (output,) = llm.generate(PROMPTS[0], sampling("choice", allowed_token_ids=only), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert "no token is left that may come next: allowed_token_ids, " in str(output.error)


def test_an_aborted_text_is_forgotten(llm: LLM) -> None:
    engine = llm.llm_engine
    names = [engine.add_request(PROMPTS[0], sampling("json", seed)) for seed in range(3)]
    for _ in range(5):
        engine.step()
    for name in names:
        engine.abort(name)
    new = engine.add_request(PROMPTS[0], sampling("json"))
    engine.abort(new)  # before anything is known of it
    while not engine.is_finished():
        engine.step()
    assert not engine.engine.scheduler.features._features["grammar"]._texts  # type: ignore[attr-defined]
    assert texts(llm)


@pytest.mark.parametrize("opens", [True, False])
def test_thinking_is_free_and_the_answer_is_not(llm: LLM, opens: bool) -> None:
    wish = StructuredOutputsParams(choice=["yes", "no"], thinking=(None if opens else "<think>", "</think>"))
    prompt = "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n" + "<think>\n" * opens
    params = SamplingParams(max_tokens=300, n=8, seed=1, structured_outputs=wish, skip_special_tokens=False)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    whole = [answer.text for answer in output.outputs if answer.finish_reason == "stop"]
    assert whole and all(re.search(r"(^|</think>)(yes|no)(<\|im_end\|>)?$", text) for text in whole)
    if opens:
        assert all("</think>" in text for text in whole)


def test_thinking_that_may_not_end_is_refused(llm: LLM) -> None:
    allowed, end = llm.get_tokenizer().encode("no", add_special_tokens=False), "</think>"
    wish = StructuredOutputsParams(choice=["yes", "no"], thinking=(None, end))
    params = SamplingParams(max_tokens=4, allowed_token_ids=allowed, structured_outputs=wish)
    with pytest.raises(ValueError, match="allowed_token_ids is without '</think>'"):
        llm.generate("a", params, use_tqdm=False)


def test_a_text_that_would_end_in_its_thinking_goes_on_to_its_answer(llm: LLM) -> None:
    ids = {word: llm.get_tokenizer().token_to_id(word) or 0 for word in ("<|im_end|>", "</think>")}
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        logit_bias={ids["<|im_end|>"]: 100, ids["</think>"]: 90},
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"], thinking=(None, "</think>")),
        skip_special_tokens=False,
    )
    (output,) = llm.generate("<|im_start|>assistant\n<think>\n", params, use_tqdm=False)
    assert re.fullmatch(r"</think>(yes|no)(<\|im_end\|>)?", output.outputs[0].text), output.outputs[0].text


@pytest.mark.parametrize(
    "wish,words",
    [
        (StructuredOutputsParams(regex="[a"), "structured_outputs.regex cannot be compiled: .*Unclosed"),
        (StructuredOutputsParams(json={"type": "none"}), "json cannot be compiled: Unsupported type"),
        (StructuredOutputsParams(json='{"type":'), "json cannot be compiled"),
        (StructuredOutputsParams(grammar="root ::= other"), 'Rule "other" is not defined'),
        (StructuredOutputsParams(json={"$ref": "#"}), r"describes no text|Circular \$ref"),
        (StructuredOutputsParams(structural_tag="{}"), "structural_tag cannot be compiled"),
        (StructuredOutputsParams(choice=["a"], thinking=("<no>", "</no>")), "'<no>', which is no token"),
    ],
    ids=["regex", "type", "text", "rule", "empty", "tag", "thinking"],
)
def test_what_is_no_language_is_refused_before_anything_runs(
    llm: LLM, wish: StructuredOutputsParams, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(PROMPTS, SamplingParams(structured_outputs=wish))
    assert llm.llm_engine.outputs.num_requests == 0


def test_synthetic_acceptance_keeps_to_no_grammar() -> None:
    config = {
        "method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2,
    }  # fmt: skip
    with (
        LLM("sprout", **OPTIONS, speculative_config=config) as llm,
        pytest.raises(ValueError, match="structured_outputs means nothing"),
    ):
        llm.generate(PROMPTS[0], sampling("choice"), use_tqdm=False)


@pytest.mark.parametrize(
    "fields,words",
    [
        ({}, "has none, must have one of json, regex"),
        ({"regex": "a", "json_object": True}, "has regex and json_object"),
        ({"choice": []}, "choice is .*, must be a list of texts"),
        ({"choice": ["a", 1]}, "choice is .*, must be a list of texts"),
        ({"regex": 3}, "regex is 3, must be a regular expression"),
    ],
)
def test_one_language_is_said_and_said_rightly(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StructuredOutputsParams(**fields)
