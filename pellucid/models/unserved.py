"""Why architectures that people ask for are not served, and what to take instead.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

STATE = "it has layers that keep a state in place of keys and values"
ENCODER = (
    "its tokens see what follows them; take a decoder for vectors, such as Qwen3-Embedding, and for scores, "
    "such as Qwen3-Reranker"
)
CLASSES = (
    "it gives classes, and no tokens; for scores take a model that answers yes or no, such as "
    "Qwen/Qwen3-Reranker-0.6B"
)
REASONS: Mapping[str, tuple[str, ...]] = {  # patterns of names; the first reason counts
    ENCODER: (
        *(
            "*Bert*",
            "*BERT*",
            "*Roberta*",
            "Electra*",
            "Deberta*",
            "MPNet*",
            "Camembert*",
            "XLM*",
            "NewModel",
        ),
        *("T5*", "MT5*", "UMT5*", "Bart*", "MBart*", "Pegasus*", "M2M100*", "Marian*", "Gte*"),
    ),
    CLASSES: ("*ForSequenceClassification", "*ForTokenClassification", "*RewardModel"),
    "it is another form of a model that transformers has as GlmForCausalLM; take that one, such as "
    "zai-org/glm-4-9b-chat-hf": ("ChatGLM*",),
    STATE: (
        *("*Mamba*", "RWKV*", "Rwkv*", "Qwen3Next*", "Qwen3_5*", "Jamba*", "Bamba*", "Zamba*", "FalconH1*"),
        *("NemotronH*", "Lfm2*", "LFM2*", "KimiLinear*", "MiniMax*01*", "RecurrentGemma*"),
    ),
}


def reason(architecture: str) -> str | None:
    """Why this one, of which no file is here, is not served; None: nobody has written one."""
    return next(
        (
            why
            for why, patterns in REASONS.items()
            if any(fnmatchcase(architecture, pattern) for pattern in patterns)
        ),
        None,
    )
