"""A rotary embedding in numbers.  No torch: what the numbers mean is in `layers/rotary.py`."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rotary embedding.  Fields after `max_position_embeddings` matter to some kinds only."""

    kind: str  # one of KINDS
    theta: float
    rotary_dim: int  # leading features of a head that turn; the others pass
    max_position_embeddings: int  # tokens
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope: tokens seen in pre-training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: scales cosines and sines, hence the softmax's temperature
    truncate: bool = True  # yarn: round the ends of the ramp outward to whole features
    short_factors: tuple[float, ...] = ()  # longrope: what divides each frequency, within the original length
    long_factors: tuple[float, ...] = ()  # longrope: and beyond
    interleaved: bool = False  # features 2i and 2i + 1 of a head turn together, not i and i + rotary_dim / 2

    @property
    def reach(self) -> int:
        """Tokens that the model was made for.

        Configs differ in whether `max_position_embeddings` counts before stretching; only yarn's tell.
        """
        if self.kind != "yarn":
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))

    @property
    def stretched(self) -> int:
        """Most tokens that this embedding can be asked to reach."""
        if self.kind not in ("linear", "dynamic"):
            return self.reach
        return int(self.max_position_embeddings * self.factor)
