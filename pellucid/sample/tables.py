"""Per-slot token lists of what only some requests bring, in memory that is there from the start.

A list has room for `max_listed` ids in every slot, and what is allowed is a bit a token, so what requests ask
for never takes more memory than was reserved, and none has to wait for another's.  They hold data; what it
means for the logits is in edits.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pellucid.transfer import upload


class Listed(enum.IntEnum):
    """What is listed for each slot, int32 an item; -1 where a list has ended."""

    STOP = 0  # ids that min_tokens holds back
    BIASED = 1  # ids of logit_bias
    BIAS = 2  # and what is added to the logit of each: the bits of a float32
    WORD = 3  # ids of all bad words, one word behind the other
    BACK = 4  # and of each the distance to its word's last one


Lists = Mapping[Listed, np.ndarray]  # a request's: [n] int32 each


class SlotLists:
    """Lists of `num_slots` slots: `data` is [num_slots, len(Listed), max_listed] int32."""

    def __init__(self, num_slots: int, max_listed: int, device: torch.device) -> None:
        self.data = torch.zeros((num_slots, len(Listed), max_listed), dtype=torch.int32, device=device)
        self._lens = np.zeros((num_slots, len(Listed)), np.int64)

    def are_there(self, slots: Sequence[int]) -> list[bool]:
        """Which of these slots have any."""
        longest: list[int] = self._lens[slots].max(1).tolist()
        return [length > 0 for length in longest]

    def write(self, slot: int, lists: Lists) -> None:
        """Replace the slot's lists, each at most max_listed long."""
        self._lens[slot] = 0
        for kind, items in lists.items():
            self._lens[slot, kind] = len(items)
        longest = int(self._lens[slot].max())
        rows = np.full((len(Listed), longest), -1, np.int32)
        for kind, items in lists.items():
            rows[kind, : len(items)] = items
        self.data[slot].fill_(-1)
        self.data[slot, :, :longest] = upload(rows, self.data.device)

    def longest(self, slots: np.ndarray) -> dict[Listed, int]:
        """Of each kind the length of the longest list in these slots."""
        return dict(zip(Listed, self._lens[slots].max(0).tolist(), strict=True))

    def take(self, kind: Listed, slots: Tensor, length: int) -> Tensor:
        """[R, length] int32 of slots [R]: their lists, as far as the longest of them goes."""
        return self.data[:, kind, :length][slots]


def word_lists(words: Sequence[Sequence[int]]) -> dict[Listed, np.ndarray]:
    """Bad words, none of them empty, as WORD and BACK."""
    backs = [np.arange(len(word) - 1, -1, -1, dtype=np.int32) for word in words]
    ids = [token for word in words for token in word]
    return {Listed.WORD: np.array(ids, np.int32), Listed.BACK: np.concatenate(backs)}


def bias_lists(biases: Mapping[int, float]) -> dict[Listed, np.ndarray]:
    """logit_bias as BIASED and BIAS."""
    values = np.fromiter(biases.values(), np.float32, len(biases))
    return {
        Listed.BIASED: np.fromiter(biases.keys(), np.int32, len(biases)),
        Listed.BIAS: values.view(np.int32),
    }


def token_bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[ceil(V / 32)] int32: bit t % 32 of word t // 32 says whether token t is among them."""
    are_listed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    are_listed[np.asarray(token_ids, np.int64)] = True
    return np.packbits(are_listed, bitorder="little").view(np.int32)
