"""What the sampler knows of every slot: written once when a request is admitted, gathered by index each step.

The numbers lie in one device table, so an admission is one copy and a step one gather.  Which features a slot
uses is kept on the host beside it, so that a step can skip what nobody asked for without asking the device.
Legend: S logits, R rows of a part, V vocab.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pellucid.kernels.sample import BLOCK_TOKENS
from pellucid.sample.branches import IN_ORDER, Branches
from pellucid.sample.noise import token_codes
from pellucid.sample.tables import BiasPool, SlotTable, pad
from pellucid.schedule.plan import Admission
from pellucid.transfer import upload
from pellucid.types import SamplingParams

# vLLM's bound: colder than this is greedy.
_GREEDY_BELOW = 1e-5
# Hotter is uniform already, and noise times temperature must stay finite in float32.
_HOTTEST = 1e30


class Feature(enum.IntFlag):
    """What a slot asks of the sampler beyond argmax.  At most one of the last four is set."""

    NONE = 0
    RANDOM = 1  # temperature above 0
    LOGPROBS = 2
    BIAS = 4  # logit_bias or allowed_token_ids
    BAD_WORDS = 8
    MIN_TOKENS = 16
    PENALTY = 32
    MIN_P = 64  # and neither top_k nor top_p
    TOP_NARROW = 128  # top_k up to 64, whatever top_p and min_p
    TOP_WIDE = 256  # top_k up to 1,024
    TOP_ANY = 512  # a larger top_k, or top_p alone


READ_TEXT = Feature.BAD_WORDS | Feature.PENALTY  # what looks at the tokens before the one to be drawn
# How many of the most likely logits each filter ranks; the whole vocabulary for what is not listed.
FILTER_WIDTHS = {Feature.MIN_P: 1, Feature.TOP_NARROW: 64, Feature.TOP_WIDE: 1024}

_BY_ROW = [feature for feature in Feature if feature not in (Feature.NONE, Feature.RANDOM)]


class Column(enum.IntEnum):
    """Columns of the device table; 8 bytes each, an int64 or a float64."""

    SEED = 0
    PROMPT_LEN = 1
    MIN_TOKENS = 2
    TOP_K = 3  # 0 keeps all
    BIAS_ROW = 4  # in the bias pool
    TEMPERATURE = 5
    TOP_P = 6
    LOG_MIN_P = 7  # -inf keeps all
    PRESENCE = 8
    FREQUENCY = 9
    REPETITION = 10


@dataclass(frozen=True, slots=True)
class SlotParams:
    """The gathered parameters of some logits, as columns.  `table`: [R, len(Column)] int64."""

    table: Tensor

    def ints(self, column: Column) -> Tensor:
        """[R] int64."""
        return self.table[:, column]

    def floats(self, column: Column) -> Tensor:
        """[R] float32."""
        return self.table.view(torch.float64)[:, column].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsBatch:
    """Whose logits a step samples from.  Made by `SamplingState.batch`."""

    slots: Tensor  # [S] int64, device
    positions: Tensor  # [S] int64, device: of the token to be drawn; those before it are known
    features: Feature = Feature.NONE  # of any row
    max_logprobs: int = -1  # most that any row wants; -1 if no row wants logprobs
    rows: Mapping[Feature, Tensor] = field(default_factory=dict)  # [R] int64, device: the rows with a feature
    branches: Branches = IN_ORDER  # to the tokens before each


class SamplingState:
    """Sampling parameters of `num_slots` slots (count the spare one for padding) over `vocab_size` tokens."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.features = np.zeros(num_slots, np.int32)  # host
        self.num_logprobs = np.full(num_slots, -1, np.int32)  # host; -1 is not asked for
        self._plain: tuple[np.ndarray, bool] | None = None  # what `is_plain` last said, until an admission
        self.table = torch.zeros((num_slots, len(Column)), dtype=torch.int64, device=self.device)
        self.codes = token_codes(vocab_size, self.device)
        self.block_codes = self.codes[::BLOCK_TOKENS].contiguous()  # of each block's first token
        self.bias = BiasPool(vocab_size, self.device)
        self.stop_ids = SlotTable(num_slots, 1, self.device)  # what min_tokens holds back
        self.bad_prefixes = SlotTable(num_slots, 2, self.device)  # per word: all but its last, newest first
        self.bad_lasts = SlotTable(num_slots, 1, self.device)  # per word: its last token

    def admit(self, admissions: list[Admission]) -> None:
        """Write the parameters of newly admitted requests into their slots; at most one a slot."""
        if not admissions:
            return
        self._plain = None
        packed = np.zeros((len(admissions), 1 + len(Column)), np.int64)
        packed[:, 0] = [a.slot for a in admissions]
        for admission, ints in zip(admissions, packed[:, 1:], strict=True):
            self._write_numbers(admission, ints)
            ints[Column.BIAS_ROW] = self._write_lists(admission)
            self.features[admission.slot] = features_of(admission, self.vocab_size)
            logprobs = admission.sampling.logprobs
            self.num_logprobs[admission.slot] = -1 if logprobs is None else logprobs
        device = upload(packed, self.device)
        self.table.index_copy_(0, device[:, 0], device[:, 1:])

    def batch(
        self, host_slots: np.ndarray, slots: Tensor, positions: Tensor, branches: Branches = IN_ORDER
    ) -> LogitsBatch:
        """Describe S logits: their slots (on the host and on the device) and the positions to be drawn.

        host_slots: [S] integers.  slots, positions: [S] int64 on the device.  One small copy to the device,
        and only if a row asks for more than temperature.
        """
        features = self.features[host_slots]
        union = _union(features)
        wanted = [feature for feature in _BY_ROW if feature & union]
        if not wanted:
            return LogitsBatch(slots=slots, positions=positions, features=union)
        hosts = [np.flatnonzero(features & feature) for feature in wanted]
        parts = upload(np.concatenate(hosts), self.device).split([len(rows) for rows in hosts])
        return LogitsBatch(
            slots=slots,
            positions=positions,
            features=union,
            max_logprobs=int(self.num_logprobs[host_slots].max()),
            rows=dict(zip(wanted, parts, strict=True)),
            branches=branches,
        )

    def is_plain(self, host_slots: np.ndarray) -> bool:
        """Does none of these slots ask for more than a temperature?  The array must not change afterwards."""
        if self._plain is None or self._plain[0] is not host_slots:
            self._plain = host_slots, not _union(self.features[host_slots]) & ~Feature.RANDOM
        return self._plain[1]

    def params(self, slots: Tensor) -> SlotParams:
        """Gather the parameters of `slots` [R]."""
        return SlotParams(self.table[slots])

    def _write_numbers(self, admission: Admission, ints: np.ndarray) -> None:
        sampling, floats = admission.sampling, ints.view(np.float64)
        ints[Column.SEED] = admission.seed
        ints[Column.PROMPT_LEN] = admission.prompt_len
        ints[Column.MIN_TOKENS] = sampling.min_tokens
        ints[Column.TOP_K] = _top_k(sampling, self.vocab_size)
        floats[Column.TEMPERATURE] = 0.0 if _is_greedy(sampling) else min(sampling.temperature, _HOTTEST)
        floats[Column.TOP_P] = sampling.top_p
        floats[Column.LOG_MIN_P] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        floats[Column.PRESENCE] = sampling.presence_penalty
        floats[Column.FREQUENCY] = sampling.frequency_penalty
        floats[Column.REPETITION] = sampling.repetition_penalty

    def _write_lists(self, admission: Admission) -> int:
        """Write what the request brings of token lists; return its row in the bias pool, 0 if it has none."""
        slot, sampling = admission.slot, admission.sampling
        if sampling.min_tokens and admission.stop_token_ids:
            self.stop_ids.write(slot, np.array(admission.stop_token_ids))
        if words := admission.bad_words_token_ids:
            self.bad_prefixes.write(slot, pad([word[-2::-1] for word in words]))
            self.bad_lasts.write(slot, np.array([word[-1] for word in words]))
        if sampling.logit_bias or sampling.allowed_token_ids is not None:
            return self.bias.write(slot, sampling.logit_bias or {}, sampling.allowed_token_ids)
        self.bias.release(slot)
        return 0


