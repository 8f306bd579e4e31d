"""Prompts and tools from arguments, files and stdin.  Knows nothing about engines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pellucid.cli.options import token_ids

Message = dict[str, object]
Tool = dict[str, object]


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which prompts to complete, and how to read them."""
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to complete; - reads one prompt from stdin"
    )
    parser.add_argument(
        "--prompt-file", metavar="FILE",
        help='one prompt a line; a .jsonl file has {"prompt": ...} or {"messages": [...]} a line',
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, put into the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tools the model may call, with --chat")
    parser.add_argument("--ids", action="store_true", help="prompts are token ids, as 1,2,3")
    add_think_argument(parser)


def add_think_argument(parser: argparse.ArgumentParser) -> None:
    """Add --think and --no-think."""
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction, default=None,
        help="ask the chat template for thinking, or for none (default the template's own)",
    )  # fmt: skip


def template_options(think: bool | None) -> dict[str, object] | None:
    """What the chat template is told about thinking; nothing if the user said nothing."""
    return None if think is None else {"enable_thinking": think}


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is to be completed: texts and token ids, or else conversations; one of the two is empty."""

    plain: list[str | list[int]]
    chats: list[list[Message]]

    def __len__(self) -> int:
        return len(self.plain) + len(self.chats)


def read_prompts(args: argparse.Namespace) -> Prompts:
    """All prompts that the user gave.  Raises ValueError if there is none, or if both kinds are mixed."""
    if args.ids and args.chat:
        raise ValueError("--ids and --chat exclude each other: a chat is made from text; drop one")
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompts]
    entries: list[Entry] = [_text_entry(text, args) for text in texts]
    if args.prompt_file is not None:
        entries.extend(_file_entries(Path(args.prompt_file), args))
    elif not texts and not sys.stdin.isatty():
        entries.append(_text_entry(sys.stdin.read(), args))
    prompts = Prompts(
        [entry for entry in entries if not isinstance(entry, Chat)],
        [entry.messages for entry in entries if isinstance(entry, Chat)],
    )
    if not any(prompts.plain) and not prompts.chats:
        raise ValueError("there is no prompt; give PROMPT, --prompt-file FILE, or text on stdin")
    if prompts.plain and prompts.chats:
        raise ValueError("some prompts are conversations and some are not; add --chat, or run them apart")
    if prompts.plain and (args.system or args.tools or args.think is not None):
        raise ValueError("--system, --tools and --think are said to a chat template; add --chat")
    return prompts


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, told from token ids, which are a list, too."""

    messages: list[Message]


Entry = str | list[int] | Chat


def conversation(text: str, system: str | None) -> list[Message]:
    """A conversation that begins with the user's `text`."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": text}]


def _text_entry(text: str, args: argparse.Namespace) -> Entry:
    text = text.removesuffix("\n")
    if args.ids:
        try:
            return token_ids(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
    return Chat(conversation(text, args.system)) if args.chat else text


def _file_entries(path: Path, args: argparse.Namespace) -> Iterator[Entry]:
    for number, line in enumerate(read_text(path, "--prompt-file").splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _json_entry(line, where, args) if path.suffix == ".jsonl" else _text_entry(line, args)


def _json_entry(line: str, where: str, args: argparse.Namespace) -> Entry:
    match parse_json(line, where):
        case {"messages": [{"role": _}, *_] as messages}:
            return Chat(list(messages))
        case {"prompt": str(prompt)}:
            return _text_entry(prompt, args)
        case {"prompt": [int(), *_] as ids}:
            return list(ids)
    raise ValueError(f'{where} needs {{"prompt": TEXT or [ids]}} or {{"messages": [...]}}')


def read_tools(path: str | None) -> list[Tool] | None:
    """The tools in a JSON file.  Raises ValueError if it holds something else."""
    if path is None:
        return None
    tools = parse_json(read_text(Path(path), "--tools"), f"--tools {path!r}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"--tools {path!r} must hold a JSON list of tools (objects)")
    return tools


def parse_json(text: str, where: str) -> object:
    """Parse JSON.  Raises ValueError, saying where it stood, if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None


def read_text(path: Path, option: str) -> str:
    """The file's text.  Raises ValueError, naming the option, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{option} {str(path)!r} cannot be read ({reason}); name a UTF-8 file") from None


def write_text(path: str, text: str, option: str) -> None:
    """Write a file.  Raises ValueError, naming the option, if that cannot be done."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{option} {path!r} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
