"""Tiny random draft heads in the public layouts, and what each drafts, in plain torch from the papers.

The references keep no KV and know no steps: a text and the target's states in, greedy drafts out.
Legend: n tokens of a text, D model dim, H head dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from pellucid.config import ModelConfig
from pellucid.models.checkpoint import Checkpoint
from tests.tiny import CONFIG, write_checkpoint

DIM, VOCAB, HEAD, NUM_Q, NUM_KV = 48, 320, 16, 4, 2
EPS, THETA = 1e-6, 10000.0
OWN = 200  # tokens of EAGLE-3's own vocabulary, and of others'
MASK = VOCAB - 1
TAPS = (0, 1, 2)  # of two layers: what enters both, and what leaves the second
LAYER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": DIM,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": NUM_Q,
    "num_key_value_heads": NUM_KV, "head_dim": HEAD, "max_position_embeddings": 32, "rms_norm_eps": EPS,
    "rope_theta": THETA, "torch_dtype": "float32", "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
NESTED_LAYER = {name: LAYER[name] for name in LAYER if name not in ("architectures", "torch_dtype")}

Tensors = dict[str, Tensor]
# From a text [n], the target's states by layer, the last behind its norm ([n, D] each), its tensors, the
# head's and a number to the tokens that are drafted; of trees with the node before each.
Reference = Callable[[list[int], list[Tensor], Tensors, Tensors, int], Sequence[object]]


class Numbers:
    """Random ones, the same in every run."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator) * 1.5 * columns**-0.5

    def norm(self, size: int = DIM) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=self.generator)

    def layer(self, prefix: str, width: int = DIM) -> Tensors:
        """Attention over inputs of `width`, a gated MLP, and the norm between."""
        return {
            f"{prefix}self_attn.q_proj.weight": self.matrix(NUM_Q * HEAD, width),
            f"{prefix}self_attn.k_proj.weight": self.matrix(NUM_KV * HEAD, width),
            f"{prefix}self_attn.v_proj.weight": self.matrix(NUM_KV * HEAD, width),
            f"{prefix}self_attn.o_proj.weight": self.matrix(DIM, NUM_Q * HEAD),
            f"{prefix}post_attention_layernorm.weight": self.norm(),
            f"{prefix}mlp.gate_proj.weight": self.matrix(64, DIM),
            f"{prefix}mlp.up_proj.weight": self.matrix(64, DIM),
            f"{prefix}mlp.down_proj.weight": self.matrix(DIM, 64),
        }


def write_head(
    folder: Path, config: dict[str, object], tensors: Tensors, file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def write_eagle(folder: Path, seed: int = 1) -> Path:
    n = Numbers(seed)
    tensors = {"embed_tokens.weight": n.matrix(VOCAB, DIM) * 5, "fc.weight": n.matrix(DIM, 2 * DIM)}
    return write_head(folder / "eagle-tiny", LAYER, tensors | n.layer("layers.0."), "pytorch_model.bin")


def write_eagle3(folder: Path, seed: int = 2, layer: str = "midlayer", **changes: object) -> Path:
    n = Numbers(seed)
    config = LAYER | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": OWN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }  # fmt: skip
    own = torch.randperm(VOCAB, generator=n.generator)[:OWN].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[own] = True
    tensors = {
        "d2t": own - torch.arange(OWN), "t2d": t2d, "fc.weight": n.matrix(DIM, 3 * DIM),
        f"{layer}.input_layernorm.weight": n.norm(), f"{layer}.hidden_norm.weight": n.norm(),
        "norm.weight": n.norm(), "lm_head.weight": n.matrix(OWN, DIM), **n.layer(f"{layer}.", 2 * DIM),
    }  # fmt: skip
    if changes.get("norm_before_fc"):
        tensors["input_norm.weight"] = n.norm(3 * DIM)
    if changes.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": n.norm() for i in range(3)}
    return write_head(folder / "tiny-eagle3", config | changes, tensors)


def write_speculators(folder: Path) -> Path:
    """The same EAGLE-3 head as the speculators project writes it."""
    made = write_eagle3(folder / "made")
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": OWN,
        "eagle_aux_hidden_state_layer_ids": list(TAPS), "transformer_layer_config": NESTED_LAYER,
        "torch_dtype": "float32",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 4}]},
    }  # fmt: skip
    tensors = {
        name.replace("midlayer.", "layers.0."): t for name, t in load_file(made / "model.safetensors").items()
    }
    return write_head(folder / "speculators", config, tensors)


