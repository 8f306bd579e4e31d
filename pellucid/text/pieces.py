"""Cuts a long text where a tokenizer cuts it anyway: its pieces have together the tokens of the whole.

A pre-tokenizer splits a text by a pattern, and no token crosses such a split.  A line break between a visible
character and a letter (`PLACE`) is one, for every pattern whose alternatives are all in `SAFE`:

* No match contains the line break and the letter behind it, so a match ends between the two.
* A match to the left does not depend on what is behind the line break: it is the last of a run of white space
  of one character, so `\\s+(?!\\S)`, the only one that looks ahead, ends behind it in the piece, and where it
  does not match in the whole, `\\s+` does, which ends there, too.
* Matches to the right begin at the place, and nothing looks back.

Normal forms of Unicode neither change nor join a line break and an ASCII letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import tokenizers

PLACE = re.compile(r"[!-~]\n[A-Za-z]")
PIECE = 32_768  # characters
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
SAFE = (  # alternatives of the patterns of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2 to 3.5 and DeepSeek
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", CONTRACTIONS),
    *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
    *(r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", "[一-龥぀-ゟ゠-ヿ]+"),
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTIONS}?",
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
)
LONGEST_FIRST = sorted(SAFE, key=len, reverse=True)
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def can_be_cut(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the texts of this tokenizer may be cut by `pieces_of`."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(each.lstrip or each.rstrip or each.single_word or "\n" in each.content for each in added):
        return False
    normalizer, splitter = tokenizer.normalizer, tokenizer.pre_tokenizer
    if normalizer is not None and not _is_normal_form(json.loads(normalizer.__getstate__())):
        return False
    return splitter is not None and _is_safe(json.loads(splitter.__getstate__()))


def pieces_of(text: str) -> Iterator[str]:
    """The text in pieces of `PIECE` characters or a little more, where it has such places."""
    start = 0
    while len(text) - start > PIECE and (place := PLACE.search(text, start + PIECE)):
        yield text[start : place.end() - 1]
        start = place.end() - 1
    yield text[start:]


def _is_normal_form(normalizer: Mapping[str, object]) -> bool:
    if normalizer["type"] == "Sequence":
        parts = normalizer["normalizers"]
        return isinstance(parts, list) and all(map(_is_normal_form, parts))
    return normalizer["type"] in NORMAL_FORMS


def _is_safe(splitter: Mapping[str, object]) -> bool:
    """Whether it splits at every `PLACE`, or leaves that to another one, whatever is around the place."""
    match splitter:
        case {"type": "Sequence", "pretokenizers": [*parts]}:
            # The last one may be ByteLevel without a pattern, which splits nothing: another has to.
            return all(map(_is_safe, parts)) and any(map(_splits_lines, parts))
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return _has_safe_parts(pattern)
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case _:
            return False


def _splits_lines(splitter: Mapping[str, object]) -> bool:
    """Whether one of its matches ends at every `PLACE`: it has an alternative for white space."""
    match splitter:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return pattern.endswith(r"\s+")
        case {"type": "ByteLevel", "use_regex": True}:
            return True
        case _:
            return False


def _has_safe_parts(pattern: str) -> bool:
    """Whether a pattern is a choice of safe ones."""
    while pattern:
        part = next((each for each in LONGEST_FIRST if _begins_with(pattern, each)), None)
        if part is None:
            return False
        pattern = pattern[len(part) + 1 :]
    return True


def _begins_with(pattern: str, part: str) -> bool:
    return pattern == part or pattern.startswith(f"{part}|")
