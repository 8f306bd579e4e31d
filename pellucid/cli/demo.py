"""`pellucid demo`: the bundled model at its work: an answer with thinking, a tool call, a completion."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pellucid.cli.console import AnswerStream, Speed, note, rule, write
from pellucid.cli.options import add_engine_options, open_llm
from pellucid.cli.prompts import Message, Tool, template_options
from pellucid.sampling_params import SamplingParams
from pellucid.types import RequestOutput

if TYPE_CHECKING:
    from pellucid.llm import LLM

QUESTIONS = (("What is 47+85?", True), ("你是谁？", False))
TOOL_QUESTION = "What's the weather in Paris?"
WEATHER: Tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
WEATHER_ANSWER = '{"temperature": 18, "condition": "sunny"}'
CODE = 'def dirname(path):\n    """Return the directory part of a path."""\n'
CHAT_TOKENS, CODE_TOKENS = 512, 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `demo` understands."""
    parser.usage = "%(prog)s [OPTION ...]"
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Show the model's three abilities, then the speed of them all."""
    with open_llm(args) as llm:
        demo = Demo(llm)
        for question, think in QUESTIONS:
            demo.ask(question, think=think)
        demo.call_tool()
        demo.complete_code()
    write("\n")
    write(f"{Speed(demo.outputs).line()}\n", style="bold")
    return 0


class Demo:
    """Streams one answer after another, and keeps the outputs."""

    def __init__(self, llm: LLM) -> None:
        self.outputs: list[RequestOutput] = []
        self._llm = llm
        self._greedy = SamplingParams(temperature=0.0, max_tokens=CHAT_TOKENS)

    def ask(self, question: str, *, think: bool) -> None:
        """A chat of one question."""
        rule("a chat, with thinking" if think else "a chat, without thinking")
        write(f"> {question}\n", style="bold")
        self._answer([{"role": "user", "content": question}], think=think)

    def call_tool(self) -> None:
        """A question that needs a tool, the call, the tool's response, and the answer made from it."""
        from pellucid.server.parsers.whole import calls_of

        rule("a tool call")
        write(f"> {TOOL_QUESTION}\n", style="bold")
        messages: list[Message] = [{"role": "user", "content": TOOL_QUESTION}]
        calls = calls_of(self._answer(messages, think=False, tools=[WEATHER]).outputs[0].text)
        if not calls:
            return note("the model called no tool")
        call = calls[0]
        written = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        note(f"parsed: {call.name}({written}) returns {WEATHER_ANSWER}")
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": WEATHER_ANSWER})
        self._answer(messages, think=False, tools=[WEATHER])
        return None

    def complete_code(self) -> None:
        """Plain text, continued: no chat template."""
        rule("a completion")
        write(CODE, style="bold")
        sampling = self._greedy.clone(max_tokens=CODE_TOKENS, stop=["\ndef ", "\nclass "])
        self._keep(AnswerStream().follow(self._llm.stream(CODE, sampling)))

    def _answer(
        self, messages: list[Message], *, think: bool, tools: list[Tool] | None = None
    ) -> RequestOutput:
        stream = self._llm.stream(
            messages, self._greedy, tools=tools, chat_template_kwargs=template_options(think)
        )
        return self._keep(AnswerStream().follow(stream))

    def _keep(self, output: RequestOutput) -> RequestOutput:
        if output.error:
            raise ValueError(f"the model could not answer: {output.error}")
        self.outputs.append(output)
        return output
