"""A toy model whose tokens tell whether its paged KV was right.

A KV entry is a hash of what its layer received, a layer's output a hash of all entries it read back: a wrong
block, an alias or a missed compaction shows in the tokens.  `autoregression` is the truth: one token at a
time, without pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.sampling_params import SamplingParams
from pellucid.types import Request, TokenLogprobs

VOCAB = 96
MAX_LEN = 48  # tokens of a sequence
NUM_LAYERS = 4  # a pipeline stage has 1 to 4 of them
MASKED = VOCAB  # a draft that no target token equals
EOS = (0, 1, 2)
Windows = tuple[int | None, ...]  # tokens that a query of each layer sees; None: all
FULL: Windows = (None,) * NUM_LAYERS


def kv_entry(layer: int, hidden: int) -> int:
    return hash((layer, hidden))


def attend(layer: int, entries: list[int], window: int | None) -> int:
    """entries: of all tokens up to the query's, of which it sees as many as the window has."""
    seen = entries if window is None else entries[-window:]
    assert None not in seen, "nobody has written what is seen, or it has been given back"
    return hash((layer, tuple(seen)))


def grammar_bit(tokens: list[int]) -> int:
    """The toy grammar: all tokens so far decide the parity of the next one."""
    return hash(tuple(tokens)) >> 7 & 1


def draw(hidden: int, seed: int, position: int, bit: int | None, banned: frozenset[int]) -> int:
    """The token at `position`.  Its noise is a function of (seed, position) only (law 9)."""
    token = (hash((hidden, seed, position)) >> 5) % VOCAB
    while token in banned or (bit is not None and token & 1 != bit):
        token = (token + 1) % VOCAB
    return token


def logprob(hidden: int, token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [float(hash((hidden, token)) % 1009)], 1)


def banned_at(
    position: int, prompt_len: int, sampling: SamplingParams, stops: frozenset[int]
) -> frozenset[int]:
    return stops if position - prompt_len < sampling.min_tokens else frozenset()


@dataclass(frozen=True, slots=True)
class Truth:
    """What autoregression makes of a request."""

    tokens: list[int]  # prompt included
    beyond: list[int]  # the same, as if no stop token had ended it
    caches: list[list[int]]  # KV entries by layer, of every token
    logprobs: list[TokenLogprobs]  # of the generated tokens
    prompt_logprobs: list[TokenLogprobs]  # of prompt positions 1..
    stopped: bool  # by a stop token


def autoregression(request: Request, limit: int, windows: Windows = FULL) -> Truth:
    """windows: of each layer."""
    tokens, caches = list(request.prompt_token_ids), [[] for _ in range(NUM_LAYERS)]
    outputs: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_len, stops = len(tokens), request.stop_token_ids
    while True:
        for hidden in tokens[len(outputs) :]:
            for layer, (cache, window) in enumerate(zip(caches, windows, strict=True)):
                cache.append(kv_entry(layer, hidden))
                hidden = attend(layer, cache, window)
            outputs.append(hidden)
        if len(tokens) >= limit:
            break
        bit = grammar_bit(tokens) if request.grammar else None
        banned = banned_at(len(tokens), prompt_len, request.sampling, stops)
        tokens.append(draw(outputs[-1], request.seed, len(tokens), bit, banned))
        logprobs.append(logprob(outputs[-1], tokens[-1]))
    known = zip(outputs[: prompt_len - 1], tokens[1:prompt_len], strict=True)
    prompt_logprobs = [logprob(hidden, token) for hidden, token in known]
    end = next((i + 1 for i in range(prompt_len, len(tokens)) if tokens[i] in stops), len(tokens))
    caches, logprobs = [cache[:end] for cache in caches], logprobs[: end - prompt_len]
    return Truth(
        tokens[:end], tokens, caches, logprobs, prompt_logprobs, end > prompt_len and tokens[end - 1] in stops
    )
