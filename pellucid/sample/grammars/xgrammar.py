"""Grammars through the library xgrammar: pushdown automata over the vocabulary, compiled once a language."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import xgrammar

from pellucid.sample.grammars.base import GrammarSpec, Spelling

ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # a message's time, file and line
LONGEST = 400  # characters of a message
# Without a bound a weak model may write spaces for ever.
MAX_WHITESPACE = 20
# In a JSON schema: what holds schemas by names of the user's, what holds no schemas, and what refers to one.
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
DATA = ("const", "enum", "default", "examples")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class XGrammarMatcher:
    """Where a text stands."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def fill(self, masks: np.ndarray, place: int) -> None:
        self._matcher.fill_next_token_bitmask(masks, place)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @property
    def forced(self) -> bytes:
        try:
            return self._matcher.find_jump_forward_string().encode()
        except UnicodeError:  # it begins or ends within a character
            return b""

    @property
    def is_done(self) -> bool:
        return self._matcher.is_terminated()


class XGrammarLanguage:
    """A compiled grammar; matchers share it."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        self._grammar, self.num_bytes = grammar, grammar.memory_size_bytes

    def start(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._grammar)


class XGrammarBackend:
    """Compiles for one vocabulary, in one thread: the processors are the engine's."""

    def __init__(self, spelling: Spelling) -> None:
        tokens = xgrammar.TokenizerInfo(
            list(spelling.token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=spelling.vocab_size,
            stop_token_ids=list(spelling.stop_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XGrammarLanguage:
        try:
            return XGrammarLanguage(self._compile(spec))
        except (RuntimeError, TypeError, UnicodeError, RecursionError) as error:
            message = ORIGIN.sub("", str(error).strip())
            raise ValueError(message[:LONGEST]) from error

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, spec.text
        match spec.kind:
            case "json":
                check_references(text)
                return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
            case "json_object":  # an object of anything, where the library's own JSON may be any value
                schema = '{"type": "object", "additionalProperties": true}'
                return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
            case "regex":
                return compiler.compile_regex(text)
            case "choice":
                quoted = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
                return compiler.compile_grammar("root ::= " + " | ".join(quoted))
            case "grammar":
                return compiler.compile_grammar(text)
            case "structural_tag":
                check_references(text)
                return compiler.compile_structural_tag(text)
            case _:
                raise AssertionError(f"no kind of grammar is called {spec.kind!r}")


def check_references(text: str) -> None:
    """Raise ValueError for a reference that the library would take for any JSON at all, with a mere warning.

    text: a JSON schema, or a structural tag, which has some within.
    """
    try:
        pending: list[Any] = [json.loads(text)]
    except ValueError:
        return  # the library says what is wrong
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            for name in REFERENCES:
                _check_reference(name, part.get(name))
            named = [part.pop(name) for name in NAMED if isinstance(part.get(name), dict)]
            pending += [value for name, value in part.items() if name not in DATA]
            pending += [schema for schemas in named for schema in schemas.values()]


def _check_reference(name: str, target: object) -> None:
    is_followed = name == "$ref" and isinstance(target, str) and re.match("#$|#/.", target)
    if isinstance(target, str) and not is_followed:
        raise ValueError(
            f"{name} {target!r} is not followed: only $ref is, to places in the same schema, such as "
            "'#' and '#/$defs/name'"
        )
