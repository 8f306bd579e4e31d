"""Vectors of texts: what is asked of an engine for them, and what is made of its answers.

A text's vector is the hidden state behind its last token, or the mean of all, which the features `pooling`
and `mean_pooling` bring home beside one token that nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from pellucid.features.pooling.host import LAST, MEAN, NAME
from pellucid.sampling_params import SamplingParams
from pellucid.types import RequestOutput

MODULES_FILE = "modules.json"  # of sentence-transformers: what a text goes through
POOLING_FOLDER = "1_Pooling"
MODE = "pooling_mode"
MODES = {"lasttoken": LAST, "mean": MEAN}
STEPS = ("Transformer", "Pooling", "Normalize")
IDLE_STEPS = ("Dropout",)  # but in training


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What becomes of a hidden state."""

    dimensions: int | None = None  # so many of its first features, of models that were trained for that
    normalize: bool | None = None  # to length 1; None: as the checkpoint says


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


class Recipe(NamedTuple):
    """How a checkpoint's vectors are made."""

    sampling: SamplingParams  # what is asked of an engine
    normalizes: bool  # vectors have length 1 unless a request says otherwise


def vector_of(output: RequestOutput, params: PoolingParams, *, normalizes: bool) -> NDArray[np.float32]:
    """The vector of an answer to what a `Recipe` asks.  Raises ValueError for dimensions it does not have.

    normalizes: where `params` do not say.
    """
    if output.error is not None:
        raise RuntimeError(f"request {output.request_id} has failed: {output.error}")
    vector = np.frombuffer((output.outputs[0].extras or {})[NAME], dtype=np.float32)
    if params.dimensions is not None:
        if not 1 <= params.dimensions <= len(vector):
            raise ValueError(
                f"dimensions is {params.dimensions}, must be in [1, {len(vector)}]: the model's hidden size"
            )
        vector = vector[: params.dimensions]
    is_unit = normalizes if params.normalize is None else params.normalize
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if is_unit else vector


def modes_of(config: Mapping[str, object]) -> list[str]:
    """The ways in which a 1_Pooling/config.json pools: one word or several, and before version 6 flags."""
    named = config.get(MODE, [])
    flags = [name for name, value in config.items() if name.startswith(f"{MODE}_") and value is True]
    words = [flag.removeprefix(f"{MODE}_").removesuffix("_tokens") for flag in flags]
    return words + [str(word) for word in (named if isinstance(named, list) else [named])]


def recipe_of(folder: Path) -> Recipe:
    """As the checkpoint in `folder` says; the last token's state, of length 1, where it says nothing.

    Raises ValueError if its vectors are made in a way that is not served.
    """
    normalizes, pooling = True, folder / POOLING_FOLDER
    if (folder / MODULES_FILE).is_file():
        steps = steps_of(json.loads((folder / MODULES_FILE).read_text(encoding="utf-8")))
        unknown = steps.keys() - {*STEPS, *IDLE_STEPS}
        if unknown:
            raise ValueError(
                f"{MODULES_FILE} has texts go through {', '.join(sorted(unknown))}, too, which is not "
                f"served; only {', '.join(STEPS)} are"
            )
        normalizes, pooling = "Normalize" in steps, folder / steps.get("Pooling", POOLING_FOLDER)
    wish, file = LAST, pooling / "config.json"
    if file.is_file():
        asked = modes_of(json.loads(file.read_text(encoding="utf-8")))
        if len(asked) != 1 or asked[0] not in MODES:
            raise ValueError(
                f"{file.relative_to(folder)} asks for {', '.join(asked) or 'nothing'}; only the last token's "
                f"hidden state and the mean of all are served ({' or '.join(MODES)})"
            )
        wish = MODES[asked[0]]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, extra_args={NAME: wish}, detokenize=False)
    return Recipe(sampling, normalizes)


def steps_of(modules: object) -> dict[str, str]:
    """The folder of each step by its class, in a modules.json.  Raises ValueError for what is none."""
    try:
        listed = cast("list[dict[str, object]]", modules)
        return {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in listed}
    except (TypeError, KeyError):
        raise ValueError(
            f"{MODULES_FILE} is {modules!r:.100}, must be a list of objects with type and path"
        ) from None
