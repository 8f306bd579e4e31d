"""The tools of a chat: what a request may say of them, and what an answer that must call one looks like."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pellucid.server.parsers.base import CallFrame, tool_parser
from pellucid.server.parsers.compose import NONE
from pellucid.server.parsers.pythonic import keywords

Tool = Mapping[str, object]
NAME = re.compile(r"[\w.-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Which tools an answer may call, and whether it must."""

    tools: tuple[Tool, ...] = ()  # empty if none may be called
    choice: str = "none"  # auto, none, required, or the name of a function
    is_parallel: bool = True  # may it call several?

    @classmethod
    def from_request(
        cls, tools: Sequence[Tool] | None, choice: object, *, parallel_tool_calls: bool | None
    ) -> ToolUse:
        """Raises ValueError for tools and choices that cannot be understood."""
        names = [_name(i, tool) for i, tool in enumerate(tools or ())]
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            allowed, choice = _allowed(choice.get("allowed_tools"), names)
            tools, names = [tool for tool in tools or () if _function(tool).get("name") in allowed], allowed
        chosen = _choice(choice)
        if chosen is None:
            chosen = "auto" if names else "none"
        if chosen not in ("auto", "none", "required", *names):
            raise ValueError(f"tool_choice names {chosen!r}; tools has {', '.join(names) or 'none'}")
        if chosen == "none" or (chosen == "auto" and not names):
            return cls()
        if not names:
            raise ValueError(f"tool_choice is {chosen!r}, which needs tools")
        return cls(tools=tuple(tools or ()), choice=chosen, is_parallel=parallel_tool_calls is not False)

    @property
    def is_forced(self) -> bool:
        return self.choice not in ("auto", "none")

    def check_parser(self, parser: str, *, is_auto_enabled: bool) -> None:
        """Raise ValueError if `parser` cannot find the calls, or may not."""
        if self.tools and parser == NONE:
            raise ValueError(
                "tools cannot be called, for this model's chat template does not show how; "
                "start the server with --tool-call-parser"
            )
        if self.is_forced and tool_parser(parser).frame is None:
            raise ValueError(
                f"tool_choice {self.choice!r} cannot be met: calls that the tool call parser {parser!r} "
                "finds cannot be forced; use 'auto'"
            )
        if self.choice == "auto" and not is_auto_enabled:
            raise ValueError("tool_choice 'auto' is turned off on this server (--no-enable-auto-tool-choice)")


def forced_calls(use: ToolUse, parser: str) -> str | None:
    """xgrammar's structural tag for an answer that must call: one call or several, in the model's own words.

    None if the answer is free to be anything.  A named function is called once.
    """
    frame = tool_parser(parser).frame
    if not use.is_forced or frame is None:
        return None
    tools = use.tools
    if use.choice != "required":
        tools = [tool for tool in tools if _function(tool).get("name") == use.choice]
        use = replace(use, is_parallel=False)
    return _structural_tag(_behind(frame, _calls(_tags(map(_function, tools), frame), use, frame)))


def strict_calls(use: ToolUse, parser: str) -> str | None:
    """xgrammar's structural tag for an answer that may call: any text, in which calls are of these tools.

    The arguments of strict ones are of their schemas.  None if there is no such, or calls are forced anyway.
    """
    frame = tool_parser(parser).frame
    functions = [_function(tool) for tool in use.tools]
    if use.choice != "auto" or frame is None or not any(map(_is_strict, functions)):
        return None
    tags = _tags((each if _is_strict(each) else {"name": each["name"]} for each in functions), frame)
    if frame.trigger is None:
        first = re.escape((frame.opening or frame.begin)[0])
        other = frame.otherwise or {"type": "regex", "pattern": rf"(\s*[^\s{first}][\s\S]*)?"}
        return _structural_tag(_behind(frame, {"type": "or", "elements": [_calls(tags, use, frame), other]}))
    if frame.opening:
        tags = [_calls(tags, use, frame)]
    free = {"type": "triggered_tags", "triggers": [frame.trigger], "tags": tags}
    return _structural_tag({**free, "stop_after_first": not use.is_parallel})


def _structural_tag(form: Mapping[str, object]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def _behind(frame: CallFrame, form: Mapping[str, object]) -> Mapping[str, object]:
    """The same behind what the model may say before."""
    return form if frame.before is None else {"type": "sequence", "elements": [frame.before, form]}


def _calls(tags: Sequence[Mapping[str, object]], use: ToolUse, frame: CallFrame) -> dict[str, object]:
    """Nothing but calls, and at least one."""
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": frame.separator or "",
        "at_least_one": True,
        "stop_after_first": frame.separator is None or not use.is_parallel,
    }
    if not frame.opening:
        return calls
    return {"type": "tag", "begin": frame.opening, "content": calls, "end": frame.closing}


def _tags(functions: Iterable[Tool], frame: CallFrame) -> list[Mapping[str, object]]:
    """A call of each, in each way in which the model may begin it."""
    begins = (frame.begin, *frame.other_begins)
    return [_tag(function, begin, frame) for function in functions for begin in begins]


def _tag(function: Tool, begin: str, frame: CallFrame) -> Mapping[str, object]:
    name, schema = str(function["name"]), function.get("parameters") or {"type": "object"}
    assert isinstance(schema, Mapping)
    if frame.style == "python":
        content = keywords(name, schema)
    else:
        content = {"type": "json_schema", "json_schema": schema, "style": frame.style}
    # A name has letters alone that JSON and XML leave as they are.
    return {"type": "tag", "begin": begin.replace("NAME", name), "content": content, "end": frame.end}


def _name(index: int, tool: Tool) -> str:
    function = _function(tool)
    name, parameters = function.get("name"), function.get("parameters")
    if tool.get("type", "function") != "function" or not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"tools has at {index} no function with a name of letters, digits, '.', '_' and '-'; each must "
            'be {"type": "function", "function": {"name": ...}}'
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"tools has at {index} parameters that are no JSON schema (an object)")
    return name


def _function(tool: Tool) -> Tool:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _is_strict(function: Tool) -> bool:
    return function.get("strict") is True


def _allowed(said: object, names: Sequence[str]) -> tuple[list[str], str]:
    """Which of the functions may be called, and whether one must: auto or required."""
    listed = said.get("tools") if isinstance(said, Mapping) else None
    mode = said.get("mode") if isinstance(said, Mapping) else None
    if not isinstance(listed, list) or mode not in ("auto", "required"):
        raise ValueError('tool_choice allows {"mode": "auto" or "required", "tools": [functions of tools]}')
    chosen = [_function(each).get("name") if isinstance(each, Mapping) else None for each in listed]
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise ValueError(f"tool_choice allows {unknown or 'nothing'}; tools has {', '.join(names) or 'none'}")
    return [name for name in names if name in chosen], str(mode)


def _choice(choice: object) -> str | None:
    if choice is None or isinstance(choice, str):
        return choice
    name = _function(choice).get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            'tool_choice must be auto, none, required, {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
        )
    return name
