"""A model fills in between prompt and suffix where its tokenizer has the tokens for that."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from pellucid.server.infill import infilled
from pellucid.text.tokenizer import Tokenizer
from tests.tiny import write_checkpoint


def tokenizer(folder: Path, *tokens: str) -> Tokenizer:
    path = str(write_checkpoint(folder) / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(path)
    library.add_special_tokens(list(tokens))
    library.save(path)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "tokens,prompt",
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>a {0}<|fim_suffix|>b<|fim_middle|>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>a {0}<｜fim▁hole｜>b<｜fim▁end｜>",
        ),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]b[PREFIX]a {0}"),
    ],
)
def test_the_prompt_is_of_the_models_form(tmp_path: Path, tokens: tuple[str, ...], prompt: str) -> None:
    assert infilled("a {0}", "b", tokenizer(tmp_path, *tokens)) == prompt


def test_others_say_that_they_cannot(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="suffix is not supported by this model"):
        infilled("a", "b", tokenizer(tmp_path, "[SUFFIX]"))
