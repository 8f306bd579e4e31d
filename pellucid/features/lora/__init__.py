"""LoRA adapters: another low-rank addition to the model's layers for each request."""

from pellucid.features.base import Feature

LORA = Feature("pellucid.features.lora.host:Lora", "pellucid.features.lora.worker:Lora")
