"""Vectors of texts: what is asked of an engine for them, and what is made of its answers.

A text's vector is the hidden state behind its last token, or the mean of all, which the features `pooling`
and `mean_pooling` bring home beside one token that nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pellucid.features.pooling.host import LAST, MEAN, NAME
from pellucid.sampling_params import SamplingParams
from pellucid.types import RequestOutput

POOLING_FILE = Path("1_Pooling") / "config.json"  # of sentence-transformers
MODE = "pooling_mode"
MODES = {"lasttoken": LAST, "mean": MEAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What becomes of a hidden state."""

    dimensions: int | None = None  # so many of its first features, of models that were trained for that
    normalize: bool = True  # to length 1


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The vector of one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How near two texts are."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of one pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


def vector_of(output: RequestOutput, params: PoolingParams) -> NDArray[np.float32]:
    """The vector of an answer to `pooling_of`.  Raises ValueError for dimensions that it does not have."""
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id} has failed: {output.error}")
    vector = np.frombuffer((output.outputs[0].extras or {})[NAME], dtype=np.float32)
    if params.dimensions is not None:
        if not 1 <= params.dimensions <= len(vector):
            raise ValueError(
                f"dimensions is {params.dimensions}, must be in [1, {len(vector)}]: the model's hidden size"
            )
        vector = vector[: params.dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if params.normalize else vector


def modes_of(config: Mapping[str, object]) -> list[str]:
    """The ways in which a 1_Pooling/config.json pools: one word or several, and before version 6 flags."""
    named = config.get(MODE, [])
    flags = [name for name, value in config.items() if name.startswith(f"{MODE}_") and value is True]
    words = [flag.removeprefix(f"{MODE}_").removesuffix("_tokens") for flag in flags]
    return words + [str(word) for word in (named if isinstance(named, list) else [named])]


def pooling_of(folder: Path) -> SamplingParams:
    """What is asked of an engine for a vector: as the checkpoint in `folder` says, or the last token's.

    Raises ValueError if its vectors are pooled in a way that is not served.
    """
    wish, file = LAST, folder / POOLING_FILE
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        asked = modes_of(config)
        if len(asked) != 1 or asked[0] not in MODES:
            raise ValueError(
                f"{POOLING_FILE} asks for {', '.join(asked) or 'nothing'}; only the last token's hidden "
                f"state and the mean of all are served ({' or '.join(MODES)})"
            )
        wish = MODES[asked[0]]
    return SamplingParams(temperature=0.0, max_tokens=1, extra_args={NAME: wish}, detokenize=False)
