"""Which class builds which architecture of a config.json, and what such a class offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from pellucid.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.forward import ForwardInput
    from pellucid.models.builder import Builder
    from pellucid.models.fields import Fields


class Model(Protocol):
    """A causal language model; also an `nn.Module` whose parameters are `Weight`s."""

    stacked: ClassVar[dict[str, tuple[str, ...]]]  # merged name -> the checkpoint's, if they are apart there
    ignored: tuple[str, ...]  # patterns of checkpoint tensors that nobody needs

    def __init__(self, config: Fields, b: Builder) -> None: ...

    @classmethod
    def rename(cls, key: str) -> str:
        """The model's name for the checkpoint's tensor `key`."""
        ...

    def __call__(self, fwd: ForwardInput) -> Tensor:
        """Hidden states [T, D], or of the tokens that are wanted."""
        ...

    def logits(self, hidden: Tensor, *of_head: Tensor) -> Tensor:
        """[S, D] -> [S, V].

        of_head: of each row its adapter's place, of a model that has asked for a head which takes it
        (`Builder.head`), in steps in which some have one; other models need no such argument.
        """
        ...


MODELS: Registry[type[Model]] = Registry(
    "model architecture",
    {
        "DeepseekV2ForCausalLM": "pellucid.models.deepseek:DeepseekV2",
        "DeepseekV3ForCausalLM": "pellucid.models.deepseek:DeepseekV3",
        "DeepseekV32ForCausalLM": "pellucid.models.deepseek:DeepseekV32",
        "Glm4MoeLiteForCausalLM": "pellucid.models.deepseek:Glm4MoeLite",
        "Ernie4_5ForCausalLM": "pellucid.models.ernie4_5:Ernie45",
        "Ernie4_5_ForCausalLM": "pellucid.models.ernie4_5:Ernie45",
        "Exaone4ForCausalLM": "pellucid.models.exaone4:Exaone4",
        "GemmaForCausalLM": "pellucid.models.gemma:Gemma",
        "Gemma2ForCausalLM": "pellucid.models.gemma:Gemma2",
        "Gemma3ForCausalLM": "pellucid.models.gemma:Gemma3",
        "Gemma3ForConditionalGeneration": "pellucid.models.gemma:Gemma3",
        "Glm4ForCausalLM": "pellucid.models.glm:Glm4",
        "Glm4MoeForCausalLM": "pellucid.models.glm_moe:Glm4Moe",
        "GlmForCausalLM": "pellucid.models.glm:Glm",
        "GptOssForCausalLM": "pellucid.models.gpt_oss:GptOss",
        "GraniteForCausalLM": "pellucid.models.granite:Granite",
        "GraniteMoeForCausalLM": "pellucid.models.granite:GraniteMoe",
        "GraniteMoeHybridForCausalLM": "pellucid.models.granite:GraniteDense4",
        "GraniteMoeSharedForCausalLM": "pellucid.models.granite:GraniteMoeShared",
        "LlamaForCausalLM": "pellucid.models.llama:Llama",
        "Llama4ForCausalLM": "pellucid.models.llama4:Llama4",
        "Llama4ForConditionalGeneration": "pellucid.models.llama4:Llama4",
        "MistralForCausalLM": "pellucid.models.mistral:Mistral",
        "Olmo2ForCausalLM": "pellucid.models.olmo:Olmo2",
        "Olmo3ForCausalLM": "pellucid.models.olmo:Olmo3",
        "OlmoeForCausalLM": "pellucid.models.olmoe:Olmoe",
        "Phi3ForCausalLM": "pellucid.models.phi3:Phi3",
        "Qwen2ForCausalLM": "pellucid.models.qwen2:Qwen2",
        "Qwen3ForCausalLM": "pellucid.models.qwen3:Qwen3",
        "Qwen2MoeForCausalLM": "pellucid.models.qwen_moe:Qwen2Moe",
        "Qwen3MoeForCausalLM": "pellucid.models.qwen_moe:Qwen3Moe",
        "MixtralForCausalLM": "pellucid.models.mixtral:Mixtral",
        "SeedOssForCausalLM": "pellucid.models.seed_oss:SeedOss",
        "SmolLM3ForCausalLM": "pellucid.models.smollm3:SmolLM3",
    },
)
