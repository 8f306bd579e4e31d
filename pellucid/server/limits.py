"""How much one request may ask for, where `SamplingParams` itself would let more pass."""

from __future__ import annotations

import msgspec

from pellucid.sampling_params import SamplingParams
from pellucid.server.options import ServeOptions

MOST_CHARACTERS = 1000  # of a stop string and of a bad word, which is tokenized while all others wait


MOST_BYTES = 2**20  # of a field that no prompt is made of


def check_limits(sampling: SamplingParams, options: ServeOptions) -> None:
    """Raise ValueError, naming the field, the limit and the way out."""
    _at_most("n", sampling.n, options.max_n, "--max-n")
    _at_most("logprobs", sampling.logprobs, options.max_logprobs, "--max-logprobs")
    _at_most("prompt_logprobs", sampling.prompt_logprobs, options.max_logprobs, "--max-logprobs")
    for name in ("stop", "bad_words"):
        texts = getattr(sampling, name) or ()
        _at_most(name, len(texts), options.max_stop_strings, "--max-stop-strings")
        if texts and (longest := max(map(len, texts))) > MOST_CHARACTERS:
            raise ValueError(
                f"{name} has a text of {longest:,} characters, at most {MOST_CHARACTERS:,} are taken"
            )


def check_small(**fields: object) -> None:
    """Raise ValueError for a field, none of the prompt's, that is so large that it holds up the server.

    What only the prompt is made of is read in another process.
    """
    for name, value in fields.items():
        if value is not None and (size := len(msgspec.json.encode(value))) > MOST_BYTES:
            raise ValueError(f"{name} has {size:,} bytes as JSON, at most {MOST_BYTES:,} are taken")


def _at_most(name: str, value: int | None, limit: int, flag: str) -> None:
    if value is not None and value > limit:
        raise ValueError(f"{name} asks for {value:,}, this server allows {limit:,} ({flag})")


def most_tokens(wish: int | None, options: ServeOptions) -> int | None:
    """max_tokens within what the server allows; None is up to the context."""
    if options.max_output_tokens is None:
        return wish
    return options.max_output_tokens if wish is None else min(wish, options.max_output_tokens)
