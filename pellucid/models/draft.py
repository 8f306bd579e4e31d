"""The checkpoint that drafts: how it does, by its config.json, and whether it fits the model.  No torch.

Public configs say it in many ways; `kind_of` is the one place that knows them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pellucid.config import BY_CHECKPOINT, HEADS, EngineConfig, SpeculativeConfig
from pellucid.models.checkpoint import Checkpoint, refuse_unknown
from pellucid.models.fields import Fields

MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
NO_METHODS = {
    "mlp_speculator": "MLP speculators are not supported",
    "dflash2": "DFlash2 drafts are not supported",
    "dspark": "DSpark drafts are not supported",
    "peagle": "parallel EAGLE drafts are not supported",
}
# As architectures are called; the longer name of two first.
KINDS_BY_NAME = ("eagle3", "medusa", "dflash2", "dflash", "dspark", "peagle", "eagle", "mtp")
DEFAULT_BLOCK = 16  # tokens, of a block diffusion head whose config does not say
DEFAULT_DRAFTS = 3  # of a head whose config does not say


@dataclass(frozen=True, slots=True)
class Draft:
    """What proposes."""

    config: SpeculativeConfig  # with all that was left to the checkpoint
    checkpoint: Checkpoint | None  # the one that `model` in speculative_config names


def open_draft(config: EngineConfig, target: Checkpoint) -> Draft:
    """Read what was left to the checkpoint that drafts.

    Raises ValueError as `Checkpoint.open` does, for a kind that is not supported, and if a draft model does
    not share the target's vocabulary.
    """
    speculative = SpeculativeConfig.of(config.speculative)
    checkpoint = None
    if speculative.model is not None:
        model = replace(config.model, model=speculative.model, revision=speculative.revision, tokenizer=None)
        checkpoint = normalized(Checkpoint.open(model, may_be_head=True))
    speculative = complete(speculative, checkpoint, target)
    if checkpoint is not None and speculative.method not in HEADS:
        refuse_unknown(checkpoint.config)
        target.check_vocabulary(checkpoint)
        size = config.parallel.tensor_parallel_size
        if size > 1 and checkpoint.vocab_size != target.vocab_size:
            raise ValueError(
                f"{checkpoint.name} has {checkpoint.vocab_size:,} tokens, the model {target.vocab_size:,}: "
                f"they cannot share logits over tensor_parallel_size={size}; use 1, or a draft of its size"
            )
    return Draft(speculative, checkpoint)


def complete(config: SpeculativeConfig, draft: Checkpoint | None, target: Checkpoint) -> SpeculativeConfig:
    """The same with the method and the number of drafts that the checkpoint says."""
    if config.method == BY_CHECKPOINT:
        assert draft is not None, "a method is left open where a model is named"
        method = kind_of(draft)
        if not config.num_speculative_tokens and method not in HEADS:
            raise ValueError(f"{draft.name} drafts as {method}; give num_speculative_tokens")
        # What is still open stays so: with a number nothing is.
        config = replace(config, method=method)
    config = choose_passes(config, draft)
    if config.is_open:
        own = Fields((draft or target).config)
        config = replace(config, num_speculative_tokens=most_drafts(config.method, own) or DEFAULT_DRAFTS)
    return config


def choose_passes(config: SpeculativeConfig, draft: Checkpoint | None) -> SpeculativeConfig:
    """The same with method pard for a draft model that was made to draft in one pass."""
    wish, method = config.parallel_drafting, config.method
    if method not in ("draft_model", "pard"):
        if wish:
            raise ValueError(f"parallel_drafting is for draft models, the method is {method}; leave it out")
        return config
    assert draft is not None, "a draft model is named"
    mask = mask_token(Fields(draft.config))
    if mask is None and (wish or method == "pard"):
        raise ValueError(
            f"{draft.name} was not made to draft in parallel: its config.json has no pard_token; "
            "leave out parallel_drafting, or take a PARD checkpoint"
        )
    if mask is None or wish is False:
        return replace(config, method="draft_model")
    if not 0 <= mask < draft.vocab_size:
        raise ValueError(
            f"pard_token of {draft.name} is {mask:,}, must be below its vocab_size {draft.vocab_size:,}; "
            "correct its config.json, or set parallel_drafting to false"
        )
    return replace(config, method="pard")


def mask_token(fields: Fields) -> int | None:
    """The token that stands for one that is not known yet; None: the model was made without."""
    names = (name for name in ("pard_token", "ptd_token_id") if fields.has(name))
    return next((fields.int(name) for name in names), None)


def kind_of(draft: Checkpoint) -> str:
    """The method of a checkpoint that drafts.  Raises ValueError for kinds that are not supported."""
    fields = Fields(draft.config)
    kind = fields.str("speculators_model_type", "")
    if not kind and fields.has("medusa_num_heads"):
        kind = "medusa"
    architectures = fields.strs("architectures") if fields.has("architectures") else []
    if not kind and fields.str("model_type", "") in NO_METHODS:
        kind = fields.str("model_type")
    for name in architectures if not kind else ():
        lower = name.lower()
        kind = next((k for k in KINDS_BY_NAME if k in lower), "")
    if not kind and "eagle" in draft.name.lower():
        kind = "eagle3" if fields.has("draft_vocab_size") else "eagle"
    if kind in NO_METHODS:
        raise ValueError(f"{draft.name}: {NO_METHODS[kind]}; use a draft of another kind, or method ngram")
    return kind or "draft_model"


def most_drafts(method: str, fields: Fields) -> int:
    """As many drafts as the checkpoint was made for; 0 if it does not say."""
    if method == "medusa":
        return fields.int("medusa_num_heads", 0)
    if method == "mtp":
        return next((fields.int(name) for name in MTP_LAYERS if fields.has(name)), 0)
    if method == "dflash":
        return block_size(fields) - 1
    if fields.has("speculators_config"):
        proposals = fields.part("speculators_config").config.get("proposal_methods")
        if isinstance(proposals, list) and proposals and isinstance(proposals[0], dict):
            return Fields(proposals[0]).int("speculative_tokens", 0)
    return 0


def of_block(fields: Fields, name: str) -> Fields:
    """Where a key of a block diffusion head stands: in `dflash_config`, or beside it."""
    inner = fields.part("dflash_config") if fields.has("dflash_config") else fields
    return inner if inner.has(name) else fields


def block_size(fields: Fields) -> int:
    """Tokens that a block diffusion head fills in at once, the newest one among them."""
    return of_block(fields, "block_size").size("block_size", DEFAULT_BLOCK)


def normalized(draft: Checkpoint) -> Checkpoint:
    """A config of the speculators project as the one of the layer inside it, with the draft's own fields."""
    fields = Fields(draft.config)
    if not fields.has("speculators_model_type"):
        return draft
    layer = fields.part("transformer_layer_config").config
    outer = {name: value for name, value in draft.config.items() if name != "transformer_layer_config"}
    if fields.str("speculators_model_type") == "eagle3":
        layer = {**layer, "num_hidden_layers": 1}
    return replace(draft, config={**layer, **outer})
