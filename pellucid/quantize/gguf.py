"""GGUF files: which type each matrix gets, and the keys that config.json and the tokenizer become.

Reading is `weights/gguf_*.py`, whose tables are used backwards here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pellucid.models.checkpoint import Checkpoint, read_json
from pellucid.models.fields import Fields
from pellucid.quant.codes import Codes
from pellucid.quant.layouts.base import LayerFormat
from pellucid.quant.layouts.ggml.formats import format_of
from pellucid.quant.layouts.ggml.types import SIZES
from pellucid.quant.schemes.base import EVERY_KIND, EVERYTHING, Rule, regex
from pellucid.quantize.base import Method
from pellucid.quantize.ggml import ggml_codes
from pellucid.quantize.inputs import Statistics
from pellucid.weights.gguf_config import SAMPLING
from pellucid.weights.gguf_config import SIZES as SIZE_KEYS
from pellucid.weights.gguf_families import FAMILIES, FLAT, LAYER
from pellucid.weights.gguf_tokenizer import CONTROL, GPT2, USER_DEFINED, WORDS
from pellucid.weights.gguf_writer import Written, write_gguf
from pellucid.weights.source import TensorSource

NORMAL, UNUSED = 1, 5
# By name: the type of most matrices, of those that need more, and llama.cpp's number of the whole.
MIXES = {
    "Q4_0": ("Q4_0", "Q4_0", 2),
    "Q8_0": ("Q8_0", "Q8_0", 7),
    "Q4_K_M": ("Q4_K", "Q6_K", 15),
    "Q5_K_M": ("Q5_K", "Q6_K", 17),
    "Q6_K": ("Q6_K", "Q6_K", 18),
}
KINDS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
THEIRS = {ours: theirs for theirs, ours in {**FLAT, **LAYER}.items()}


class Gguf(Method):
    """A type for each matrix, embedding and head included."""

    def formats(self) -> tuple[str, LayerFormat]:
        return "gguf", format_of(self.mix[0])

    @property
    def mix(self) -> tuple[str, str, int]:
        name = self.recipe.method.partition(":")[2].upper()
        if name not in MIXES:
            raise ValueError(
                f"gguf:{name} is not made here; there are {', '.join(f'gguf:{mix}' for mix in MIXES)}"
            )
        return MIXES[name]

    def rules(self, format: LayerFormat, checkpoint: Checkpoint) -> tuple[Rule, ...]:
        """As llama.cpp's mixes: values and down of some layers, and what makes logits, get more."""
        most, more, _ = self.mix
        num, tied = checkpoint.num_layers, Fields(checkpoint.config).bool("tie_word_embeddings", False)
        layers = "|".join(str(i) for i in range(num) if has_more(i, num))
        needs = rf"model\.layers\.({layers})\.(self_attn\.v_proj|mlp\.down_proj)$|lm_head$"
        needs += r"|model\.embed_tokens$" if tied else ""
        return (
            Rule(regex(needs), format_of(more), EVERY_KIND),
            Rule(EVERYTHING, format_of(most), EVERY_KIND),
        )

    def check(self, checkpoint: Checkpoint) -> None:
        if checkpoint.architecture not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(
                f"{checkpoint.architecture} is not written as GGUF (known: {known}); use another method"
            )
        if Fields(checkpoint.config).has("rope_scaling"):
            raise ValueError("rope_scaling is not written as GGUF yet; use another method")
        keys_of(checkpoint, KINDS[checkpoint.architecture])

    def codes(self, weight: Tensor, format: LayerFormat, inputs: Statistics | None) -> Codes:
        return ggml_codes(weight, format.layout.partition("/")[2])

    def write(
        self, checkpoint: Checkpoint, source: TensorSource, formats: Mapping[str, LayerFormat], out: Path
    ) -> None:
        """One file of all shards."""
        kind = KINDS[checkpoint.architecture]
        name = self.recipe.method.partition(":")[2].upper()
        keys = keys_of(checkpoint, kind) | {
            "general.quantization_version": 2,
            "general.file_type": self.mix[2],
        }
        write_gguf(out / f"model-{name}.gguf", keys, dict(tensors_of(checkpoint, source, formats, kind)))


def has_more(layer: int, num: int) -> bool:
    """The first and the last eighth, and every third between."""
    eighth = num // 8
    return layer < eighth or layer >= 7 * num // 8 or (layer - eighth) % 3 == 2