def _union(features: np.ndarray) -> Feature:
    return Feature(int(np.bitwise_or.reduce(features, initial=0)))


def features_of(admission: Admission, vocab_size: int) -> Feature:
    """What the sampler must do for this request, of its own parameters alone."""
    sampling = admission.sampling
    asked = (
        (Feature.LOGPROBS, sampling.logprobs is not None),
        (Feature.BIAS, bool(sampling.logit_bias) or sampling.allowed_token_ids is not None),
        (Feature.BAD_WORDS, bool(admission.bad_words_token_ids)),
        (Feature.MIN_TOKENS, sampling.min_tokens > 0 and bool(admission.stop_token_ids)),
        (Feature.PENALTY, _has_penalty(sampling)),
    )
    features = Feature.NONE
    for feature, is_asked in asked:
        if is_asked:
            features |= feature
    # The most likely token always passes a filter, so a greedy request needs none.
    return features if _is_greedy(sampling) else features | Feature.RANDOM | _filter_of(sampling, vocab_size)


def _filter_of(sampling: SamplingParams, vocab_size: int) -> Feature:
    top_k = _top_k(sampling, vocab_size)
    if not top_k and sampling.top_p == 1:
        return Feature.MIN_P if sampling.min_p > 0 else Feature.NONE
    for feature in (Feature.TOP_NARROW, Feature.TOP_WIDE):
        if 0 < top_k <= FILTER_WIDTHS[feature]:
            return feature
    return Feature.TOP_ANY


def _top_k(sampling: SamplingParams, vocab_size: int) -> int:
    return sampling.top_k if sampling.top_k < vocab_size else 0


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _GREEDY_BELOW


def _has_penalty(sampling: SamplingParams) -> bool:
    added = (sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.repetition_penalty != 1 or any(added)
