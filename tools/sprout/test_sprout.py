"""What the training code promises: templates agree, the hold-out holds, exports load in transformers.

Run with `pytest tools/sprout`; needs transformers and the exported model, and no GPU.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "pellucid" / "assets"
sys.path.insert(0, str(HERE))

import data  # noqa: E402
import heldout  # noqa: E402
from chat import Item, assistant, document, held_out, prompt_text, tool_call_text, user  # noqa: E402
from data import ID_MASK, LEARN, START, Shards  # noqa: E402
from evaluate import is_right, read_problems, token_logits  # noqa: E402
from export import load  # noqa: E402
from generate import generate  # noqa: E402

transformers = pytest.importorskip("transformers")

MODELS = ("sprout", "sprout-draft")


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(ASSETS / "sprout")


@pytest.mark.parametrize("thinking", [True, False])
def test_the_fast_renderer_writes_what_the_template_writes(tokenizer, thinking):
    for problem in read_problems(ASSETS / "sprout" / "eval")[::40]:
        rendered = tokenizer.apply_chat_template(
            problem.messages,
            tools=problem.tools or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        assert rendered == prompt_text(problem.messages, problem.tools, thinking=thinking), problem.id


def test_the_template_writes_tool_calls_as_the_model_learned_them(tokenizer):
    arguments = {"city": "München", "days": 2}
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    served = {"role": "tool", "content": '{"temperature": 3}'}
    asked = user("What's the weather in München?")
    structured = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, served, served]
    flat = [asked, assistant(tool_call_text("get_weather", arguments)), served, served]
    rendered = tokenizer.apply_chat_template(structured, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt_text(flat, thinking=True)


def test_the_template_drops_the_thinking_of_earlier_turns(tokenizer):
    turns = [user("1+1=?"), assistant("<think>\n1+1=2\n</think>\n\n2"), user("thanks")]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt_text([turns[0], assistant("2"), turns[2]], thinking=True)


def test_the_tokenizer_has_4096_tokens_splits_digits_and_loses_nothing(tokenizer):
    assert len(tokenizer) == 4096
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == ["1", "2", "3", "4"]
    for text in ("Größe: 你好，世界 🌱\r\n\ttab", "é", "x = {'a': [1, 2.5]}\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_never_sees_a_held_out_problem():
    rng = Random(5)
    drawn: list[Item] = []
    for make in heldout.makers().values():
        drawn += [data.training_item(rng, make) for _ in range(100)]
    assert not any(held_out(problem) for item in drawn for problem in item.problems)


def test_every_held_out_item_is_held_out_and_its_own_answer_scores():
    rng = Random(6)
    for task, make in heldout.makers().items():
        for _ in range(200):
            item = make(rng)
            for thinking in (True, False):
                output = document(item, thinking=thinking).completion.removesuffix("<|im_end|>")
                assert is_right(item.kind, item.answer, output), task


def test_a_wrong_answer_does_not_score():
    assert not is_right("exact", "12", "<think>\n12\n</think>\n\n13")
    assert not is_right("json", {"a": 1}, '{"a": 2}')
    assert not is_right("json", {"a": 1}, '{"a": 1')
    assert not is_right("tool_call", {"name": "f", "arguments": {}}, tool_call_text("g", {}))


def test_shards_are_the_same_again_and_every_batch_begins_a_document():
    shards = Shards(ASSETS / "sprout" / "tokenizer.json", seed=3, num_shards=4, batches=2, batch_tokens=4096)
    first, again = shards.make(1), shards.make(1)
    assert (first == again).all()
    assert first.shape == (2, 4096)
    assert (first[:, 0] & START).all()
    assert 0.1 < ((first & LEARN) > 0).mean() < 0.8
    assert (first & ID_MASK).max() < 4096


def test_sources_keep_their_shares_of_the_text():
    sizes = [len(d.prompt) + len(d.completion) for d in islice(data.documents(Random(1), 0.5), 500)]
    assert len(sizes) == 500
    assert abs(sum(source.share for source in data.SOURCES) - 1) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(name):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32)
    ours = load(ASSETS / name, torch.device("cpu")).float()
    ids = torch.randint(0, 4000, (90,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = theirs(ids[None]).logits[0]
    torch.testing.assert_close(token_logits(ours, ids, torch.float32), wanted, rtol=1e-3, atol=1e-3)


def test_cached_generation_follows_the_uncached_argmax():
    model = load(ASSETS / "sprout", torch.device("cpu"))
    prompts = [[5, 9, 300, 42, 7], list(range(100, 117))]
    outputs = generate(model, prompts, [6, 6], stops=set(), device=torch.device("cpu"))
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = token_logits(model, torch.tensor(prompt + output))[len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        # bfloat16 may break near-ties either way.
        assert (logits.max(-1).values - chosen).max() < 0.15


@pytest.mark.parametrize("name", MODELS)
def test_the_checkpoint_is_a_small_plain_qwen3(name):
    config = json.loads((ASSETS / name / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (ASSETS / name / "model.safetensors").stat().st_size <= 15 * 2**20
