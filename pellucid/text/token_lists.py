"""What a request lists of tokens, once it is known how this model spells them: not too many, and some left.

What contradicts itself only behind some text is the sampler's to find.
"""

from __future__ import annotations

from collections.abc import Collection

from pellucid.sampling_params import SamplingParams

BadWords = Collection[tuple[int, ...]]


def check_lists(
    sampling: SamplingParams, *, stop_token_ids: Collection[int], bad_words: BadWords, max_listed: int
) -> None:
    """Raise ValueError for more tokens than a request has memory for.

    stop_token_ids: all that end the text, the model's own among them.
    """
    sizes = {
        "logit_bias": len(sampling.logit_bias or ()),
        "bad_words": sum(map(len, bad_words)),
        "stop_token_ids": len(stop_token_ids) if sampling.min_tokens else 0,
    }
    for name, size in sizes.items():
        if size > max_listed:
            raise ValueError(
                f"{name} has {size:,} tokens, max_listed_tokens is {max_listed:,}; list fewer, say what may "
                "come with allowed_token_ids, which has no limit, or raise --max-listed-tokens"
            )


def check_leaves_a_token(
    sampling: SamplingParams, *, stop_token_ids: Collection[int], bad_words: BadWords, vocab_size: int
) -> None:
    """Raise ValueError if no token could be the first, for all are ruled out.

    stop_token_ids: all that end the text, the model's own among them.
    """
    forbidden = {
        f"min_tokens={sampling.min_tokens}": {*stop_token_ids} if sampling.min_tokens else set[int](),
        "bad_words": {word[0] for word in bad_words if len(word) == 1},
    }
    allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    none_of = set[int]().union(*forbidden.values())
    if len(allowed) > len(none_of) or any(token not in none_of for token in allowed):
        return
    names = " and ".join(name for name, ids in forbidden.items() if not ids.isdisjoint(allowed))
    which = "the vocabulary" if sampling.allowed_token_ids is None else f"allowed_token_ids={allowed!r:.60}"
    raise ValueError(
        f"no token could come first: {names} holds back all of {which}; allow another token, or leave "
        f"{'one of them' if ' and ' in names else names.partition('=')[0]} out"
    )
