"""Arguments that a model writes as plain text, between tags: what JSON they are, the tool's schema says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pellucid.server.parsers.base import overlap
from pellucid.server.parsers.literals import NO_VALUE, as_json, literal
from pellucid.server.parsers.script import Reading, ScriptParser

Schema = Mapping[str, object]
KINDS = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def parameters_of(tools: Sequence[Mapping[str, object]], name: str) -> dict[str, Schema]:
    """The schemas of a function's parameters, by name; of those that have one."""
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping):
            return {str(key): each for key, each in properties.items() if isinstance(each, Mapping)}
    return {}


def types_of(schema: Schema | None) -> set[str]:
    """What a value may be, in JSON schema's words; an empty set if that is not said."""
    if schema is None:
        return set()
    said = schema.get("type")
    if isinstance(said, str):
        return {said}
    if isinstance(said, list):
        return {each for each in said if isinstance(each, str)}
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        types = [types_of(each) for each in choices if isinstance(each, Mapping)]
        return set().union(*types) if all(types) else set()
    values = schema.get("enum")
    return {"string"} if isinstance(values, list) and all(isinstance(v, str) for v in values) else set()


def value_of(text: str, types: set[str]) -> object:
    """The value that a model means by `text`; the text itself where it is of none of the types."""
    if types == {"string"}:
        return text
    try:
        value = literal(text.strip())
    except NO_VALUE:
        return text
    is_right = not types or any(type(value) in KINDS.get(each, ()) for each in types)
    return value if is_right else text


class TypedParser(ScriptParser):
    """Tells parameters one by one, as members of an object; texts as they are written."""

    def _begin_parameters(self) -> None:
        self._num_parameters = 0
        self._argue("{")

    def _end_parameters(self) -> None:
        self._argue("}")

    def _parameter(self, key: str, schema: Schema | None, ends: Sequence[str], trims: str) -> Reading[str]:
        """Read a value and the tag behind it, and tell both; the tag, or nothing at the end of the text.

        trims: the white space around the value that is not the value's, once on either side.
        """
        self._drop()
        self._argue(f"{', ' if self._num_parameters else ''}{as_json(key)}: ")
        self._num_parameters += 1
        types = types_of(schema)
        if types == {"string"}:
            return (yield from self._text_value(ends, trims))
        text, tag = yield from self._whole_value(ends)
        if trims:
            text = text.removeprefix(trims).removesuffix(trims)
        self._argue(as_json(value_of(text, types)) if tag else text.strip())  # as it is, if it was cut off
        return tag

    def _whole_value(self, ends: Sequence[str]) -> Reading[tuple[str, str]]:
        while True:
            found = [(at, tag) for tag in ends if (at := self._held.find(tag)) >= 0]
            if found or self._is_over:
                at, tag = min(found, default=(self._surely(ends), ""))
                text, self._at = self._held[:at], at + len(tag) if tag else len(self._held)
                self._drop()
                return text, tag
            yield

    def _text_value(self, ends: Sequence[str], trims: str) -> Reading[str]:
        self._argue('"')
        if trims:
            yield from self._accept(trims)
            self._drop()
        while True:
            found = [(at, tag) for tag in ends if (at := self._held.find(tag)) >= 0]
            if found or self._is_over:
                at, tag = min(found, default=(self._surely(ends), ""))
                self._argue(as_json(self._held[:at].removesuffix(trims))[1:-1] + ('"' if tag else ""))
                self._at = at + len(tag) if tag else len(self._held)
                self._drop()
                return tag
            safe = self._held[: self._surely(ends)].removesuffix(trims)
            self._argue(as_json(safe)[1:-1])
            self._held = self._held[len(safe) :]
            yield

    def _surely(self, ends: Sequence[str]) -> int:
        """How many characters of what is held are the value's, whatever comes."""
        return len(self._held) - max([overlap(self._held, tag) for tag in ends])
