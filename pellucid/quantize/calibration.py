"""Texts to learn from and to measure with: a file's, the bundled model's own, or what a model has written.

Of a file the last tenth is held out.  Knows no engine: what a model writes itself comes as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pellucid.quantize.run import Samples
from pellucid.text.chat import render_chat
from pellucid.text.tokenizer import Tokenizer

ASSETS = Path(__file__).parent.parent / "assets" / "sprout"
BUNDLED, BUNDLED_HELDOUT = ASSETS / "calibration.jsonl", ASSETS / "eval" / "python_bpb.jsonl"
HELDOUT_SHARE = 10  # one of so many


def of_file(path: Path, tokenizer: Tokenizer, *, num: int, length: int) -> Samples:
    """A text, or JSON lines with `text` or `messages`: at most `num` samples of at most `length` tokens.

    Raises ValueError, naming file and line, for what is neither.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--calibration {path} cannot be read ({error})") from None
    if path.suffix == ".jsonl":
        texts = [text_of(line, f"{path}, line {i}", tokenizer) for i, line in lines_of(content)]
        learned, heldout = split(texts)
        ids = [piece for text in learned for piece in windows(encoded(tokenizer, [text])[0], length)]
        return samples(path.name, ids[:num], heldout[:num], tokenizer, length)
    cut = content.rfind("\n", 0, len(content) * (HELDOUT_SHARE - 1) // HELDOUT_SHARE) + 1
    learned, heldout = content[:cut] or content, content[cut:]
    ids = windows(encoded(tokenizer, [learned])[0], length)[:num]
    pieces = windows(encoded(tokenizer, [heldout])[0], length)[:num]
    return of_ids(path.name, ids, pieces, tokenizer)


def of_bundled(tokenizer: Tokenizer, *, num: int, length: int) -> Samples:
    """The bundled model's training tasks, and Python that it was not trained on."""
    learned, heldout = (
        [text_of(line, f"{path.name}, line {i}", tokenizer) for i, line in lines_of(path.read_text("utf-8"))]
        for path in (BUNDLED, BUNDLED_HELDOUT)
    )
    ids = [ids[:length] for ids in encoded(tokenizer, learned[:num])]
    return samples("the bundled model's training tasks", ids, heldout, tokenizer, length)


def of_ids(
    name: str, learned: Sequence[list[int]], heldout: Sequence[list[int]], tokenizer: Tokenizer | None
) -> Samples:
    """Token ids as they are; what is held out measures nothing without a tokenizer."""
    if not learned:
        raise ValueError("there is no text to calibrate with; give one with --calibration FILE")
    heldout = [ids for ids in heldout if len(ids) > 1]
    if tokenizer is None or not heldout:
        return Samples(name=name, learned=learned)
    num_bytes = sum(len(tokenizer.decode(ids, skip_special_tokens=False).encode()) for ids in heldout)
    return Samples(name=name, learned=learned, heldout=heldout, heldout_bytes=max(1, num_bytes))


def samples(
    name: str, learned: Sequence[list[int]], heldout: Sequence[str], tokenizer: Tokenizer, length: int
) -> Samples:
    return of_ids(name, learned, [ids[:length] for ids in encoded(tokenizer, heldout)], tokenizer)


def split(texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """All but the last tenth, and that; of few texts none is held out."""
    cut = len(texts) - len(texts) // HELDOUT_SHARE
    return texts[:cut], texts[cut:]


def lines_of(content: str) -> Iterable[tuple[int, str]]:
    return ((i, line) for i, line in enumerate(content.splitlines(), start=1) if line.strip())


def text_of(line: str, where: str, tokenizer: Tokenizer) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    match entry:
        case {"text": str(text)}:
            return text
        case {"messages": [{"role": _}, *_] as messages}:
            return render_chat(tokenizer, messages, add_generation_prompt=False)
    kind = ", ".join(entry) if isinstance(entry, Mapping) else type(entry).__name__
    raise ValueError(f'{where} has {kind}, must have {{"text": ...}} or {{"messages": [...]}}')


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer.encode_batch(texts, add_special_tokens=False) if texts else []


def windows(ids: list[int], length: int) -> list[list[int]]:
    """Pieces of `length` tokens, the last one perhaps shorter."""
    return [ids[i : i + length] for i in range(0, len(ids), length)]
