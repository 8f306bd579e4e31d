"""A checkpoint on disk: where its files are and what its config.json says.  Reads no weights; no torch.

Names: a folder, a GGUF file, an id on a hub, `shape:NAME` (a public config without weights), or a bundled
model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pellucid.config import FP8, ModelConfig
from pellucid.models.fields import Fields
from pellucid.models.registry import MODELS
from pellucid.models.rope import rope_config
from pellucid.models.text_config import TEXT_DEFAULTS, text_config
from pellucid.models.unserved import reason

ASSETS = Path(__file__).parent.parent / "assets"
BUNDLED = ("sprout", "sprout-draft", "sprout-eagle3", "sprout-medusa")
SHAPE = "shape:"
CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
SIDE_FILES = "*quant*config.json"  # what tools write of quantization beside config.json
GGUF = ".gguf"
NO_TOKENIZER = "no_tokenizer.json"  # why there is none, where a GGUF file has been unpacked
WEIGHT_FILES = ("*.safetensors",)
PICKLED_FILES = ("pytorch_model*.bin", "model*.pt", "medusa_lm_head.pt", "*.pth")
DTYPES = ("bfloat16", "float16", "float32")  # torch's names
ANY_HEAD_DIM = 2  # how far positions reach does not depend on it
OTHER_MODALITIES = ("text_config", "vision_config", "audio_config")
NOT_SERVED = {  # what a field asks for that is neither absent, null, false nor empty
    "use_bidirectional_attention": "its tokens see what follows them",
    "per_layer_config": "single layers have fields of their own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The files of one model.  `path` is its folder, or the config file itself for a shape."""

    name: str
    path: Path
    config: dict[str, object]
    generation_config: dict[str, object] = field(default_factory=dict)
    files: tuple[Path, ...] = ()  # with weights
    side: dict[str, dict[str, object]] = field(default_factory=dict)  # configs beside config.json, by name
    tokenizer_path: Path | None = None  # folder; None if there is none or none was wanted
    is_dummy: bool = False  # weights are to be random

    @classmethod
    def open(cls, model: ModelConfig, *, may_be_head: bool = False) -> Self:
        """Find the files, downloading them if the name is a hub's.

        may_be_head: it need not be a model, and may be a few layers that draft for one.
        Raises ValueError if they are not found, or if the model is one that this engine cannot serve.
        """
        is_shape = model.model.startswith(SHAPE)
        is_dummy = is_shape or model.load_format == "dummy"
        weights = () if is_dummy else weight_files(model, may_be_head=may_be_head)
        path = shape_file(model.model) if is_shape else find_folder(model.model, model, weights)
        gguf = None if is_shape else find_gguf(path, model.load_format)
        if gguf is not None:
            from pellucid.weights.gguf_folder import folder_of  # which imports torch

            path = folder_of(gguf)
        config = text_config(read_json(path if is_shape else path / "config.json"))
        if not may_be_head:
            refuse_unknown(config)
        generation = path / "generation_config.json"
        return cls(
            name=model.model,
            path=path,
            config=config,
            generation_config=read_json(generation) if generation.is_file() else {},
            files=() if is_dummy else (gguf,) if gguf else find_weights(path, model.load_format),
            side={file.name: read_json(file) for file in path.glob(SIDE_FILES)},
            tokenizer_path=find_tokenizer(model, None if is_shape else path),
            is_dummy=is_dummy,
        )

    @property
    def architecture(self) -> str:
        """The name in MODELS."""
        return architecture_of(self.config)

    @property
    def dtype(self) -> str:
        """The dtype of the weights by torch's name; float32 if config.json does not say.

        Raises ValueError for one that no model here computes in.
        """
        fields = Fields(self.config)
        dtype = fields.str("dtype", fields.str("torch_dtype", "float32")).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(
                f"dtype in config.json is {dtype!r}, which is not supported; give dtype={' or '.join(DTYPES)}"
            )
        return dtype

    @property
    def kv_cache_dtype(self) -> str | None:
        """The dtype that the KV cache was calibrated for, by torch's name; None if for none of its own.

        Raises ValueError for one that is not FP8.
        """
        fields = Fields(self.config)
        quantization = fields.part("quantization_config") if fields.has("quantization_config") else Fields({})
        if not quantization.has("kv_cache_scheme"):
            return None
        scheme = quantization.config["kv_cache_scheme"]
        match scheme:
            case {"type": "float", "num_bits": 8} | "static":  # AutoFP8's word
                return FP8
            case _:
                raise ValueError(
                    f"kv_cache_scheme in config.json is {scheme}, which is not supported; "
                    f"use kv_cache_dtype={self.dtype!r} or 'fp8'"
                )

    @property
    def vocab_size(self) -> int:
        return Fields(self.config).size("vocab_size")

    @property
    def num_layers(self) -> int:
        return Fields(self.config).size("num_hidden_layers")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, by config.json and generation_config.json together."""
        ids: dict[int, None] = {}
        for value in (self.config.get("eos_token_id"), self.generation_config.get("eos_token_id")):
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int):
                    ids[token] = None
        return tuple(ids)

    def check_vocabulary(self, draft: Checkpoint) -> None:
        """Raise ValueError, naming both models, if `draft` means other tokens by its ids.

        Their vocabularies may be padded to different sizes.
        """
        theirs, ours = draft.token_ids(), self.token_ids()
        least = min(draft.vocab_size, self.vocab_size)
        is_known = theirs is not None and theirs == ours and max(theirs.values(), default=0) < least
        if draft.vocab_size != self.vocab_size and not is_known:
            raise ValueError(
                f"{draft.name} cannot draft for {self.name}: its vocabulary has {draft.vocab_size:,} tokens, "
                f"the model's {self.vocab_size:,}; sizes may differ only by padding behind the same "
                "tokenizer.json: take a draft model of the same tokenizer"
            )
        if theirs is None or ours is None or theirs == ours:
            return
        text, token = min(theirs.items() ^ ours.items(), key=lambda item: item[1])
        raise ValueError(
            f"{draft.name} cannot draft for {self.name}: their tokenizers differ, first in token {token} "
            f"({text!r}); take a draft model of the same tokenizer"
        )

    def token_ids(self) -> dict[str, int] | None:
        """Each token's id by tokenizer.json; None if there is no such file, or it numbers none."""
        file = self.tokenizer_path and self.tokenizer_path / "tokenizer.json"
        if file is None or not file.is_file():
            return None
        vocabulary = Fields(read_json(file), file.name).part("model").config.get("vocab")
        return vocabulary if isinstance(vocabulary, dict) else None

    @property
    def max_position_embeddings(self) -> int:
        """Tokens that the model was made for: config.json's number, or what yarn stretches it to."""
        reach = rope_config(Fields(self.config), head_dim=ANY_HEAD_DIM).reach
        return min(reach, self.dense_reach or reach)

    @property
    def dense_reach(self) -> int | None:
        """Tokens up to which every query sees all keys; None: always."""
        fields = Fields(self.config)
        return fields.size("index_topk") if fields.has("index_topk") else None

    @property
    def max_stretched_len(self) -> int:
        """Most tokens that the model's rotary embedding can be stretched to."""
        stretched = rope_config(Fields(self.config), head_dim=ANY_HEAD_DIM).stretched
        return min(stretched, self.dense_reach or stretched)


