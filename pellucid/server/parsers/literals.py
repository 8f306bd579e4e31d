"""Values as models write them: JSON, or what Python calls the same."""

from __future__ import annotations

import ast
import json
import warnings

WORDS = {"true": True, "false": False, "null": None}  # for those who mix the two
# What `literal` and `value_of` raise for what is no value.
NO_VALUE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def literal(text: str) -> object:
    """The value of a text.  Raises one of NO_VALUE for what JSON could not say."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        value = value_of(parsed(text.strip()))
        json.dumps(value, allow_nan=False)
        return value


def parsed(text: str) -> ast.expr:
    """Python's syntax tree, in which unknown escapes are as they are written.  Raises one of NO_VALUE."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text, mode="eval").body


def value_of(node: ast.expr) -> object:
    """The value of Python's syntax tree.  Raises one of NO_VALUE for anything but a literal."""
    match node:
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [value_of(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else ast.literal_eval(key) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key is no text")
            return dict(zip(names, map(value_of, values), strict=True))
        case _:
            return ast.literal_eval(node)


def as_json(value: object) -> str:
    """As readable as can be: half of a character has to stay an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if not any("\ud800" <= letter <= "\udfff" for letter in text) else json.dumps(value)


def _refuse(word: str) -> object:
    raise ValueError(f"{word} is no JSON")
