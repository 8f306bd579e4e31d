"""What the sampler knows of every slot: written once when a request is admitted, gathered by index each step.

The numbers lie in one device table, so an admission is one copy and a step one gather.  Which traits a slot
uses is kept on the host beside it, so that a step can skip what nobody asked for without asking the device.
An admission has two halves: `prepare` reads a request and may fail, `admit` writes what it has read and may
not, so that what is wrong with a request is known before anything has changed.
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

from pellucid.config import SchedulerConfig
from pellucid.kernels.sampling.sample import BLOCK_TOKENS
from pellucid.sample.branches import IN_ORDER, Branches
from pellucid.sample.noise import token_codes
from pellucid.sample.tables import Listed, SlotLists, bias_lists, token_bits, word_lists
from pellucid.sampling_params import SamplingParams
from pellucid.schedule.plan import Admission
from pellucid.transfer import upload

# vLLM's bound: colder than this is greedy.
_GREEDY_BELOW = 1e-5
# Hotter is uniform already, and noise times temperature must stay finite in float32.
_HOTTEST = 1e30


class Trait(enum.IntFlag):
    """What a slot asks of the sampler beyond argmax.  At most one of the last four is set."""

    NONE = 0
    RANDOM = 1  # temperature above 0
    LOGPROBS = 2
    ALLOWED = 4
    BIAS = 8
    BAD_WORDS = 16
    MIN_TOKENS = 32
    PENALTY = 64
    MIN_P = 128  # and neither top_k nor top_p
    TOP_NARROW = 256  # top_k up to 64, whatever top_p and min_p
    TOP_WIDE = 512  # top_k up to 1,024
    TOP_ANY = 1024  # a larger top_k, or top_p alone


MASKS = Trait.ALLOWED | Trait.BAD_WORDS | Trait.MIN_TOKENS  # what may leave no token
LISTS = Trait.BIAS | Trait.BAD_WORDS | Trait.MIN_TOKENS  # what reads lists
_FIELDS = {Listed.STOP: "stop_token_ids", Listed.BIASED: "logit_bias", Listed.WORD: "bad_words"}
READ_TEXT = Trait.BAD_WORDS | Trait.PENALTY  # what looks at the tokens before the one to be drawn
# How many of the most likely logits each filter ranks; the whole vocabulary for what is not listed.
FILTER_WIDTHS = {Trait.MIN_P: 1, Trait.TOP_NARROW: 64, Trait.TOP_WIDE: 1024}

_BY_ROW = [trait for trait in Trait if trait not in (Trait.NONE, Trait.RANDOM)]


class Column(enum.IntEnum):
    """Columns of the device table; 8 bytes each, an int64 or a float64."""

    SEED = 0
    PROMPT_LEN = 1
    MIN_TOKENS = 2
    TOP_K = 3  # 0 keeps all
    TEMPERATURE = 4
    TOP_P = 5
    LOG_MIN_P = 6  # -inf keeps all
    PRESENCE = 7
    FREQUENCY = 8
    REPETITION = 9


FIRST_FLOAT = Column.TEMPERATURE


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
    traits: Trait = Trait.NONE  # of any row
    max_logprobs: int = -1  # most that any row wants; -1 if no row wants logprobs
    rows: Mapping[Trait, Tensor] = field(default_factory=dict)  # [R] int64, device: the rows with a trait
    longest: Mapping[Listed, int] = field(default_factory=dict)  # host: the rows' longest list of each kind
    branches: Branches = IN_ORDER  # to the tokens before each


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotParameters:
    """What a request asks of the sampler, read and found good; on the host."""

    slot: int
    numbers: tuple[list[int], list[float]]  # of the device table: integers, and behind these floats
    traits: Trait
    num_logprobs: int  # most likely tokens to report; -1 is not asked for
    lists: Mapping[Listed, np.ndarray]
    allowed: np.ndarray | None  # [W] int32, a bit a token


class SamplingState:
    """Sampling parameters of `num_slots` slots (count the spare one for padding) over `vocab_size` tokens.

    max_listed: token ids that a request may list in logit_bias, stop_token_ids and bad_words, in each.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        max_listed: int = SchedulerConfig.max_listed_tokens,
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size, self.max_listed = vocab_size, max_listed
        self.traits = np.zeros(num_slots, np.int32)  # host
        self.num_logprobs = np.full(num_slots, -1, np.int32)  # host; -1 is not asked for
        self._plain: tuple[np.ndarray, bool] | None = None  # what `is_plain` last said, until an admission
        self.table = torch.zeros((num_slots, len(Column)), dtype=torch.int64, device=self.device)
        self.codes = token_codes(vocab_size, self.device)
        self.block_codes = self.codes[::BLOCK_TOKENS].contiguous()  # of each block's first token
        self.lists = SlotLists(num_slots, max_listed, self.device)
        # [slots, W] int32, a bit a token: what a request that names allowed tokens may say.
        self.allowed = torch.zeros((num_slots, -(-vocab_size // 32)), dtype=torch.int32, device=self.device)

    def prepare(self, admission: Admission) -> SlotParameters:
        """Read a request's parameters; nothing changes.

        Raises ValueError for token ids that are out of range, or too many for the slot's lists.
        """
        sampling = admission.sampling
        lists, allowed = self._lists_of(admission), sampling.allowed_token_ids
        for kind in _FIELDS.keys() & lists.keys() if lists else ():
            self._check_ids(_FIELDS[kind], lists[kind], self.max_listed)
        if allowed is not None:
            self._check_ids("allowed_token_ids", np.array(allowed, np.int64), self.vocab_size)
        return SlotParameters(
            slot=admission.slot,
            numbers=self._numbers_of(admission),
            traits=traits_of(admission, self.vocab_size),
            num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            lists=lists,
            allowed=None if allowed is None else token_bits(allowed, self.vocab_size),
        )

    def admit(self, admitted: list[SlotParameters]) -> None:
        """Write the parameters of newly admitted requests into their slots; at most one a slot."""
        if not admitted:
            return
        self._plain = None
        slots = [parameters.slot for parameters in admitted]
        packed = np.empty((len(admitted), 1 + len(Column)), np.int64)
        packed[:, 0] = slots
        packed[:, 1 : 1 + FIRST_FLOAT] = [parameters.numbers[0] for parameters in admitted]
        packed.view(np.float64)[:, 1 + FIRST_FLOAT :] = [parameters.numbers[1] for parameters in admitted]
        self.traits[slots] = [parameters.traits for parameters in admitted]
        self.num_logprobs[slots] = [parameters.num_logprobs for parameters in admitted]
        for parameters, has_lists in zip(admitted, self.lists.are_there(slots), strict=True):
            if has_lists or parameters.lists:
                self.lists.write(parameters.slot, parameters.lists)
            if parameters.allowed is not None:
                self.allowed[parameters.slot] = upload(parameters.allowed, self.device)
        device = upload(packed, self.device)
        self.table.index_copy_(0, device[:, 0], device[:, 1:])

    def batch(
        self, host_slots: np.ndarray, slots: Tensor, positions: Tensor, branches: Branches = IN_ORDER
    ) -> LogitsBatch:
        """Describe S logits: their slots (on the host and on the device) and the positions to be drawn.

        host_slots: [S] integers.  slots, positions: [S] int64 on the device.  One small copy to the device,
        and only if a row asks for more than temperature.
        """
        traits = self.traits[host_slots]
        union = _union(traits)
        wanted = [trait for trait in _BY_ROW if trait & union]
        if not wanted:
            return LogitsBatch(slots=slots, positions=positions, traits=union)
        hosts = [np.flatnonzero(traits & trait) for trait in wanted]
        parts = upload(np.concatenate(hosts), self.device).split([len(rows) for rows in hosts])
        return LogitsBatch(
            slots=slots,
            positions=positions,
            traits=union,
            max_logprobs=int(self.num_logprobs[host_slots].max()),
            rows=dict(zip(wanted, parts, strict=True)),
            longest=self.lists.longest(host_slots) if union & LISTS else {},
            branches=branches,
        )

    def is_plain(self, host_slots: np.ndarray) -> bool:
        """Does none of these slots ask for more than a temperature?  The array must not change afterwards."""
        if self._plain is None or self._plain[0] is not host_slots:
            self._plain = host_slots, not _union(self.traits[host_slots]) & ~Trait.RANDOM
        return self._plain[1]

    def params(self, slots: Tensor) -> SlotParams:
        """Gather the parameters of `slots` [R]."""
        return SlotParams(self.table[slots])

    def _numbers_of(self, admission: Admission) -> tuple[list[int], list[float]]:
        """In the order of Column."""
        sampling = admission.sampling
        return [
            admission.seed,
            admission.prompt_len,
            sampling.min_tokens,
            _top_k(sampling, self.vocab_size),
        ], [
            0.0 if _is_greedy(sampling) else min(sampling.temperature, _HOTTEST),
            sampling.top_p,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        ]

    def _lists_of(self, admission: Admission) -> dict[Listed, np.ndarray]:
        sampling, lists = admission.sampling, dict[Listed, np.ndarray]()
        if sampling.min_tokens and admission.stop_token_ids:
            lists[Listed.STOP] = np.array(admission.stop_token_ids, np.int32)
        if sampling.logit_bias:
            lists |= bias_lists(sampling.logit_bias)
        if admission.bad_words_token_ids:
            lists |= word_lists(admission.bad_words_token_ids)
        return lists

    def _check_ids(self, name: str, ids: np.ndarray, most: int) -> None:
        """The device would write elsewhere for others, and has room for so many."""
        if len(ids) > most:
            raise ValueError(f"{name} has {len(ids):,} token ids, max_listed_tokens is {most:,}")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong, last = ids[(ids < 0) | (ids >= self.vocab_size)][0], self.vocab_size - 1
            raise ValueError(f"{name} has token id {wrong}, the vocabulary has ids 0 to {last}")


def _union(traits: np.ndarray) -> Trait:
    return Trait(int(np.bitwise_or.reduce(traits, initial=0)))


def traits_of(admission: Admission, vocab_size: int) -> Trait:
    """What the sampler must do for this request, of its own parameters alone."""
    sampling = admission.sampling
    asked = (
        (Trait.LOGPROBS, sampling.logprobs is not None),
        (Trait.ALLOWED, sampling.allowed_token_ids is not None),
        (Trait.BIAS, bool(sampling.logit_bias)),
        (Trait.BAD_WORDS, bool(admission.bad_words_token_ids)),
        (Trait.MIN_TOKENS, sampling.min_tokens > 0 and bool(admission.stop_token_ids)),
        (Trait.PENALTY, _has_penalty(sampling)),
    )
    traits = sum(trait for trait, is_asked in asked if is_asked)
    # The most likely token always passes a filter, so a greedy request needs none.
    return Trait(traits if _is_greedy(sampling) else traits + Trait.RANDOM + _filter_of(sampling, vocab_size))


def _filter_of(sampling: SamplingParams, vocab_size: int) -> Trait:
    top_k = _top_k(sampling, vocab_size)
    if not top_k and sampling.top_p == 1:
        return Trait.MIN_P if sampling.min_p > 0 else Trait.NONE
    for trait in (Trait.TOP_NARROW, Trait.TOP_WIDE):
        if 0 < top_k <= FILTER_WIDTHS[trait]:
            return trait
    return Trait.TOP_ANY


def _top_k(sampling: SamplingParams, vocab_size: int) -> int:
    return sampling.top_k if sampling.top_k < vocab_size else 0


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _GREEDY_BELOW


def _has_penalty(sampling: SamplingParams) -> bool:
    added = (sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.repetition_penalty != 1 or any(added)