def architecture_of(config: dict[str, object]) -> str:
    fields = Fields(config)
    names = fields.strs("architectures") if fields.has("architectures") else []
    if len(names) != 1:
        raise ValueError(
            f"architectures in config.json is {names}, must name one (known: {', '.join(MODELS)})"
        )
    return names[0]


def refuse_unknown(config: dict[str, object]) -> None:
    """Raise ValueError for an architecture that no file serves, naming those that are, or such a field."""
    name = architecture_of(config)
    why = None if name in MODELS else reason(name)
    if why is not None:
        raise ValueError(f"{name} in config.json is not served: {why}")
    other = [name for name in OTHER_MODALITIES if name in config]
    if other:
        raise ValueError(
            f"config.json has {', '.join(other)}: it is a multimodal model, {name}, and this engine serves "
            f"text, also of {' and '.join(TEXT_DEFAULTS)} (known: {', '.join(MODELS)})"
        )
    MODELS.check(name)
    if config.get("is_causal") is False:
        raise ValueError(
            "is_causal in config.json is false: its tokens see what follows them, which is not served"
        )
    for name, asked in NOT_SERVED.items():
        if config.get(name):
            raise ValueError(f"{name} in config.json is {config[name]!r}: {asked}, which is not served")


def shape_file(name: str) -> Path:
    """The bundled config.json of a public model.  Raises ValueError with the known shapes."""
    path = ASSETS / "shapes" / f"{name.removeprefix(SHAPE).lower()}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json")))
        raise ValueError(f"unknown shape {name!r} (known: {known})")
    return path


