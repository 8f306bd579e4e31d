"""Small tokenizers of each family, trained here, so that no test needs a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pellucid.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The capital of France is Paris, and the answer to everything is forty two.",
    "hello world, hello there; the cat sat on the mat and the dog ran to the park",
    "Schöne Grüße aus Köln! Ça va? naïve façade",
    "你好，世界。今天天气很好。",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))",
]


def save(folder: Path, tokenizer: tokenizers.Tokenizer, config: Mapping[str, object] | None = None) -> Path:
    """Write a tokenizer as checkpoints have it; `config` adds to (or replaces in) tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **(config or {})}))
    return folder


def train_byte_level() -> tokenizers.Tokenizer:
    """Like GPT-2, Qwen and Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])  # a space is not in the byte alphabet
    return tokenizer


def train_byte_fallback(*, strip: bool = True) -> tokenizers.Tokenizer:
    """Like Llama 2 and Mistral (with strip) and Gemma (without)."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("\u2581")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    raw_bytes = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL_TOKENS, *raw_bytes], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(CORPUS[:3], trainer)  # Chinese must be spelt in bytes
    spec = json.loads(tokenizer.to_str())
    # The trainer made the bytes special; in checkpoints they are plain pieces.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in SPECIAL_TOKENS]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def train_metaspace() -> tokenizers.Tokenizer:
    """Like T5: Unigram, and the decoder that is called Metaspace."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def train_word_piece() -> tokenizers.Tokenizer:
    """Like BERT: its decoder is of neither family that spells bytes."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_bos(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Add the post-processor that puts <s> before every text, as Llama's tokenizer.json has it."""
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def train_wrapped_byte_level() -> tokenizers.Tokenizer:
    """Byte-level, but with a decoder that we do not recognize as such."""
    tokenizer = train_byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


FAMILIES = {
    "byte_level": train_byte_level,
    "byte_fallback": train_byte_fallback,
    "gemma": lambda: train_byte_fallback(strip=False),
    "metaspace": train_metaspace,
    "word_piece": train_word_piece,
    "wrapped": train_wrapped_byte_level,
}


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One loaded tokenizer of each family, by name."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer.load(save(root / name, train())) for name, train in FAMILIES.items()}


@pytest.fixture(scope="session")
def byte_level(family: dict[str, Tokenizer]) -> Tokenizer:
    return family["byte_level"]


@pytest.fixture(scope="session")
def byte_fallback(family: dict[str, Tokenizer]) -> Tokenizer:
    return family["byte_fallback"]
