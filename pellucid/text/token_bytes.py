"""What bytes each vocabulary piece stands for, read off a tokenizer's decoder.

Two families cover nearly every checkpoint: byte-level BPE, whose pieces spell bytes in a printable alphabet,
and metaspace (sentencepiece) vocabularies, with U+2581 for a space and `<0xE4>` for a raw byte.  Knows one
piece at a time: joining bytes to text is the detokenizer's work.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence

METASPACE = "\u2581"


class LeadingSpace(enum.Enum):
    """What becomes of the space that metaspace tokenizers put before the first word of a text."""

    KEEP = "keep"
    DROP_ONE = "drop one"  # one space at the very beginning
    DROP_IN_FIRST_PIECE = "drop in first piece"  # every space of the first piece

    def trim(self, first_piece: bytes) -> bytes:
        """The bytes that remain of the first piece of a text."""
        if self is LeadingSpace.DROP_ONE:
            return first_piece.removeprefix(b" ")
        if self is LeadingSpace.DROP_IN_FIRST_PIECE:
            return first_piece.replace(b" ", b"")
        return first_piece


class PieceDecoder:
    """Turns a vocabulary piece into bytes; the bytes of a text's pieces, joined, are the text in UTF-8."""

    def __init__(self, to_bytes: Callable[[str], bytes], leading_space: LeadingSpace) -> None:
        self.to_bytes = to_bytes
        self.leading_space = leading_space

    @classmethod
    def from_decoder_json(cls, text: str | bytes) -> PieceDecoder | None:
        """Read the `decoder` entry of a tokenizer.json; None if it is of neither family."""
        spec = json.loads(text)
        if not isinstance(spec, dict):
            return None
        if spec.get("type") == "ByteLevel":
            return cls(_byte_level_bytes, LeadingSpace.KEEP)
        if spec.get("type") == "Metaspace" and spec.get("replacement") == METASPACE:
            keep = spec.get("prepend_scheme") == "never"
            return cls(_metaspace_bytes, LeadingSpace.KEEP if keep else LeadingSpace.DROP_IN_FIRST_PIECE)
        if spec.get("type") == "Sequence":
            return cls._from_steps(spec["decoders"])
        return None

    @classmethod
    def _from_steps(cls, steps: Sequence[Mapping[str, object]]) -> PieceDecoder | None:
        """The decoders of Llama 2, Mistral and Gemma: replace, byte fallback, fuse and perhaps strip."""
        kinds = [step["type"] for step in steps]
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
            return None
        if steps[0].get("pattern") != {"String": METASPACE} or steps[0].get("content") != " ":
            return None
        if kinds[3:] == []:
            return cls(_byte_fallback_bytes, LeadingSpace.KEEP)
        strip = steps[3]
        if kinds[3:] == ["Strip"] and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0):
            return cls(_byte_fallback_bytes, LeadingSpace.DROP_ONE)
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable spelling of the 256 bytes: Latin-1 where printable, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    """Added tokens may hold characters outside the alphabet (a plain space); those stand for themselves."""
    try:
        return bytes([_BYTE_OF_CHAR[c] for c in piece])
    except KeyError:
        return piece.encode()


def _metaspace_bytes(piece: str) -> bytes:
    return piece.replace(METASPACE, " ").encode()


def _byte_fallback_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return piece.encode()
    return _metaspace_bytes(piece)
