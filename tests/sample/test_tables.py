"""What requests ask for takes the memory that was reserved at start, whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.sample import edits, sampler
from pellucid.sample.state import SamplingState
from pellucid.sampling_params import SamplingParams
from tests.sample.conftest import make

V, MAX_LISTED, NUM_SLOTS = 300, 128, 9


def tensors_of(state: SamplingState) -> dict[str, tuple[int, int]]:
    """Of all tensors, theirs and their parts', where they are and how many bytes they have."""
    owners = {"": state, "lists.": state.lists}
    return {
        prefix + name: (value.data_ptr(), value.untyped_storage().nbytes())
        for prefix, owner in owners.items()
        for name, value in vars(owner).items()
        if isinstance(value, Tensor)
    }


def hostile() -> Iterator[tuple[SamplingParams, list[list[int]], list[int]]]:
    """Parameters, bad words and stop tokens of requests that ask for as much as they may."""
    plain = SamplingParams()
    yield plain, [[i % V] * (MAX_LISTED // 64) for i in range(64)], []
    yield plain, [[7] * MAX_LISTED], []
    yield plain, [[i] for i in range(MAX_LISTED)], []
    yield SamplingParams(logit_bias=dict.fromkeys(range(MAX_LISTED), -1.0)), [], []
    yield SamplingParams(allowed_token_ids=list(range(V))), [], []
    yield SamplingParams(min_tokens=3), [], list(range(MAX_LISTED))
    yield SamplingParams(logit_bias={5: 1.0}, allowed_token_ids=[5], min_tokens=1), [[1, 2]], [4]


def test_tables_take_the_bytes_that_were_there_at_the_start(stage) -> None:
    world = stage(V, NUM_SLOTS)
    world.state = state = SamplingState(NUM_SLOTS, V, max_listed=MAX_LISTED)
    reserved = tensors_of(state)
    assert sum(size for _, size in reserved.values()) < NUM_SLOTS * (20 * MAX_LISTED + V // 8 + 200) + 16 * V
    for _ in range(3):
        for params, words, stop in hostile():
            for slot in range(NUM_SLOTS):
                world.admit(slot, params, bad_words=words, stop=stop)
            world.draw(torch.zeros(NUM_SLOTS, V), range(NUM_SLOTS), [1] * NUM_SLOTS)
    assert tensors_of(state) == reserved


@pytest.mark.parametrize(
    ("params", "words", "stop"),
    [
        (SamplingParams(), [[1] * (MAX_LISTED + 1)], []),
        (SamplingParams(), [[1, 2]] * MAX_LISTED, []),
        (SamplingParams(logit_bias=dict.fromkeys(range(MAX_LISTED + 1), 1.0)), [], []),
        (SamplingParams(min_tokens=1), [], list(range(MAX_LISTED + 1))),
        (SamplingParams(), [[1, V]], []),
        (SamplingParams(logit_bias={V: 1.0}), [], []),
        (SamplingParams(allowed_token_ids=[3, V]), [], []),
        (SamplingParams(min_tokens=1), [], [V]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_has_changed(params, words, stop) -> None:
    state = SamplingState(2, V, max_listed=MAX_LISTED)
    state.admit([state.prepare(make(0, SamplingParams(logit_bias={3: 1.0}), bad_words=[[4, 5]]))])
    before = [state.table.clone(), state.lists.data.clone(), state.allowed.clone(), state.traits.copy()]
    with pytest.raises(ValueError, match=f"max_listed_tokens is {MAX_LISTED}|token id {V}, the vocabulary"):
        state.prepare(make(0, params, bad_words=words, stop=stop))
    after = [state.table, state.lists.data, state.allowed, state.traits]
    assert all((was == now).all() for was, now in zip(before, after, strict=True))


class Sizes(TorchDispatchMode):
    """Notes how many elements the largest tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        old = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in old:
                self.most = max(self.most, each.numel())
        return made


def test_edits_of_many_rows_with_long_texts_take_a_bounded_number_of_elements_at_once(
    stage, monkeypatch
) -> None:
    num_rows, max_len, most = 40, 5000, 5000
    world = stage(V, num_rows, max_len)
    params = SamplingParams(
        seed=1, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={4: 2.0},
        allowed_token_ids=list(range(200)), min_tokens=3,
    )  # fmt: skip
    for slot in range(num_rows):
        world.admit(slot, params, prompt=[slot] * 4000, output=[slot, 3], bad_words=[[3, 9], [9]], stop=[7])
    world.token_ids.clamp_(max=V - 1)
    logits = torch.randn(num_rows, V)

    def draw() -> tuple[list[int], int]:
        with Sizes() as sizes:
            tokens = world.draw(logits, range(num_rows), [4002] * num_rows).tokens.tolist()
        return tokens, sizes.most

    whole, most_of_whole = draw()
    monkeypatch.setattr(sampler, "_SLICE_ELEMENTS", most)
    for module in (sampler, edits):
        monkeypatch.setattr(module, "MOST_POSITIONS", 1000)
    world.state.max_listed = 500
    parts, most_of_parts = draw()
    assert parts == whole
    # The logits themselves and their draw are of all rows at once, texts and their counts of none but a few.
    assert most_of_parts <= 2 * num_rows * (V + 64) < num_rows * max_len <= most_of_whole
