"""Tool calls in Qwen's Hermes format: choose a tool and fill its arguments, answer from a tool's response,
and say so when no tool fits.

Half of the tools come from the catalogue, half are made up on the spot (`archive_ticket`, `run_plorix`), so
that the model reads the schema instead of remembering it.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from chat import Item, Json, Message, assistant, dumps, tool_call_text, user
from tasks.tool_catalog import COUNT, DATE, TOOLS, Maker, Param, Tool
from words import between, hex_string, phrase, pick, pseudo_word, word

_VERBS = (
    "create delete archive open close update fetch approve reject share rename start stop restart"
).split(" ")
_OBJECTS = (
    "task ticket invoice report project account document contract server job playlist recipe ticket "
    "backup database session lesson campaign shipment vehicle device channel album"
).split(" ")
_NO_TOOL = "None of the available tools can do that."
_PREFACES = ("", "", "", "", "Please use a tool. ", "Hi! ", "Can you help me? ")
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that uses tools.",
    "Use tools when they fit.",
)


@dataclass(frozen=True, slots=True)
class Call:
    """A request in words, the tool that serves it, and the arguments under that schema's names."""

    ask: str
    name: str
    schema: Json
    arguments: dict[str, Json]
    problem: str
    tool: Tool


def tool_call(rng: Random) -> Item:
    """Draw a request among one to four tools, and the call that serves it."""
    call = _draw_call(rng, _draw_tool(rng))
    return Item(
        task="tool_call",
        problems=(call.problem,),
        messages=_asked(rng, call.ask),
        tools=_among(rng, call, with_own=True),
        reasoning=_reason(call),
        reply=tool_call_text(call.name, call.arguments),
        kind="tool_call",
        answer={"name": call.name, "arguments": call.arguments},
    )


def two_calls(rng: Random) -> Item:
    """Draw one tool asked for twice, answered by two calls in one turn."""
    tool = _draw_tool(rng)
    names = _Names.draw(rng, tool)
    first, second = _draw_call(rng, tool, names), _draw_call(rng, tool, names)
    return Item(
        task="two_calls",
        problems=(first.problem, second.problem),
        messages=[user(f"{first.ask} {pick(rng, ('Also:', 'And:', 'Then:'))} {second.ask}")],
        tools=_among(rng, first, with_own=True),
        reasoning=f"{_reason(first)}\n{_reason(second)}",
        reply="\n".join(tool_call_text(call.name, call.arguments) for call in (first, second)),
        answer="",
    )


def tool_answer(rng: Random) -> Item:
    """Draw a served call with its response, and the sentence that answers from it."""
    call = _draw_call(rng, _tool_with_answer(rng))
    response: dict[str, Json] = {name: draw(rng) for name, draw in call.tool.returns.items()}
    told = [f"the {name.replace('_', ' ')} is {_spoken(value)}" for name, value in response.items()]
    sentence = " and ".join(told) + "."
    reply = sentence[0].upper() + sentence[1:]
    written = tool_call_text(call.name, call.arguments)
    if rng.random() < 0.3:
        written = f"<think>\n{_reason(call)}\n</think>\n\n{written}"
    served: Message = {"role": "tool", "content": dumps(response)}
    return Item(
        task="tool_answer",
        problems=(f"answer:{call.problem}:{dumps(response)}", call.problem),
        messages=[*_asked(rng, call.ask), assistant(written), served],
        tools=_among(rng, call, with_own=True),
        reasoning=f"The tool answered {', '.join(told)}.",
        reply=reply,
        answer=reply,
    )


def tool_none(rng: Random) -> Item:
    """Draw a request that none of the offered tools can serve."""
    call = _draw_call(rng, _draw_tool(rng))
    return Item(
        task="tool_none",
        problems=(f"none:{call.problem}",),
        messages=_asked(rng, call.ask),
        tools=_among(rng, call, with_own=False),
        reasoning="No tool fits this request.",
        reply=_NO_TOOL,
        answer=_NO_TOOL,
    )


def _tool_with_answer(rng: Random) -> Tool:
    while not (tool := TOOLS[int(rng.random() * len(TOOLS))]).returns:
        pass
    return tool


def offered_tools(rng: Random) -> list[Json]:
    """Draw one to three schemas, to lie beside a question that needs none."""
    return [_schema(rng, tool, _Names.draw(rng, tool)) for tool in _distinct(rng, between(rng, 1, 3), set())]


@dataclass(frozen=True, slots=True)
class _Names:
    """The names that one drawn schema gives to its tool and parameters."""

    tool: str
    params: dict[str, str]

    @classmethod
    def draw(cls, rng: Random, tool: Tool) -> _Names:
        params: dict[str, str] = {}
        for role, param in tool.params.items():
            free = [name for name in param.names if name not in params.values()]
            params[role] = pick(rng, free) if rng.random() < 0.5 else free[0]
        return cls(pick(rng, tool.names), params)


def _draw_tool(rng: Random) -> Tool:
    roll = rng.random()
    if roll < 0.6:
        return TOOLS[int(rng.random() * len(TOOLS))]
    return _office_tool(rng) if roll < 0.8 else _made_up_tool(rng)


