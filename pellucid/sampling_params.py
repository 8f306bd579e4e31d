"""What a request asks for: how to sample, when to stop, what to tell beside the text.

Plain data without torch.  `SamplingParams` makes Python's own numbers, lists and dicts of whatever it is
given, and refuses what contradicts itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from numbers import Integral, Real
from typing import Any, cast

INTEGERS = ("n", "top_k", "min_tokens")
INTEGERS_OR_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
NUMBERS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
TEXTS = {"stop": "a string or a list of strings", "bad_words": "a list of strings"}
TOKEN_IDS = ("stop_token_ids", "allowed_token_ids")
MOST_LOGPROBS = 1000  # tokens a place
NO_CONTAINERS = (str, bytes, bytearray, Mapping)  # of token ids or texts, though they have items


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, must be in [{low}, {high}]")


def _integer(name: str, value: object) -> int:
    """Python's own int of any library's integer; True is none."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} is {value!r}, must be an integer")
        value = int(value)
    _check_range(name, value, -(2**63), 2**63 - 1)
    return value


def _number(name: str, value: object) -> float:
    """Python's own float of any library's number."""
    if type(value) is float:
        return value
    if not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}, must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float, must be a number") from None


def _items(name: str, value: object, meaning: str) -> list[Any]:
    """What a list, tuple, set, range, array or view has in it."""
    if isinstance(value, Collection) and not isinstance(value, NO_CONTAINERS):
        with suppress(TypeError):  # of an array without dimensions
            items = list(cast(Collection[Any], value))
            return sorted(items) if isinstance(value, Set) else items
    raise ValueError(f"{name} is {value!r:.100}, must be {meaning}")


def _token_ids(name: str, value: object) -> list[int]:
    """Token ids of which the order means nothing, ascending, each once."""
    items = _items(name, value, "a list of integer token ids")
    return sorted({_token_id(name, item) for item in items} if {*map(type, items)} - {int} else {*items})


def _token_id(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} has {value!r:.100}, must be integer token ids")
    return int(value)


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {value!r:.100}, must be a dict from integer token ids to numbers")
    biases: dict[int, float] = {}
    for token, bias in cast(Mapping[Any, Any], value).items():
        plain = token if type(token) is int else _token_id("logit_bias", token)
        biases[plain] = bias if type(bias) is float else _number(f"logit_bias of token {token}", bias)
    return biases


