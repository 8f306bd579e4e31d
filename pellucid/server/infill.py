"""A prompt and a suffix, for models that fill in what is between: by the tokens they were trained with."""

from __future__ import annotations

from pellucid.text.tokenizer import Tokenizer

# The tokens before the prefix, before the suffix and before what is between, in the order that models expect.
FORMS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",  # GLM
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # Code Llama
)


def infilled(prefix: str, suffix: str, tokenizer: Tokenizer) -> str:
    """The prompt for what comes between the two.  Raises ValueError for a model that has no such tokens."""
    for form in FORMS:
        marks = form.replace("{prefix}", "\0").replace("{suffix}", "\0").split("\0")
        if all(tokenizer.token_to_id(mark) is not None for mark in marks if mark):
            return form.format(prefix=prefix, suffix=suffix)
    raise ValueError(
        "suffix is not supported by this model, whose tokenizer has no tokens to fill in with; leave it out"
    )
