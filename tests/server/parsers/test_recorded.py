"""Answers as models have really written them are read as their reporters say, whole and cut everywhere.

recorded.json has them as they were published, with their white space; long ones are shortened between their
markup.  Where `is_retold`, the markup is as its reporter describes it, and the words around it are not a
model's.  BFCL stands for the results of the Berkeley Function-Calling Leaderboard (HuanzhiMao/BFCL-Result on
GitHub), in the folders of these dates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pellucid.server.parsers.base import REASONING_PARSERS, TOOL_PARSERS, ParserSetting
from pellucid.server.parsers.compose import NONE, Parsers
from tests.server.parsers.test_parsers import fed

SOME_TOOL = {"f": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One answer, and what it is."""

    model: str
    source: str
    text: str
    expected: list[list[str]]  # events, as `fed` shows them
    tools: str  # the names of the parsers
    reasoning: str = NONE
    prompt: str = ""
    functions: Mapping[str, Mapping[str, str]] = field(default_factory=SOME_TOOL.copy)  # types of parameters
    note: str = ""
    is_retold: bool = False

    @property
    def setting(self) -> ParserSetting:
        schemas = {
            name: {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
            for name, types in self.functions.items()
        }
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ]
        return ParserSetting(prompt=self.prompt, tools=tools)

    @property
    def parsers(self) -> Parsers:
        return Parsers(self.reasoning, self.tools)


ANSWERS = [Recorded(**each) for each in json.loads(Path(__file__).with_name("recorded.json").read_text())]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer.model}: {answer.source}")
def test_recorded_answers_are_read(answer: Recorded) -> None:
    expected = [tuple(event) for event in answer.expected]
    cuts = [[answer.text[:at], answer.text[at:]] for at in range(len(answer.text))]
    for pieces in ([answer.text], list(answer.text), *cuts):
        assert fed(answer.parsers.make(answer.setting), pieces) == expected, pieces


def test_every_parser_has_read_some() -> None:
    tools, thoughts = TOOL_PARSERS.load, REASONING_PARSERS.load
    assert {tools(NONE), *(tools(each.tools) for each in ANSWERS)} == set(map(tools, TOOL_PARSERS))
    assert {thoughts(each.reasoning) for each in ANSWERS} == set(map(thoughts, REASONING_PARSERS))
