"""Text to token ids and back, from a checkpoint's own files.

`tokenizer.json` is read with the `tokenizers` library alone, which takes a fraction of the time of importing
transformers; transformers is asked only where that file is missing.  Knows nothing about requests or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import tokenizers

from pellucid.text.pieces import can_be_cut, pieces_of
from pellucid.text.token_bytes import LeadingSpace, PieceDecoder
from pellucid.text.tokenizer_config import TokenizerConfig

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

SHORT = 4096  # characters or token ids


def check_text(name: str, *texts: str) -> None:
    """Raise ValueError if one of these has half of a character: JSON can spell it, UTF-8 cannot."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half of a character (a surrogate), which no text contains") from None


class Vocabulary(Protocol):
    """What a tokenizer library must offer; `special_ids` are the ids left out of plain text."""

    special_ids: frozenset[int]
    piece_decoder: PieceDecoder | None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def id_to_piece(self, token_id: int) -> str | None: ...
    def piece_to_id(self, piece: str) -> int | None: ...
    def size(self) -> int: ...


class Tokenizer:
    """A checkpoint's tokenizer: encode, decode, special tokens and chat templates."""

    def __init__(self, vocabulary: Vocabulary, config: TokenizerConfig) -> None:
        self.config = config
        self.special_tokens = config.special_tokens
        self.special_ids = vocabulary.special_ids
        self._vocabulary = vocabulary
        self._bytes_of_id: dict[int, bytes] = {}
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        first_ids = vocabulary.encode_batch(["a"], True)[0][:1]
        self._library_adds_bos = self.bos_token_id is not None and first_ids == [self.bos_token_id]
        self._adds_bos = self._library_adds_bos if config.add_bos_token is None else config.add_bos_token

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer in a checkpoint folder (or of a tokenizer.json given by its own path).

        Python code in the folder is never run.  Raises ValueError if it holds no tokenizer that can be read.
        """
        path = Path(path)
        folder = path.parent if path.is_file() else path
        file = folder / "tokenizer.json"
        if file.is_file():
            vocabulary: Vocabulary = _FastVocabulary(_read_tokenizer_json(file))
        else:
            vocabulary = _from_transformers(folder)
        return cls(vocabulary, TokenizerConfig.read(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; text that already begins with the bos token does not get a second one."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode many texts at once, on several cores.  Raises ValueError for what no text contains."""
        try:
            batch = self._vocabulary.encode_batch(texts, add_special_tokens)
        except TypeError:
            check_text("a text", *texts)
            raise
        return [self._with_one_bos(ids) for ids in batch] if add_special_tokens else batch

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids beyond the vocabulary (padded embeddings) have none."""
        return self._vocabulary.decode(token_ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id (`Ġhello`), or None."""
        return self._vocabulary.id_to_piece(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._vocabulary.piece_to_id(token)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest id, added tokens included; the embedding may be padded beyond it."""
        return self._vocabulary.size()

    @property
    def leading_space(self) -> LeadingSpace | None:
        """How a text's first space is treated; None if tokens do not spell bytes (see `token_bytes`)."""
        decoder = self._vocabulary.piece_decoder
        return None if decoder is None else decoder.leading_space

    @cached_property
    def longest_token(self) -> int | None:
        """Most characters of a text that one token stands for; None if tokens do not spell bytes."""
        if self._vocabulary.piece_decoder is None:
            return None
        return max(len(self.id_to_token(i) or "") for i in range(self.vocab_size))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token contributes to a text; half a character is possible."""
        known = self._bytes_of_id.get(token_id)
        if known is None:
            known = self._bytes_of_id[token_id] = self._find_bytes(token_id)
        return known

    def spell_all(self) -> list[bytes]:
        """What every token contributes to a text that is shown without special tokens; those: nothing."""
        return [
            b"" if token in self.special_ids else self.token_bytes(token) for token in range(self.vocab_size)
        ]

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special ones too; U+FFFD stands for half a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def chat_template(self, *, tools: bool = False) -> str | None:
        """The template to render chats with, the `tool_use` one if there is one and tools are given."""
        templates = self.config.chat_templates
        if tools and "tool_use" in templates:
            return templates["tool_use"]
        return templates.get("default")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._vocabulary.piece_to_id(token)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Follow the config's add_bos_token where the library's post-processor says otherwise."""
        bos = self.bos_token_id
        if bos is None:
            return ids
        if not self._adds_bos:
            return ids[1:] if self._library_adds_bos else ids
        if ids[:1] != [bos]:
            return [bos, *ids]
        return ids[1:] if ids[:2] == [bos, bos] else ids

    def _find_bytes(self, token_id: int) -> bytes:
        decoder = self._vocabulary.piece_decoder
        if decoder is None:
            return self._vocabulary.decode([token_id], False).encode()
        piece = self._vocabulary.id_to_piece(token_id)
        return b"" if piece is None else decoder.to_bytes(piece)


class _FastVocabulary:
    """A tokenizer.json in the `tokenizers` library.

    Its methods for one text hold the interpreter's lock, those for batches do not, but wake its threads.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._can_be_cut = can_be_cut(tokenizer)
        self._around = _around(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.piece_decoder: PieceDecoder | None = None
        if tokenizer.decoder is not None:
            # The decoder's pickled state is its JSON, without the vocabulary's megabytes.
            self.piece_decoder = PieceDecoder.from_decoder_json(tokenizer.decoder.__getstate__())

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if len(texts) == 1 and len(texts[0]) <= SHORT:
            return [self._tokenizer.encode(texts[0], add_special_tokens=add_special_tokens).ids]
        if not self._can_be_cut or self._around is None:
            batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in batch]
        before, behind = self._around if add_special_tokens else ([], [])
        cut = [list(pieces_of(text)) for text in texts]
        encoded = iter(self._tokenizer.encode_batch_fast([*chain(*cut)], add_special_tokens=False))
        return [[*before, *chain(*[next(encoded).ids for _ in pieces]), *behind] for pieces in cut]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(ids) <= SHORT:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def id_to_piece(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def piece_to_id(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def size(self) -> int:
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()  # some may be left out
        return max(ids, default=-1) + 1


class _TransformersVocabulary:
    """A tokenizer written in Python, as transformers offers it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.piece_decoder: PieceDecoder | None = None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [i for i in ids if i < len(self._tokenizer)]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens))

    def id_to_piece(self, token_id: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens([token_id])[0] if token_id < self.size() else None

    def piece_to_id(self, piece: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(piece)
        return token_id if isinstance(token_id, int) and self.id_to_piece(token_id) == piece else None

    def size(self) -> int:
        return len(self._tokenizer)


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens that come before and behind every text; None if that cannot be told."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    places = [i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare]
    if len(places) != 1:
        return None
    return whole[: places[0]], whole[places[0] + len(bare) :]


def _read_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for this
        raise ValueError(f"{file} is no tokenizer ({error}); download the checkpoint again") from error


def _from_transformers(folder: Path) -> Vocabulary:
    """Ask transformers to read (and often convert) a tokenizer that has no tokenizer.json."""
    try:
        from transformers.models.auto.tokenization_auto import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json; pip install transformers to read its tokenizer, or add the file"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the library raises whatever the file's reader raised
        raise ValueError(
            f"{folder} has no tokenizer.json, nor one that transformers reads; name another folder's with "
            f"tokenizer=..., or serve token ids with skip_tokenizer_init=True ({error})"
        ) from error
    if tokenizer.is_fast:
        return _FastVocabulary(tokenizer.backend_tokenizer)
    return _TransformersVocabulary(tokenizer)
