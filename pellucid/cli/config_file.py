"""`--config FILE.yaml`: options as a file says them, before those of the command line, which go before it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

FLAG = "--config"
MODEL = "--model"  # is also a word of its own
ONLY_ON = ("--verbose", "--headless")  # have no --no-..
COMMANDS = ("serve", "run-batch")  # that take one


def with_file(argv: Sequence[str]) -> list[str]:
    """The same arguments with those of the file before them.  Raises ValueError for what is no such file."""
    given = list(argv)
    if not given or given[0] not in COMMANDS:
        return given
    given[1:] = map(_dashed, given[1:])
    for i, word in enumerate(given[1:], start=1):
        name, equals, path = word.partition("=")
        if name != FLAG:
            continue
        if not equals and i + 1 == len(given):
            raise ValueError("--config needs a file")
        path, end = (path, i + 1) if equals else (given[i + 1], i + 2)
        before, after = _split(given[1:i]), _split(given[end:])
        words, rest = before[0] + after[0], before[1] + after[1]
        names = {each.partition("=")[0] for each in rest} | ({MODEL} if words else set())
        return [given[0], *words, *_arguments(_read(Path(path)), names), *rest]
    return given


def _dashed(word: str) -> str:
    """vLLM takes `--max_num_seqs`, too."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first option, and the rest.

    The first are the model, and must not stand behind an option that takes all words that follow.
    """
    num = next((i for i, word in enumerate(given) if word.startswith("-")), len(given))
    return given[:num], given[num:]


def _read(path: Path) -> Mapping[object, object]:
    import yaml

    if not path.is_file():
        raise ValueError(f"--config is {str(path)!r}, which is no file")
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(said, Mapping):
        raise ValueError(f"--config {path} has no options, must be lines such as `max-model-len: 4096`")
    return said


def _arguments(said: Mapping[object, object], names: set[str]) -> Iterator[str]:
    """What the command line says itself, it alone says."""
    for name, value in said.items():
        flag = "--" + str(name).replace("_", "-")
        if flag in names or value in (None, []) or (flag in ONLY_ON and value is False):
            continue
        match value:
            case bool():
                yield flag if value else f"--no-{flag[2:]}"
            case list():
                yield flag
                yield from (json.dumps(each) if isinstance(each, Mapping) else str(each) for each in value)
            case Mapping():
                yield f"{flag}={json.dumps(value)}"
            case _:
                yield f"{flag}={value}"
