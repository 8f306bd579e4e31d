"""Tokenizers out of GGUF's keys encode and decode as those they came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from pellucid.models.checkpoint import ASSETS
from pellucid.weights.gguf_tokenizer import DIGITS, GPT2, WORDS, GgufTokenizer

SPROUT = ASSETS / "sprout"
DATA = json.loads((Path(__file__).parent / "data" / "sentencepiece.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
TEXTS = [
    "Hello, world! 12345",
    " leading and  double   spaces\n\n\nlines\r\n\ttabs ",
    "<|im_start|>user\nhi<|im_end|>\n<think></think><tool_call>{}</tool_call>",
    "don't WE'RE naïve café 你好 🙂🙃",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # done",
    "a" * 100,
    "",
]


def keys(**more: object) -> dict[str, object]:
    return {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def load(found: GgufTokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer))


def sprout() -> dict[str, object]:
    """Sprout's tokenizer.json as llama.cpp's converter writes it."""
    content = json.loads((SPROUT / "tokenizer.json").read_text(encoding="utf-8"))
    added = content["added_tokens"]
    types = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in added}
    ids = {**content["model"]["vocab"], **{token["content"]: token["id"] for token in added}}
    tokens = sorted(ids, key=lambda token: ids[token])
    template = json.loads((SPROUT / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    return {
        "tokenizer.chat_template": template,
        **keys(
            model="gpt2",
            pre="qwen2",
            tokens=tokens,
            token_type=[types.get(i, NORMAL) for i in range(len(tokens))],
            merges=[" ".join(merge) for merge in content["model"]["merges"]],
            eos_token_id=4089,
            padding_token_id=4087,
            add_bos_token=False,
        ),
    }


def test_bytes_are_paired_as_in_the_original() -> None:
    found = GgufTokenizer.read(sprout())
    ours, original = load(found), tokenizers.Tokenizer.from_file(str(SPROUT / "tokenizer.json"))
    lines = [*TEXTS, *(SPROUT / "eval" / "tool_call.jsonl").read_text(encoding="utf-8").splitlines()[:50]]
    for text in lines:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids
        for skip in (True, False):
            decoded = original.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == decoded
    assert ours.get_vocab() == original.get_vocab()


def test_the_config_names_tokens_and_templates() -> None:
    metadata = sprout()
    config = GgufTokenizer.read(metadata).config
    assert config == {
        "add_bos_token": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": metadata["tokenizer.chat_template"],
    }
    both = GgufTokenizer.read({**metadata, "tokenizer.chat_template.tool_use": "{{ tools }}"}).config
    assert both["chat_template"] == [
        {"name": "default", "template": metadata["tokenizer.chat_template"]},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def sentencepiece(name: str, **more: object) -> dict[str, object]:
    data = DATA[name]
    return keys(
        model="llama",
        tokens=data["tokens"],
        scores=data["scores"],
        token_type=data["types"],
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=name == "with_prefix",
        **more,
    )


@pytest.mark.parametrize("name", DATA)
def test_sentences_are_cut_as_sentencepiece_cuts_them(name: str) -> None:
    tokenizer = load(GgufTokenizer.read(sentencepiece(name)))
    for text, ids, decoded in zip(*(DATA[name][key] for key in ("texts", "ids", "decoded")), strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == decoded


def test_scores_tell_the_order_of_merges_and_numbers_do_not() -> None:
    data = DATA["without"]
    fixed = 3  # unknown, begin and end
    order = [*range(fixed), *reversed(range(fixed, len(data["tokens"])))]
    new = {old: i for i, old in enumerate(order)}
    metadata = sentencepiece("without")
    for key in ("tokens", "scores", "token_type"):
        values = metadata[f"tokenizer.ggml.{key}"]
        assert isinstance(values, list)
        metadata[f"tokenizer.ggml.{key}"] = [values[old] for old in order]
    tokenizer = load(GgufTokenizer.read(metadata))
    for text, ids in zip(data["texts"], data["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [new[i] for i in ids]


def test_what_stands_around_a_text() -> None:
    def ids(metadata: dict[str, object]) -> list[int]:
        return load(GgufTokenizer.read(metadata)).encode("a").ids

    bare = DATA["with_prefix"]["ids"][DATA["with_prefix"]["texts"].index("a")]
    assert ids(sentencepiece("with_prefix")) == [1, *bare]
    assert ids(sentencepiece("with_prefix", add_bos_token=False)) == bare
    assert ids(sentencepiece("with_prefix", add_eos_token=True)) == [1, *bare, 2]
    config = GgufTokenizer.read(sentencepiece("with_prefix")).config
    assert config == {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def pieces(pre: str, text: str) -> list[str]:
    split = tokenizers.pre_tokenizers.Split
    cut = [split(tokenizers.Regex(pattern), "isolated") for pattern in WORDS[pre].patterns]
    sequence = tokenizers.pre_tokenizers.Sequence(cut)
    return [piece for piece, _ in sequence.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", WORDS)
def test_every_name_cuts_and_loses_nothing(pre: str) -> None:
    for text in TEXTS:
        assert "".join(pieces(pre, text)) == text


@pytest.mark.parametrize(
    "pre,words",
    [
        ("gpt-2", ["It", "'s", " 12345", " XDON", "'", "T", "/", "a", "\n\n ", " end"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " XDON", "'T", "/a", "\n\n", " ", " end"]),
        ("qwen2", ["It", "'s", " ", *"12345", " XDON", "'T", "/a", "\n\n", " ", " end"]),
        ("gpt-4o", ["It's", " ", "123", "45", " XDON'T", "/a", "\n\n", " ", " end"]),
        ("tekken", ["It", "'s", " ", *"12345", " XDON", "'T", "/a", "\n\n", " ", " end"]),
        ("starcoder", ["It", "'s", " ", *"12345", " XDON", "'", "T", "/", "a", "\n\n ", " end"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "45", " XDON", "'T", "/a", "\n\n", " ", " end"]),
    ],
)
def test_words_by_name(pre: str, words: list[str]) -> None:
    text = "It's 12345 XDON'T/a\n\n  end"
    assert pieces(pre, text) == words


def test_words_that_are_tokens_stay_whole() -> None:
    content = sprout()
    found = GgufTokenizer.read({**content, **keys(pre="llama-bpe")}).tokenizer
    assert found["model"]["ignore_merges"] is True  # type: ignore[index]
    assert GgufTokenizer.read(content).tokenizer["model"]["ignore_merges"] is False  # type: ignore[index]
    assert WORDS["smollm"].patterns == (DIGITS, GPT2)


def test_what_is_not_known_is_refused_by_name() -> None:
    content = sprout()
    cases = [
        (keys(model="bert"), "tokenizer.ggml.model in the GGUF file is 'bert', and gpt2 and llama are read"),
        (keys(pre="klingon"), "tokenizer.ggml.pre in the GGUF file is 'klingon', which is not known"),
        (keys(token_type=[1, 2]), "tokenizer.ggml.token_type .* must be as long as tokens, 4,096"),
        (keys(tokens="abc"), "tokenizer.ggml.tokens .* must be a list"),
        (keys(model="llama", scores=[1.0]), "scores in the GGUF file has 1 numbers for 4,096 tokens"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            GgufTokenizer.read({**content, **change})
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model .* None, must be a text; name a folder"):
        GgufTokenizer.read({})