def _office_tool(rng: Random) -> Tool:
    """Make a tool of a verb and an object, such as `archive_ticket(ticket_id, reason)`."""
    verb, thing = pick(rng, _VERBS), pick(rng, _OBJECTS)
    key = Param((f"{thing}_id", "id", thing), "integer", f"Id of the {thing}", lambda r: between(r, 1, 9999))
    name = Param(
        (f"{thing}_name", "name", "title"), "string", f"Name of the {thing}", lambda r: phrase(r, 1, 3)
    )
    asks = {
        "key": (f"{verb.capitalize()} {thing} {{key}}.", f"Please {verb} the {thing} with id {{key}}."),
        "name": (f"{verb.capitalize()} the {thing} named {{name}}.", f'{verb} the {thing} "{{name}}"'),
    }
    role = "key" if rng.random() < 0.5 else "name"
    params, ask = {role: key if role == "key" else name}, asks[role]
    if rng.random() < 0.4:
        extra = "due" if rng.random() < 0.5 else "limit"
        params[extra] = DATE if extra == "due" else COUNT
        tail = " on {due}" if extra == "due" else " with a limit of {limit}"
        ask = tuple(text.rstrip(".") + tail + "." for text in ask)
    about = (f"{verb.capitalize()} a {thing}", f"{verb.capitalize()}s one {thing}")
    return Tool((f"{verb}_{thing}", f"{thing}_{verb}"), about, params, ask, {"status": lambda r: "done"})


_MADE_UP_VALUES: tuple[tuple[str, Maker], ...] = (
    ("string", word),
    ("string", lambda rng: hex_string(rng, 6)),
    ("string", lambda rng: phrase(rng, 2, 3)),
    ("integer", lambda rng: between(rng, 0, 9999)),
    ("number", lambda rng: between(rng, 1, 99) + 0.5),
    ("boolean", lambda rng: rng.random() < 0.5),
    ("array", lambda rng: [word(rng) for _ in range(between(rng, 2, 3))]),
)


def _made_up_tool(rng: Random) -> Tool:
    """Make a tool of invented words, whose parameters the request names outright."""
    params: dict[str, Param] = {}
    # Different endings keep the names apart.
    for index, suffixes in enumerate(("abc", "pqr", "xyz")[: between(rng, 1, 3)]):
        kind, draw = _MADE_UP_VALUES[int(rng.random() * len(_MADE_UP_VALUES))]
        params[f"p{index}"] = Param((f"{word(rng)}_{pick(rng, suffixes)}",), kind, phrase(rng, 1, 3), draw)
    name = f"{pick(rng, ('run', 'do', 'call', 'get', 'set', 'make'))}_{pseudo_word(rng)}"
    said = [f"{param.names[0]} set to {{{role}}}" for role, param in params.items()]
    equal = [f"{param.names[0]}={{{role}}}" for role, param in params.items()]
    asks = (
        f"Call {name} with {' and '.join(said)}.",
        f"Run {name} with {', '.join(said)}.",
        f"Please use {name}: {', '.join(equal)}",
    )
    return Tool((name,), (phrase(rng, 2, 4).capitalize(),), params, asks, {"result": word})


def _draw_call(rng: Random, tool: Tool, names: _Names | None = None) -> Call:
    names = names or _Names.draw(rng, tool)
    ask = pick(rng, tool.asks)
    roles = {name for _, name, _, _ in string.Formatter().parse(ask) if name}
    values = {role: param.draw(rng) for role, param in tool.params.items() if role in roles}
    # Often some given arguments are optional, so that "required" does not give away what to fill in.
    required = set(rng.sample(sorted(roles), between(rng, 1, len(roles)))) if rng.random() < 0.5 else roles
    problem = f"tool:{tool.names[0]}:{dumps(dict(sorted(values.items())))}"
    return Call(
        ask=ask.format(**{role: _spoken(value) for role, value in values.items()}),
        name=names.tool,
        schema=_schema(rng, tool, names, required=required),
        arguments={names.params[role]: value for role, value in values.items()},
        problem=problem,
        tool=tool,
    )


def _spoken(value: Json) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return dumps(value)
    return str(value)


def _schema(rng: Random, tool: Tool, names: _Names, required: set[str] | None = None) -> Json:
    properties: dict[str, Json] = {}
    for role, param in tool.params.items():
        described: dict[str, Json] = {"type": param.type}
        if param.type == "array":
            described["items"] = {"type": "string"}
        if rng.random() < 0.75:
            described["description"] = param.about
        if param.enum:
            described["enum"] = list(param.enum)
        properties[names.params[role]] = described
    needed: list[Json] = [names.params[r] for r in tool.params if required is None or r in required]
    parameters: Json = {"type": "object", "properties": properties, "required": needed}
    described_tool: Json = {
        "name": names.tool,
        "description": pick(rng, tool.about),
        "parameters": parameters,
    }
    return {"type": "function", "function": described_tool}


def _distinct(rng: Random, count: int, taken: set[str]) -> list[Tool]:
    """Draw tools none of whose names is taken, and add all of theirs."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = _draw_tool(rng)
        if taken.isdisjoint(tool.names):
            taken.update(tool.names)
            tools.append(tool)
    return tools


def _among(rng: Random, call: Call, *, with_own: bool) -> list[Json]:
    """List the schemas offered: the call's own (if with_own) and up to three others, in any order."""
    others = _distinct(rng, between(rng, 0 if with_own else 1, 3), set(call.tool.names))
    schemas = [_schema(rng, tool, _Names.draw(rng, tool)) for tool in others]
    if with_own:
        schemas.insert(between(rng, 0, len(schemas)), call.schema)
    return schemas


def _asked(rng: Random, ask: str) -> list[Message]:
    question = user(pick(rng, _PREFACES) + ask)
    if rng.random() < 0.25:
        return [{"role": "system", "content": pick(rng, _SYSTEMS)}, question]
    return [question]


def _reason(call: Call) -> str:
    given = ", ".join(f"{name} = {dumps(value)}" for name, value in call.arguments.items())
    return f"The tool {call.name} fits, with {given}."