def _plain(value: Any) -> Any:
    """A copy of what every process can read."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral) and -(2**63) <= int(value) < 2**63:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    raise ValueError(f"extra_args has {value!r:.100}, must be numbers, texts, lists and dicts of such")


def _texts(name: str, value: object) -> list[str]:
    texts = _items(name, [value] if isinstance(value, str) else value, TEXTS[name])
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{name} has {text!r:.100}, must be strings; give token ids as stop_token_ids")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{name} has {text!r}, which no text contains: half of a character")
    return [str(text) for text in texts]


# Languages that a text may be asked to be of: the types of what describes them, and in words.
STRUCTURES: dict[str, type | tuple[type, ...]] = {
    "json": (str, dict),
    "regex": str,
    "choice": (list, tuple),
    "grammar": str,
    "json_object": bool,
    "structural_tag": str,
}
MEANINGS = {
    "json": "a JSON schema, a dict or its text",
    "regex": "a regular expression",
    "choice": "a list of texts, none of them empty",
    "grammar": "EBNF, a text with the rule root",
    "json_object": "True",
    "structural_tag": "xgrammar's JSON, a text",
}


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What language a text must be of; names are vLLM's.  Give exactly one.

    Raises ValueError for anything else.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # matches the whole text
    choice: list[str] | None = None  # one of these texts
    grammar: str | None = None  # EBNF, with the rule `root`
    json_object: bool | None = None  # any JSON object
    structural_tag: str | None = None  # xgrammar's JSON: free text with constrained parts
    # The tokens that thinking begins and ends with, such as <think> and </think>: what lies between them is
    # free.  The first is None if the prompt has begun it.
    thinking: tuple[str | None, str] | None = None

    def __post_init__(self) -> None:
        kind = self.kind
        value: Any = getattr(self, kind)
        is_right = isinstance(value, STRUCTURES[kind]) and (kind == "json" or bool(value))
        if kind == "choice":
            is_right = is_right and all(isinstance(text, str) and text for text in value)
        if not is_right:
            raise ValueError(f"structured_outputs.{kind} is {value!r:.100}, must be {MEANINGS[kind]}")

    @property
    def kind(self) -> str:
        """Which one is given."""
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs has {said}, must have one of {', '.join(STRUCTURES)}")
        return given[0]

    @property
    def text(self) -> str:
        """The description itself, as one text."""
        value: Any = getattr(self, self.kind)
        if self.kind == "json_object":
            return ""
        return value if isinstance(value, str) else dumps(value)


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen; names and meaning are vLLM's.

    Raises ValueError, naming the value and its range, for anything out of range.
    """

    n: int = 1  # completions per prompt
    presence_penalty: float = 0.0  # subtracted once from the logit of every token generated so far
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the generated text
    repetition_penalty: float = (
        1.0  # divides positive (multiplies negative) logits of seen tokens, prompt too
    )
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with this much probability
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens with at least this share of the most likely one's probability
    seed: int | None = None  # fixes this request's noise, whatever runs beside it
    stop: str | list[str] | None = None  # strings that end the text
    stop_token_ids: list[int] | None = None  # tokens that end the text
    ignore_eos: bool = False  # go on after the model's end-of-text token
    max_tokens: int | None = 16  # most tokens to generate; None is up to max_model_len
    min_tokens: int = 0  # no end-of-text or stop token before this many
    logprobs: int | None = None  # most likely tokens to report per generated token
    prompt_logprobs: int | None = None  # the same for every prompt token
    detokenize: bool = True  # produce text, not only ids
    skip_special_tokens: bool = True  # leave special tokens out of the text
    include_stop_str_in_output: bool = False  # keep the stop string in the text
    logit_bias: dict[int, float] | None = None  # added to the logits of these token ids
    allowed_token_ids: list[int] | None = None  # only these may be generated
    bad_words: str | list[str] | None = None  # strings whose last token may not be generated after the others
    structured_outputs: StructuredOutputsParams | None = None  # the text is of a language: JSON, a regex, ..
    extra_args: dict[str, Any] | None = None  # features' own, which code outside this package has registered

    def __post_init__(self) -> None:
        self._normalize()
        if self.top_k == -1:
            self.top_k = 0
        self.validate()

    def _normalize(self) -> None:
        """Make all fields Python's own numbers, lists and dicts, which every process and library can read.

        The lists are the parameters' own: whoever has given them may change theirs.
        """
        for name in INTEGERS:
            setattr(self, name, _integer(name, getattr(self, name)))
        for name in INTEGERS_OR_NONE:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _integer(name, value))
        for name in NUMBERS:
            setattr(self, name, _number(name, getattr(self, name)))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be True or False")
        for name in TEXTS:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _texts(name, value))
        for name in TOKEN_IDS:
            if (value := getattr(self, name)) is not None:
                setattr(self, name, _token_ids(name, value))
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)
        if self.extra_args is not None:
            given: Any = self.extra_args
            if not isinstance(given, dict):
                raise ValueError(f"extra_args is {given!r:.100}, must be a dict by feature")
            self.extra_args = _plain(given)

    def validate(self) -> None:
        """Raise ValueError for the first field out of range."""
        _check_range("n", self.n, 1, 1024)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, must be above 0 and finite")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, must be at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(
                f"top_k is {self.top_k}, must be an integer of at least 1 (or 0 or -1 to keep all tokens)"
            )
        _check_range("min_p", self.min_p, 0, 1)
        self._validate_lengths()
        self.check_token_ids()

    def _validate_lengths(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, must be at least 1 (or None)")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise ValueError(f"min_tokens is {self.min_tokens}, must be in [0, max_tokens={self.max_tokens}]")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _check_range(name, count, 0, MOST_LOGPROBS)
        if any(not s for s in self.stop or ()):
            raise ValueError("stop contains an empty string, which would end every text; remove it")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need text; set detokenize=True or use stop_token_ids")
        if any(not word.strip() for word in self.bad_words or ()):
            raise ValueError("bad_words contains an empty string; remove it")
        wish: Any = self.structured_outputs
        if wish is not None and not isinstance(wish, StructuredOutputsParams):
            raise ValueError(f"structured_outputs is {wish!r:.100}, must be StructuredOutputsParams")

    def check_token_ids(self, vocab_size: int | None = None) -> None:
        """Raise ValueError for token ids that are empty, or not in a vocabulary of this size."""
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError(
                "allowed_token_ids is empty, so no token could be generated; list some or leave it out"
            )
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias of token {token} is {bias}, must be in [-100, 100]")
        high = 2**31 - 1 if vocab_size is None else vocab_size - 1
        for name in (*TOKEN_IDS, "logit_bias"):
            if tokens := getattr(self, name):
                for token in (min(tokens), max(tokens)):
                    _check_range(f"a token id in {name}", token, 0, high)

    @property
    def shows_tokens_at_once(self) -> bool:
        """Must each token be looked at when it comes, also if the user only wants the whole?"""
        return bool(self.stop) or self.logprobs is not None or self.prompt_logprobs is not None

    def clone(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced (and validated again)."""
        return SamplingParams(**{**self.__dict__, **changes})  # type: ignore[arg-type]
