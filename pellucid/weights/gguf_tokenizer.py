"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json would hold it.

Two models are read: `gpt2`, BPE of bytes whose words a regular expression by name cuts, and `llama`,
SentencePiece's BPE, whose merges follow from scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Types of tokens.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\u2581"  # SentencePiece's mark of a space

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
SLASHED_TAIL = TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{START}\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
QWEN2 = rf"{CONTRACTION}|{START}\p{{L}}+|\p{{N}}|{TAIL}"
QWEN35 = (
    rf"{CONTRACTION}|{START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}|{SLASHED_TAIL}"
GPT4O = (
    rf"{START}{UPPER}*{LOWER}+{CONTRACTION}?|{START}{UPPER}+{LOWER}*{CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{SLASHED_TAIL}"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DIGITS = r"\p{N}"
SEED = rf"{CONTRACTION}|{START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How texts are cut into words, one expression behind the other, before merges.

    whole: a word that is a token stays one, whatever merges say.  bos: the file need not say that texts
    begin so.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


LLAMA3_WORDS = Words(patterns=(LLAMA3,), whole=True, bos=True)
QWEN2_WORDS = Words(patterns=(QWEN2,), nfc=True)
GPT2_WORDS = Words(patterns=(GPT2,))
DIGIT_WORDS = Words(patterns=(DIGITS, GPT2))
WORDS = {  # by tokenizer.ggml.pre
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), QWEN2_WORDS),
    "qwen35": Words(patterns=(QWEN35,), nfc=True),
    **dict.fromkeys(("stablelm2", "hunyuan"), Words(patterns=(QWEN2,))),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Words(patterns=(LLAMA3,))),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), GPT2_WORDS),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), DIGIT_WORDS),
    "seed-coder": Words(patterns=(SEED,)),
    **dict.fromkeys(("gpt-4o", "llama4"), Words(patterns=(GPT4O,))),
    "tekken": Words(patterns=(TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Words(patterns=DEEPSEEK3)),
}
WAY_OUT = "name a folder that has the model's tokenizer.json with tokenizer=..."


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """tokenizer: what tokenizer.json would hold, for its library; config: tokenizer_config.json."""

    tokenizer: dict[str, object]
    config: dict[str, object]

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> GgufTokenizer:
        """From a file's keys.  Raises ValueError if they hold no tokenizer, or one that is not known."""
        keys = Keys(metadata)
        model = keys.text("model")
        if model not in ("gpt2", "llama"):
            raise ValueError(
                f"tokenizer.ggml.model in the GGUF file is {model!r}, and gpt2 and llama are read; {WAY_OUT}"
            )
        parts = byte_pairs(keys) if model == "gpt2" else sentence_pieces(keys)
        adds_bos = keys.flag("add_bos_token", default=model == "llama" or keys.words.bos)
        adds_eos = keys.flag("add_eos_token", default=False)
        before = [bos] if adds_bos and (bos := keys.token("bos")) else []
        behind = [eos] if adds_eos and (eos := keys.token("eos")) else []
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added_tokens(keys),
            **parts,
            "post_processor": around(keys, before, behind),
        }
        return cls(tokenizer, config_of(keys, metadata, adds_bos=bool(before)))