def weight_files(model: ModelConfig, *, may_be_head: bool) -> tuple[str, ...]:
    """Patterns of the files to download; many draft heads are published in torch's own alone."""
    pickled = (PICKLED_FILES,) if may_be_head or model.load_format == "pt" else ()
    plain = () if model.load_format == "pt" else (WEIGHT_FILES,)
    return tuple(pattern for files in (*plain, *pickled) for pattern in files)


def find_folder(name: str, model: ModelConfig, weights: tuple[str, ...] = ()) -> Path:
    """The folder with the files of `name`.  weights: patterns of those that are downloaded, too."""
    if name in BUNDLED:
        return ASSETS / name
    path = Path(name).expanduser()
    if path.is_dir() or (path.suffix == GGUF and path.is_file()):
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ValueError(
            f"no folder {name!r}; give a folder with config.json and *.safetensors, a hub id such as "
            f"Qwen/Qwen3-0.6B, a *{GGUF} file or one of a hub's as ID:Q4_K_M, {SHAPE}NAME, or "
            f"{' or '.join(BUNDLED)}"
        )
    name, _, type = name.partition(":")  # of a hub's GGUF files, one for each type
    if type:
        return download(name, model, [f"*{type}*{GGUF}", f"*{type.lower()}*{GGUF}"])
    return download(name, model, [*CONFIG_FILES, *weights])


def download(name: str, model: ModelConfig, patterns: list[str]) -> Path:
    """The hub's snapshot in its cache.  Raises ValueError with the hub's reason."""
    if model.hub == "modelscope":
        return download_from_modelscope(name, model, patterns)
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            name,
            revision=model.revision,
            cache_dir=model.download_dir,
            allow_patterns=patterns,
            ignore_patterns=["original/*", "consolidated*"],
        )
    except (OSError, ValueError) as error:
        raise ValueError(not_found(name, "the Hugging Face hub", error)) from error
    return Path(path)


def download_from_modelscope(name: str, model: ModelConfig, patterns: list[str]) -> Path:
    try:
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("hub is 'modelscope', but its package is missing; pip install modelscope") from error
    try:
        path = snapshot_download(
            name, revision=model.revision, cache_dir=model.download_dir, allow_patterns=patterns
        )
    except Exception as error:  # its errors have no common class
        raise ValueError(not_found(name, "ModelScope", error)) from error
    return Path(path)


def not_found(name: str, hub: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"no folder {name!r}, and {hub} has not delivered it ({reason}); give a folder that you have"


def find_gguf(path: Path, load_format: str) -> Path | None:
    """The GGUF file that is meant: `path` itself, or the one model in a folder without other weights."""
    if path.is_file():
        return path
    if load_format != "gguf" and (path / "config.json").is_file():
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    firsts = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise ValueError(f"{path} has several models ({names}); name the file of one of them")
    if not firsts and load_format == "gguf":
        raise ValueError(f"no *{GGUF} in {path}; use load_format='auto'")
    return firsts[0] if firsts else None


def find_weights(path: Path, load_format: str) -> tuple[Path, ...]:
    """The files with weights, safetensors before torch's own."""
    if load_format == "pt" or not any(path.glob("*.safetensors")):
        pickled = sorted({file for pattern in PICKLED_FILES for file in path.glob(pattern)})
        if pickled:
            return tuple(pickled)
        if load_format == "pt":
            raise ValueError(f"no {' or '.join(PICKLED_FILES)} in {path}; use load_format='auto'")
    return find_shards(path)


def find_shards(path: Path) -> tuple[Path, ...]:
    """The safetensors files: those in the index, else model.safetensors, else all but second copies."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.is_file():
        weight_map = Fields(read_json(index), index.name).part("weight_map").config
        shards = sorted({path / str(name) for name in weight_map.values()})
    elif single.is_file():
        shards = [single]
    else:
        shards = sorted(
            file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated")
        )
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing[:5])}, named in {index.name}; download it again")
    if not shards:
        raise ValueError(f"no *.safetensors in {path}; convert the checkpoint, or use load_format='dummy'")
    return tuple(shards)


def find_tokenizer(model: ModelConfig, own: Path | None) -> Path | None:
    """The folder of the tokenizer the user named, or the model's own."""
    if model.skip_tokenizer_init:
        return None
    if model.tokenizer is None:
        missing = own / NO_TOKENIZER if own else None
        if missing is not None and missing.is_file():
            raise ValueError(str(read_json(missing)["reason"]))
        return own
    return find_folder(model.tokenizer, model)


def read_json(path: Path) -> dict[str, object]:
    """A file that holds one JSON object.  Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"no {path.name} in {path.parent}; it must be a Hugging Face checkpoint folder"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, must be an object")
    return content
