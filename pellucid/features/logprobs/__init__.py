"""Log-probabilities, of what is sampled and of the prompt."""

from pellucid.features.base import Feature

LOGPROBS = Feature("pellucid.features.logprobs.host:Logprobs", "pellucid.features.logprobs.worker:Logprobs")
PROMPT_LOGPROBS = Feature(
    "pellucid.features.logprobs.host:PromptLogprobs", "pellucid.features.logprobs.worker:PromptLogprobs"
)