def write_medusa(folder: Path, *, is_exported: bool = True, seed: int = 3, num: int = 4) -> Path:
    """As published (a pickle, all tokens), or as exported, with a list of tokens."""
    n = Numbers(seed)
    config: dict[str, object] = {"medusa_num_heads": num, "medusa_num_layers": 1, "model_type": "medusa"}
    heads = range(num)
    if not is_exported:
        tensors = {f"{i}.0.linear.weight": n.matrix(DIM, DIM) for i in heads}
        tensors |= {f"{i}.0.linear.bias": n.norm() - 1 for i in heads}
        tensors |= {f"{i}.1.weight": n.matrix(VOCAB, DIM) for i in heads}
        return write_head(folder / "tiny-medusa", config, tensors, "medusa_lm_head.pt")
    tensors = {f"blocks.{i}.layers.0.weight": n.matrix(DIM, DIM) for i in heads}
    tensors |= {f"lm_heads.{i}.weight": n.matrix(OWN, DIM) for i in heads}
    tensors["token_map"] = torch.randperm(VOCAB, generator=n.generator)[:OWN].sort().values
    return write_head(folder / "tiny-medusa", config | {"truncated_vocab_size": OWN}, tensors)


MTP_FORMS = ("mtp", "mimo", "deepseek")


def write_with_mtp(folder: Path, form: str, seed: int = 4) -> Path:
    """The tiny model with a layer for multi-token prediction in a second file."""
    n, num_layers = Numbers(seed), CONFIG["num_hidden_layers"]
    write_checkpoint(folder, num_nextn_predict_layers=1)
    prefix = {"mtp": "mtp.", "mimo": "model.mtp_layers.0.", "deepseek": f"model.layers.{num_layers}."}[form]
    names = {
        "mtp": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    }[form]
    project, embed_norm, hidden_norm, out_norm = (f"{prefix}{name}.weight" for name in names)
    layer = f"{prefix}layers.0." if form == "mtp" else prefix
    tensors = {
        project: n.matrix(DIM, 2 * DIM), embed_norm: n.norm(), hidden_norm: n.norm(), out_norm: n.norm(),
        f"{layer}input_layernorm.weight": n.norm(), f"{layer}self_attn.q_norm.weight": n.norm(HEAD),
        f"{layer}self_attn.k_norm.weight": n.norm(HEAD), **n.layer(layer),
    }  # fmt: skip
    if form == "deepseek":
        tensors |= {
            f"{prefix}embed_tokens.weight": n.matrix(VOCAB, DIM),
            f"{prefix}shared_head.head.weight": n.matrix(VOCAB, DIM),
        }
    save_file(tensors, folder / "mtp.safetensors")
    own = load_file(folder / "model.safetensors")
    places = dict.fromkeys(own, "model.safetensors") | dict.fromkeys(tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


WINDOW = 12  # tokens


def write_dflash(
    folder: Path, seed: int = 5, *, has_own: bool = False, num_layers: int = 2, **changes: object
) -> Path:
    """As z-lab publishes them: Qwen3's layers.  has_own: an embedding of masks, a vocabulary."""
    n = Numbers(seed)
    config = LAYER | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": num_layers,
        "num_target_layers": 2, "block_size": 6, "attention_bias": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    tensors = {"fc.weight": n.matrix(DIM, 2 * DIM), "hidden_norm.weight": n.norm(), "norm.weight": n.norm()}
    for i in range(num_layers):
        tensors |= n.layer(f"layers.{i}.") | {
            f"layers.{i}.input_layernorm.weight": n.norm(),
            f"layers.{i}.self_attn.q_norm.weight": n.norm(HEAD),
            f"layers.{i}.self_attn.k_norm.weight": n.norm(HEAD),
        }
    if has_own:
        own = torch.randperm(VOCAB, generator=n.generator)[:OWN].sort().values
        config |= {"draft_vocab_size": OWN}
        tensors |= {
            "mask_embedding": n.matrix(1, DIM)[0] * 5, "lm_head.weight": n.matrix(OWN, DIM),
            "d2t": own - torch.arange(OWN), "t2d": torch.isin(torch.arange(VOCAB), own),
        }  # fmt: skip
    return write_head(folder / "tiny-dflash", config | changes, tensors)


def write_dflash_speculators(folder: Path) -> Path:
    """The same as the speculators project writes it."""
    made = write_dflash(folder / "made")
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": MASK, "block_size": 6,
        "torch_dtype": "float32",
        "transformer_layer_config": NESTED_LAYER | {"model_type": "qwen3", "num_hidden_layers": 2},
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [{"speculative_tokens": 5}]},
    }  # fmt: skip
    return write_head(folder / "speculators", config, load_file(made / "model.safetensors"))