def tensors_of(
    checkpoint: Checkpoint, source: TensorSource, formats: Mapping[str, LayerFormat], kind: str
) -> Iterator[tuple[str, Written]]:
    """llama.cpp's names, shapes and orders; what is not quantized is float32."""
    heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
    fields = Fields(checkpoint.config)
    for name, info in source.infos.items():
        path, suffix = name.rpartition(".")[::2]
        format, order = formats.get(path), None
        part = path.rpartition(".")[2]
        if FAMILIES[kind].turned and part in ("q_proj", "k_proj"):
            order = fields.size(heads[part[0]], fields.size("num_attention_heads"))
        shape, type = tuple(info.shape), "F32"
        if format is not None and suffix == "weight":
            type = format.layout.partition("/")[2]
            size = SIZES[type]
            shape = (shape[0], shape[1] // size.nbytes * size.elements)
        yield f"{their_name(path)}.{suffix}", Written(shape, type, reader(source, name, type, order))


def reader(source: TensorSource, name: str, type: str, heads: int | None) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensor = source.read(name)
        tensor = tensor.float() if type == "F32" else tensor
        return tensor if heads is None else turned(tensor, heads)

    return read


def turned(rows: Tensor, heads: int) -> Tensor:
    """`turned_back` backwards: the halves of each head's rows by turns."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def their_name(path: str) -> str:
    if path in THEIRS:
        return THEIRS[path]
    _, _, index, own = path.split(".", 3)
    return f"blk.{index}.{THEIRS[own]}"


def keys_of(checkpoint: Checkpoint, kind: str) -> dict[str, object]:
    """The model's and the tokenizer's."""
    return model_keys(checkpoint, kind) | tokenizer_keys(checkpoint)


def model_keys(checkpoint: Checkpoint, kind: str) -> dict[str, object]:
    """config.json and generation_config.json."""
    fields = Fields(checkpoint.config)
    heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    keys: dict[str, object] = {
        "general.architecture": kind,
        "general.type": "model",
        "general.name": checkpoint.name,
    }
    keys |= {f"{kind}.{key}": fields.size(name) for name, key in SIZE_KEYS.items()}
    keys |= {
        f"{kind}.attention.head_count_kv": fields.size("num_key_value_heads", heads),
        f"{kind}.attention.key_length": head_dim,
        f"{kind}.attention.value_length": head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": fields.float("rms_norm_eps", 1e-6),
        f"{kind}.rope.freq_base": fields.float("rope_theta", 10000.0),
        f"{kind}.rope.dimension_count": head_dim,
        f"{kind}.vocab_size": fields.size("vocab_size"),
    }
    said = checkpoint.generation_config
    return keys | {
        f"general.sampling.{key}": said[name] for key, name in SAMPLING.items() if said.get(name) is not None
    }


def tokenizer_keys(checkpoint: Checkpoint) -> dict[str, object]:
    """BPE of bytes, as tokenizer.json has it.  Raises ValueError for another tokenizer."""
    file = checkpoint.tokenizer_path and checkpoint.tokenizer_path / "tokenizer.json"
    if file is None or not file.is_file():
        raise ValueError(
            f"{checkpoint.name} has no tokenizer.json, which a GGUF file needs; use another method"
        )
    tokenizer = read_json(file)
    model = Fields(tokenizer, file.name).part("model")
    if model.str("type", "BPE") != "BPE" or model.bool("byte_fallback", False):
        raise ValueError(f"{file} is no BPE of bytes, and others are not written as GGUF; use another method")
    size = Fields(checkpoint.config).size("vocab_size")
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in model.part("vocab").config.items():
        assert isinstance(i, int)
        if i >= size:
            raise ValueError(
                f"{file} has the token {i}, but vocab_size in config.json is {size}; use another method"
            )
        tokens[i], types[i] = token, NORMAL
    added = tokenizer.get("added_tokens")
    for each in added if isinstance(added, list) else []:
        if each["id"] >= size:  # which the model can neither read nor say
            continue
        tokens[each["id"]], types[each["id"]] = each["content"], CONTROL if each["special"] else USER_DEFINED
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in list_of(model.config.get("merges"))
    ]
    keys: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words_of(tokenizer, file),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    return keys | named_tokens(checkpoint, tokens)


def list_of(value: object) -> list:
    return value if isinstance(value, list) else []


def named_tokens(checkpoint: Checkpoint, tokens: list[str]) -> dict[str, object]:
    """Tokens by name, and the chat template."""
    assert checkpoint.tokenizer_path is not None
    file = checkpoint.tokenizer_path / "tokenizer_config.json"
    said = read_json(file) if file.is_file() else {}
    keys: dict[str, object] = {
        "tokenizer.ggml.add_bos_token": bool(said.get("add_bos_token", False)),
        "tokenizer.ggml.add_eos_token": bool(said.get("add_eos_token", False)),
    }
    for ours, theirs in (("bos", "bos"), ("pad", "padding"), ("unk", "unknown")):
        token = said.get(f"{ours}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in tokens:
            keys[f"tokenizer.ggml.{theirs}_token_id"] = tokens.index(str(token))
    ends = checkpoint.eos_token_ids
    for name, token in zip(("eos", "eot", "eom"), ends, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = token
    template = said.get("chat_template")
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    return keys


def words_of(tokenizer: Mapping[str, object], file: Path) -> str:
    """The name of how texts are cut into words.  Raises ValueError if they are cut in a way without one."""
    patterns = tuple(patterns_in(tokenizer.get("pre_tokenizer")))
    names = [name for name, words in WORDS.items() if words.patterns == patterns]
    if not names:
        raise ValueError(
            f"{file} cuts texts into words by {json.dumps(patterns)[:100]}, for which GGUF has no name "
            "that is known here; use another method"
        )
    return names[0] if "qwen2" not in names else "qwen2"


def patterns_in(found: object) -> Iterator[str]:
    match found:
        case {"type": "Sequence", "pretokenizers": [*parts]}:
            for part in parts:
                yield from patterns_in(part)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            yield pattern
        case {"type": "ByteLevel", "use_regex": True}:
            yield GPT2
