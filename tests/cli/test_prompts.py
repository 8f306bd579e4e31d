"""Prompts come from arguments, files and stdin; what cannot be meant is refused."""

from __future__ import annotations

import io
import json

import pytest

from pellucid.cli.main import build_parser
from pellucid.cli.prompts import Prompts, read_prompts, read_tools


@pytest.fixture
def read(monkeypatch):
    def read(*argv: str, stdin: str = "") -> Prompts:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        return read_prompts(build_parser().parse_args(["generate", *argv]))

    return read


def test_prompts_come_from_the_command_line(read):
    assert read("a b", "c").plain == ["a b", "c"]


def test_a_dash_is_all_of_stdin(read):
    assert read("a", "-", stdin="two\nlines\n").plain == ["a", "two\nlines"]


def test_stdin_is_the_prompt_if_there_is_no_other(read):
    assert read(stdin="def f():\n").plain == ["def f():"]


def test_chat_makes_a_conversation_of_each_prompt(read):
    assert read("hi", "--chat", "--system", "Be brief.").chats == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ]


def test_ids_are_token_ids(read):
    assert read("1,2,3", "4 5", "--ids").plain == [[1, 2, 3], [4, 5]]


def test_a_text_file_has_one_prompt_a_line(read, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert read("zero", "--prompt-file", str(file)).plain == ["zero", "one", "two"]


def test_a_jsonl_file_has_prompts_or_conversations(read, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": [1, 2]}\n')
    assert read("--prompt-file", str(file)).plain == ["one", [1, 2]]
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"messages": messages}))
    assert read("--prompt-file", str(file)).chats == [messages]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is no prompt"),
        (["--ids", "--chat", "1"], "exclude each other"),
        (["--ids", "1,x"], "'x' is no token id"),
        (["a", "--think"], "add --chat"),
        (["--prompt-file", "/nowhere/p.txt"], "'/nowhere/p.txt' cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(read, argv, message):
    with pytest.raises(ValueError, match=message):
        read(*argv)


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"prompt": 3}', '{"messages": []}'])
def test_a_bad_line_of_a_jsonl_file_is_refused_with_its_number(read, tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read("--prompt-file", str(file))


def test_conversations_and_texts_do_not_mix(read, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(ValueError, match="add --chat, or run them apart"):
        read("a", "--prompt-file", str(file))


def test_tools_are_a_json_list_of_objects(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text('[{"type": "function"}]')
    assert read_tools(str(file)) == [{"type": "function"}]
    file.write_text('{"type": "function"}')
    with pytest.raises(ValueError, match="must hold a JSON list"):
        read_tools(str(file))
    assert read_tools(None) is None
