"""An answer is right when its rule says so, and for no other reason."""

from __future__ import annotations

import json
import math

import pytest

from pellucid.cli.eval import Answer, Bits, cut_windows, tally
from pellucid.cli.scoring import Item, Text, is_exact, is_json, is_tool_call, parse_item, read_items

CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}


def called(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize(
    "text", ["132", " 132\n", "<think>\n7+5=12\n</think>\n\n132", "7+5...\n</think>\n\n132"]
)
def test_an_exact_answer_is_what_follows_the_thinking(text):
    assert is_exact("132", text)


@pytest.mark.parametrize("text", ["133", "The answer is 132", "<think>\n132", "<think>132</think>", ""])
def test_an_exact_answer_is_nothing_more_and_nothing_less(text):
    assert not is_exact("132", text)


def test_a_tool_call_is_right_whatever_the_order_of_its_keys():
    assert is_tool_call(CALL, called('{"arguments": {"days": 2, "city": "Paris"}, "name": "get_weather"}'))
    assert is_tool_call(CALL, "<think>\nweather\n</think>\n\n" + called(json.dumps(CALL)))


@pytest.mark.parametrize(
    "text",
    [
        called('{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'),
        called('{"name": "get_weather", "arguments": {"city": "Paris", "days": "2"}}'),
        called('{"name": "get_weather", "arguments": {"city": "Paris"}}'),
        called('{"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "unit": "C"}}'),
        called(json.dumps(CALL)) + called(json.dumps(CALL)),
        json.dumps(CALL),
        "<think>\n" + called(json.dumps(CALL)),
        "<think>\n" + called(json.dumps(CALL)) + "\n</think>\n\nIt is sunny.",
        called("{not json}"),
    ],
)
def test_a_tool_call_is_wrong_if_anything_differs(text):
    assert not is_tool_call(CALL, text)


def test_json_is_right_whatever_its_spaces():
    assert is_json({"a": [1, 2], "b": None}, '<think>\n\n</think>\n\n{ "b": null, "a": [1,2] }')


@pytest.mark.parametrize(
    "text", ['{"a": [2, 1], "b": null}', '{"a": [1, 2]}', '{"a": [true, 2], "b": null}', "a"]
)
def test_json_is_wrong_if_anything_differs(text):
    assert not is_json({"a": [1, 2], "b": None}, text)


def item(task: str = "add", *, thinking: bool = False, number: int = 0) -> dict[str, object]:
    return {
        "id": f"{task}-{number}", "task": task, "messages": [{"role": "user", "content": "1+1=?"}],
        "enable_thinking": thinking, "kind": "exact", "answer": "2", "max_tokens": 8,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps(item(thinking=bool(n % 2), number=n)) for n in range(6)]
    (tmp_path / "add.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "sort.jsonl").write_text(json.dumps(item("sort")))
    (tmp_path / "text.jsonl").write_text(
        json.dumps({"id": "t", "task": "text", "kind": "text_bpb", "text": "x"})
    )
    return tmp_path


def test_all_items_of_a_folder_are_read(folder):
    items, texts = read_items(folder, [], None)
    assert [each.task for each in items] == ["add"] * 6 + ["sort"]
    assert texts == [Text("t", "text", "x")]


def test_a_limit_counts_each_thinking_mode_by_itself(folder):
    items, _ = read_items(folder, ["add"], 2)
    assert [each.enable_thinking for each in items] == [False, True, False, True]


def test_an_unknown_task_is_refused_with_the_known_ones(folder):
    with pytest.raises(ValueError, match="unknown task 'ad'.*add, sort, text"):
        read_items(folder, ["ad"], None)


def test_a_folder_without_items_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no .jsonl"):
        read_items(tmp_path, [], None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is no JSON"),
        ("[]", "line 3 is no JSON object"),
        (json.dumps({**item(), "kind": "close"}), "line 3: kind 'close' must be one of exact"),
        (json.dumps({"kind": "exact", "id": "a"}), "line 3 lacks 'task'"),
    ],
)
def test_a_malformed_item_is_refused_saying_where_it_stands(line, message):
    with pytest.raises(ValueError, match=message):
        parse_item(line, "line 3")


def test_scores_are_kept_by_task_and_mode():
    def answered(task: str, thinking: bool, right: bool) -> Answer:
        parsed = parse_item(json.dumps(item(task, thinking=thinking)), "here")
        assert isinstance(parsed, Item)
        return Answer(parsed, "", right)

    answers = [answered("add", True, True), answered("add", True, False), answered("add", False, True)]
    scores = tally(answers, [Bits("text", 30.0, 10), Bits("text", 10.0, 10)])
    assert [(score.task, score.mode, score.num_items) for score in scores] == [
        ("add", "direct", 1),
        ("add", "thinking", 2),
        ("text", "text", 2),
    ]
    assert [score.accuracy for score in scores] == [1.0, 0.5, None]
    assert math.isclose(scores[2].bits_per_byte or 0, 2.0)  # over all bytes, not the mean of the texts


@pytest.mark.parametrize("num", [2, 3, 9, 10, 11, 19, 20, 28, 29])
def test_windows_predict_every_token_but_the_first_once(num):
    ids = list(range(num))
    windows = cut_windows(ids, 10)
    assert [token for window in windows for token in window[1:]] == ids[1:]
    assert all(2 <= len(window) <= 10 for window in windows)


def test_a_text_of_one_token_has_nothing_to_predict():
    assert cut_windows([7], 10) == cut_windows([], 10) == []