class Keys:
    """The keys `tokenizer.ggml.*`, checked as they are read."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = [str(token) for token in self.items("tokens")]
        self.types = self.items("token_type") or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self._wrong("token_type", f"as long as tokens, {len(self.tokens):,}")
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    @property
    def words(self) -> Words:
        """How texts are cut, by name; a `llama` model is not cut."""
        if self.text("model") == "llama":
            return Words(patterns=())
        name = self.text("pre", default="unnamed")
        if name not in WORDS:
            raise ValueError(
                f"tokenizer.ggml.pre in the GGUF file is {name!r}, which is not known (known: "
                f"{', '.join(sorted(WORDS))}); {WAY_OUT}"
            )
        return WORDS[name]

    def items(self, key: str) -> list[object]:
        value = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def token(self, name: str) -> str | None:
        """The spelling of a token with a name, such as "bos"."""
        i = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[i] if isinstance(i, int) and 0 <= i < len(self.tokens) else None

    def _wrong(self, key: str, wanted: str) -> ValueError:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return ValueError(
            f"tokenizer.ggml.{key} in the GGUF file is {value!r:.100}, must be {wanted}; {WAY_OUT}"
        )


def byte_pairs(keys: Keys) -> dict[str, object]:
    """Normalizer, pre-tokenizer, decoder and model of BPE of bytes."""
    words = keys.words
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in words.patterns
    ]
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, in_bytes]},
        "decoder": in_bytes,
        "model": bpe(keys, [pair(str(merge)) for merge in keys.items("merges")], ignore_merges=words.whole),
    }


def pair(merge: str) -> list[str]:
    """The halves of a merge, whose second may begin with a space in no vocabulary of bytes."""
    first, _, second = merge.partition(" ")
    return [first, second]


def sentence_pieces(keys: Keys) -> dict[str, object]:
    """Normalizer, decoder and model of SentencePiece's BPE; characters without a token become bytes.

    Behind an added token a text begins with a space again, as llama.cpp has it.
    """
    prefix = keys.flag("add_space_prefix", default=True)
    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    spoken = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*spoken, *last]},
        "model": bpe(keys, merges_by_score(keys), unk_token=unknown(keys), fuse_unk=True, byte_fallback=True),
    }


def merges_by_score(keys: Keys) -> list[list[str]]:
    """Every way to make a token of two, best score first, as SentencePiece would merge them."""
    scores = [float(score) for score in keys.items("scores") if isinstance(score, (int, float))]
    if len(scores) != len(keys.tokens):
        raise ValueError(
            f"tokenizer.ggml.scores in the GGUF file has {len(scores):,} numbers for "
            f"{len(keys.tokens):,} tokens; {WAY_OUT}"
        )
    found: list[tuple[float, int, int, int, list[str]]] = []
    for token, i in keys.ids.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in keys.ids and second in keys.ids:
                found.append((-scores[i], i, keys.ids[first], keys.ids[second], [first, second]))
    found.sort()
    return [halves for *_, halves in found]


def unknown(keys: Keys) -> str | None:
    """The token for what cannot be spelled."""
    return keys.token("unknown") or next(
        (token for token, type in zip(keys.tokens, keys.types, strict=True) if type == UNKNOWN), None
    )


def bpe(keys: Keys, merges: list[list[str]], **options: object) -> dict[str, object]:
    defaults: dict[str, object] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **defaults, **options, "vocab": keys.ids, "merges": merges}


def added_tokens(keys: Keys) -> list[dict[str, object]]:
    """Tokens that are found in a text before it is cut; control tokens do not show in plain text.

    One that is spelled with SentencePiece's spaces is looked for when the text is spelled so, too.
    """
    found: list[dict[str, object]] = []
    for i, (token, type) in enumerate(zip(keys.tokens, keys.types, strict=True)):
        if type in (UNKNOWN, CONTROL, USER_DEFINED):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            special = type != USER_DEFINED
            normalized = not special and SPACE in token
            found.append({"id": i, "content": token, **flags, "normalized": normalized, "special": special})
    return found


def around(keys: Keys, before: list[str], behind: list[str]) -> dict[str, object] | None:
    """What puts tokens before and behind a text."""
    if not before and not behind:
        return None
    first, last = (
        [{"SpecialToken": {"id": token, "type_id": 0}} for token in side] for side in (before, behind)
    )
    single: list[object] = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    second: list[object] = [{"Sequence": {"id": "B", "type_id": 0}}]
    tokens = {t: {"id": t, "ids": [keys.ids[t]], "tokens": [t]} for t in (*before, *behind)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": tokens,
    }


def config_of(keys: Keys, metadata: Mapping[str, object], *, adds_bos: bool) -> dict[str, object]:
    """Named tokens and chat templates."""
    config: dict[str, object] = {"add_bos_token": adds_bos}
    names = {
        "bos": "bos",
        "eos": "eos",
        "unk": "unknown",
        "sep": "seperator",
        "pad": "padding",
        "mask": "mask",
    }
    for ours, theirs in names.items():
        if token := keys.token(theirs):
            config[f"{ours}_token"] = token
    prefix = "tokenizer.chat_template"
    templates = {"default": metadata[prefix]} if prefix in metadata else {}
    templates |= {
        key.removeprefix(f"{prefix}."): value
        for key, value in metadata.items()
        if key.startswith(f"{prefix}.")
    }
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config
