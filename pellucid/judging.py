"""How near two texts are, as a model says that was trained to answer yes or no (Qwen3-Reranker).

Both texts are one prompt, and the score is the chance of the one answer against the other.  Each answer is
asked for by itself, as the only token that is allowed; its log-probability is the one among all tokens.  The
second question finds the prompt in the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pellucid.sampling_params import SamplingParams
from pellucid.text.prompts import Prompt, TokenPrompt
from pellucid.text.tokenizer import Tokenizer
from pellucid.types import RequestOutput


def joined(first: Sequence[TokenPrompt], second: Sequence[TokenPrompt]) -> list[Prompt]:
    """Pairs as one prompt each; a lone first one goes with every second."""
    left = [*first] * (len(second) // len(first))
    return [{"prompt_token_ids": [*a.token_ids, *b.token_ids]} for a, b in zip(left, second, strict=True)]


def judgements(words: Sequence[str], tokenizer: Tokenizer) -> list[SamplingParams]:
    """What is asked behind a prompt for each of two words, such as "no" and "yes".

    Raises ValueError for words that are not two, or not a token each.
    """
    if isinstance(words, str) or len(words) != 2:  # noqa: PLR2004 against and for
        raise ValueError(f"classifier_from_token is {words!r}, must be two words, as ['no', 'yes']")
    return [asked(token_of(word, tokenizer)) for word in words]


def token_of(word: str, tokenizer: Tokenizer) -> int:
    """The one token that a word is.  Raises ValueError if it is several."""
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} in classifier_from_token is {len(ids)} tokens of this model, must be one")
    return ids[0]


def asked(token: int) -> SamplingParams:
    """How likely is this token next?"""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=[token],
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )


def chance(against: RequestOutput, for_it: RequestOutput) -> float:
    """Of the second answer, if it is one of both."""
    return 1 / (1 + math.exp(logprob_of(against) - logprob_of(for_it)))


def logprob_of(output: RequestOutput) -> float:
    """Of the one token of an answer."""
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id} has failed: {output.error}")
    (answer,) = output.outputs
    assert answer.logprobs is not None, "they were asked for"
    return answer.logprobs[0][answer.token_ids[0]].logprob