METHODS = (
    "dflash",
    "eagle",
    "eagle, trees",
    "eagle3",
    "eagle3, trees",
    "medusa",
    "medusa, a tree",
    "mtp",
    "mtp, trees",
    "pard",
)


def drafts_of(method: str, tiny: Path, folder: Path) -> tuple[Path, dict[str, object]]:
    """A model that is `tiny`, or has its weights, and a config by which a head drafts for it."""
    method, _, trees = method.partition(", trees")
    if _:
        model, config = drafts_of(method, tiny, folder)
        return model, config | {"num_speculative_tokens": 9, "speculative_eagle_topk": 3}
    if method == "mtp":
        return write_with_mtp(folder / "model", "mtp"), {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "adaptive": False,
        }
    if method == "pard":  # a whole model, of one layer
        model = write_checkpoint(folder / "pard", num_hidden_layers=1, pard_token=VOCAB - 1)
        return tiny, {"model": str(model), "num_speculative_tokens": 3, "adaptive": False}
    write = {"dflash": write_dflash, "eagle": write_eagle, "eagle3": write_eagle3}.get(method, write_medusa)
    drafts: dict[str, object] = {"model": str(write(folder))}
    if method == "medusa, a tree":
        return tiny, drafts | {"speculative_token_tree": "[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]"}
    return tiny, drafts | {"num_speculative_tokens": 3, "adaptive": False}


def dummy_of(method: str, folder: Path, shape: str) -> dict[str, object]:
    """A config by which a head without weights drafts for a model of a known shape, without any either."""
    if method == "mtp":
        return {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    target = Checkpoint.open(ModelConfig(model=shape)).config
    config = target | {
        "eagle": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        "eagle3": {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000
        },
        "medusa": {"model_type": "medusa", "medusa_num_heads": 3, "medusa_num_layers": 1},
        "dflash": {
            "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "block_size": 16,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 4]},
        },
    }[method]  # fmt: skip
    folder = folder / f"{method}-dummy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return {"method": method, "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}


