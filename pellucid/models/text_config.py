"""The text model's part of a multimodal config.json, and what its family leaves out.  No torch."""

from __future__ import annotations

from pellucid.models.registry import MODELS

# Of architectures whose text is served: what config.json does not say, as transformers has it.
TEXT_DEFAULTS: dict[str, dict[str, object]] = {
    "Gemma3ForConditionalGeneration": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "Llama4ForConditionalGeneration": {},
}
WITH_HEADS = ("Gemma3ForConditionalGeneration",)  # the head is not the text's, and caps no logits
WHOLE_MODELS = ("architectures", "dtype", "torch_dtype", "eos_token_id", "quantization_config")


def text_key(key: str) -> str:
    """A tensor's name without what multimodal checkpoints have put around the text, one name or another."""
    return key.removeprefix("language_model.").replace("model.language_model.", "model.")


def text_architecture(name: str) -> str:
    """Of the text alone, whose tensors have the names that `text_key` gives; another's is its own."""
    return name.replace("ForConditionalGeneration", "ForCausalLM") if name in TEXT_DEFAULTS else name


def spellings_of(path: str) -> tuple[str, ...]:
    """The names that configs have for a module which a checkpoint calls so: of a multimodal one several."""
    text = text_key(path)
    if text == path:
        return (path,)
    return path, f"language_model.{text}", text.replace("model.", "model.language_model.", 1)


def text_config(config: dict[str, object]) -> dict[str, object]:
    """A config.json as if it were the text model's alone; one of an architecture without a part as it is.

    What is before a head alone, as models of vectors are saved, is a model whose head has no table.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    text = config.get("text_config")
    with_head = f"{str(name).removesuffix('Model').removesuffix('Text')}ForCausalLM"
    if str(name).endswith("Model") and str(name) not in MODELS and with_head in MODELS:
        return config | {"architectures": [with_head], "tie_word_embeddings": True}
    if name not in TEXT_DEFAULTS or not isinstance(text, dict):
        return config
    whole = {key: config[key] for key in WHOLE_MODELS if config.get(key) is not None}
    if name in WITH_HEADS:
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        whole |= {"final_logit_softcapping": None, **tied}
    return TEXT_DEFAULTS[str(name)] | text | whole