# Plain torch


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor) -> Tensor:
    """x [n, heads, H], by its places."""
    half = HEAD // 2
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(x: Tensor, w: Tensors, prefix: str) -> Tensor:
    """Causal attention, projected back, of x [n, width]."""
    at = f"{prefix}self_attn."
    q, k, v = ((x @ w[f"{at}{name}_proj.weight"].T).view(len(x), -1, HEAD) for name in "qkv")
    if f"{at}q_norm.weight" in w:
        q, k = rms(q, w[f"{at}q_norm.weight"]), rms(k, w[f"{at}k_norm.weight"])
    q, k = rotate(q), rotate(k)
    k, v = (t.repeat_interleave(NUM_Q // NUM_KV, dim=1) for t in (k, v))
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).flatten(1) @ w[f"{at}o_proj.weight"].T


def feed(x: Tensor, w: Tensors, prefix: str) -> Tensor:
    """x plus the gated MLP behind its norm."""
    y = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def chain(text: list[int], states: Tensor, num: int, run: Callable, logits: Callable) -> list[int]:
    """run: from ids [n] and states [n, D] to features [n, D].  logits: from features [D] to [VOCAB]."""
    ids, drafts = text[1:], list[int]()
    states = states[: len(ids)]
    for _ in range(num):
        features = run(torch.tensor(ids), states)[-1]
        drafts.append(int(logits(features).argmax()))
        ids, states = [*ids, drafts[-1]], torch.cat((states, features[None]))
    return drafts


def grown(
    text: list[int], states: Tensor, num: int, run: Callable, logits: Callable, *, width: int, depth: int
) -> list[tuple[int, int]]:
    """As `chain`, a tree of EAGLE-2's: tokens, and the node before each.  Every path is run by itself."""
    states = states[: len(text) - 1]
    # By path: what the head made on the way to it, and its log-probability.
    features: dict[tuple[int, ...], Tensor] = {(): states[:0]}
    chances: dict[tuple[int, ...], float] = {(): 0.0}
    asked: list[tuple[int, ...]] = [()]
    for _ in range(min(depth, num)):
        reached: list[tuple[int, ...]] = []
        for path in asked:
            ids = torch.tensor([*text[1:], *path])
            made = run(ids, torch.cat((states, features[path])))[-1]
            best = logits(made).log_softmax(-1).topk(width)
            for chance, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                reached.append((*path, token))
                chances[reached[-1]] = chances[path] + chance
                features[reached[-1]] = torch.cat((features[path], made[None]))
        asked = sorted(reached, key=lambda path: -chances[path])[:width]
    best_paths = sorted((path for path in chances if path), key=lambda path: -chances[path])[:num]
    numbers: dict[tuple[int, ...], int] = {(): 0}
    numbers |= {path: number for number, path in enumerate(best_paths, start=1)}
    return [(path[-1], numbers[path[:-1]]) for path in best_paths]


def eagle(text: list[int], states: list[Tensor], target: Tensors, w: Tensors, num: int) -> Sequence[object]:
    def run(ids: Tensor, states: Tensor) -> Tensor:
        x = torch.cat((w["embed_tokens.weight"][ids], states), dim=-1) @ w["fc.weight"].T
        return feed(x + attend(x, w, "layers.0."), w, "layers.0.")

    return chain(text, states[-1], num, run, lambda x: target["lm_head.weight"] @ x)


def eagle3(config: dict[str, object] | None = None) -> Reference:
    """The reference for a config's options."""
    options = config or {}

    def draft(
        text: list[int], states: list[Tensor], target: Tensors, w: Tensors, num: int
    ) -> Sequence[object]:
        def run(ids: Tensor, x: Tensor) -> Tensor:
            embedded = rms(target["model.embed_tokens.weight"][ids], w["midlayer.input_layernorm.weight"])
            normed = rms(x, w["midlayer.hidden_norm.weight"])
            x = normed if options.get("norm_before_residual") else x
            x = feed(x + attend(torch.cat((embedded, normed), dim=-1), w, "midlayer."), w, "midlayer.")
            return rms(x, w["norm.weight"]) if options.get("norm_output") else x

        def logits(x: Tensor) -> Tensor:
            x = x if options.get("norm_output") else rms(x, w["norm.weight"])
            wide = torch.full((VOCAB,), -torch.inf)
            wide[torch.arange(OWN) + w["d2t"]] = w["lm_head.weight"] @ x
            return wide

        taps = [states[i] for i in TAPS]
        if options.get("fc_norm"):
            taps = [rms(tap, w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
        fused = torch.cat(taps, dim=-1)
        fused = rms(fused, w["input_norm.weight"]) if options.get("norm_before_fc") else fused
        return chain(text, fused @ w["fc.weight"].T, num, run, logits)

    return draft


def mtp(form: str) -> Reference:
    """The reference for one way to name the tensors."""
    prefix = {
        "mtp": "mtp.",
        "mimo": "model.mtp_layers.0.",
        "deepseek": f"model.layers.{CONFIG['num_hidden_layers']}.",
    }[form]

    def draft(
        text: list[int], states: list[Tensor], target: Tensors, w: Tensors, num: int
    ) -> Sequence[object]:
        def run(ids: Tensor, x: Tensor) -> Tensor:
            e = target["model.embed_tokens.weight"][ids]
            if form == "mtp":
                e, x = (
                    rms(e, w["mtp.pre_fc_norm_embedding.weight"]),
                    rms(x, w["mtp.pre_fc_norm_hidden.weight"]),
                )
                x = torch.cat((e, x), dim=-1) @ w["mtp.fc.weight"].T
                layer, out = "mtp.layers.0.", "mtp.norm.weight"
            elif form == "mimo":
                e[0] = 0
                e, x = (
                    rms(e, w[f"{prefix}token_layernorm.weight"]),
                    rms(x, w[f"{prefix}hidden_layernorm.weight"]),
                )
                x = torch.cat((x, e), dim=-1) @ w[f"{prefix}input_proj.weight"].T
                layer, out = prefix, f"{prefix}final_layernorm.weight"
            else:
                e[0] = 0
                e, x = rms(e, w[f"{prefix}enorm.weight"]), rms(x, w[f"{prefix}hnorm.weight"])
                x = torch.cat((e, x), dim=-1) @ w[f"{prefix}eh_proj.weight"].T
                layer, out = prefix, f"{prefix}shared_head.norm.weight"
            x = x + attend(rms(x, w[f"{layer}input_layernorm.weight"]), w, layer)
            return rms(feed(x, w, layer), w[out])

        return chain(text, states[-1], num, run, lambda x: target["lm_head.weight"] @ x)

    return draft


def medusa(text: list[int], states: list[Tensor], target: Tensors, w: Tensors, num: int) -> Sequence[object]:
    x = states[-1][len(text) - 2]
    return [int(medusa_logits(x, w, i).argmax()) for i in range(num)]


def medusa_logits(x: Tensor, w: Tensors, head: int) -> Tensor:
    """Head number `head` of x [D]; what it cannot name is impossible."""
    if "token_map" not in w:
        x = x + F.silu(w[f"{head}.0.linear.weight"] @ x + w[f"{head}.0.linear.bias"])
        return w[f"{head}.1.weight"] @ x
    x = x + F.silu(w[f"blocks.{head}.layers.0.weight"] @ x)
    wide = torch.full((VOCAB,), -torch.inf)
    wide[w["token_map"]] = w[f"lm_heads.{head}.weight"] @ x
    return wide


def attend_in_block(x: Tensor, context: Tensor, w: Tensors, prefix: str, kind: str) -> Tensor:
    """Attention of a block x [m, D] over itself and what `context` [n, D] before it is projected to.

    kind: both ways with all, or with a window causally.
    """
    at = f"{prefix}self_attn."
    q = (x @ w[f"{at}q_proj.weight"].T).view(len(x), -1, HEAD)
    both = torch.cat((context, x))
    k, v = ((both @ w[f"{at}{name}_proj.weight"].T).view(len(both), -1, HEAD) for name in "kv")
    q, k = rms(q, w[f"{at}q_norm.weight"]), rotate(rms(k, w[f"{at}k_norm.weight"]))
    q = rotate(torch.cat((q.new_zeros(len(context), NUM_Q, HEAD), q)))[len(context) :]
    k, v = (t.repeat_interleave(NUM_Q // NUM_KV, dim=1) for t in (k, v))
    distance = torch.arange(len(context), len(both))[:, None] - torch.arange(len(both))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if kind == "sliding_attention":
        seen = (distance >= 0) & (distance < WINDOW)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out.transpose(0, 1).flatten(1) @ w[f"{at}o_proj.weight"].T


def dflash(*kinds: str) -> Reference:
    """The reference for layers of these kinds."""

    def draft(text: list[int], states: list[Tensor], target: Tensors, w: Tensors, num: int) -> list[int]:
        table = target["model.embed_tokens.weight"]
        context = rms(torch.cat((states[1], states[2]), dim=-1) @ w["fc.weight"].T, w["hidden_norm.weight"])
        masks = w.get("mask_embedding", table[MASK]).expand(num, -1)
        x = torch.cat((table[text[-1:]], masks))
        for i, kind in enumerate(kinds):
            normed = rms(x, w[f"layers.{i}.input_layernorm.weight"])
            x = feed(x + attend_in_block(normed, context, w, f"layers.{i}.", kind), w, f"layers.{i}.")
        hidden = rms(x[1:], w["norm.weight"])
        if "lm_head.weight" not in w:
            return (hidden @ target["lm_head.weight"].T).argmax(-1).tolist()
        own = (hidden @ w["lm_head.weight"].T).argmax(-1)
        return (own + w["d2t"][own]).tolist()

    return draft
