"""What is shown is the answer, whole, however it arrives."""

from __future__ import annotations

import io

import pytest

from pellucid.cli import console
from pellucid.cli.console import AnswerStream, Speed
from pellucid.types import CompletionOutput, RequestMetrics, RequestOutput

TEXT = "<think>\n7+5=12, carry <1>\n</think>\n\n12 < 13 <thin>k"


@pytest.fixture
def shown(monkeypatch):
    pieces: list[tuple[str, str | None]] = []
    monkeypatch.setattr(console, "write", lambda text, style=None: pieces.append((text, style)))
    return pieces


@pytest.mark.parametrize("step", range(1, 12))
def test_an_answer_is_shown_whole_and_its_thinking_dim_however_it_is_cut(shown, step):
    stream = AnswerStream()
    for length in range(step, len(TEXT) + step, step):
        stream.show(TEXT[:length])
    stream.end()
    assert "".join(text for text, _ in shown) == TEXT + "\n"
    dim = "".join(text for text, style in shown if style == "dim")
    assert dim == "<think>\n7+5=12, carry <1>\n</think>"


class Terminal(io.StringIO):
    """Somewhere to write that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_control_characters(monkeypatch):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    console.write("a\x1b[2Jb\x9bc\r\td\n")
    assert terminal.getvalue() == "a\ufffd[2Jb\ufffdc\ufffd\td\n"


def test_a_file_gets_the_text_as_it_is(monkeypatch):
    monkeypatch.setattr("sys.stdout", file := io.StringIO())
    console.write("a\x1b[2Jb", style="dim")
    assert file.getvalue() == "a\x1b[2Jb"


def outputs_of(*texts: str, prompt: str):
    for text in texts:
        yield RequestOutput("0", prompt, [1], [CompletionOutput(0, text)])


def test_an_answer_whose_template_opened_the_thinking_begins_dim(shown):
    AnswerStream().follow(outputs_of("so", "so</think>12", prompt="1+1<|assistant|><think>\n"))
    assert [text for text, style in shown if style == "dim"] == ["<think>\n", "so", "\n</think>"]
    assert [text for text, style in shown if style is None] == ["\n\n", "12", "\n"]


@pytest.mark.parametrize(
    "text", ["Qwen writes <think> and </think> around it", "<think>\na\n</think>\n\nb <think> c"]
)
def test_a_tag_amid_the_answer_is_a_word_like_any_other(shown, text):
    AnswerStream().follow(outputs_of(text, prompt="how?"))
    assert "".join(piece for piece, _ in shown) == f"{text}\n"
    dim = "".join(piece for piece, style in shown if style == "dim")
    assert dim == ("<think>\na\n</think>" if text.startswith("<think>") else "")


def test_an_answer_without_thinking_is_not_dim(shown):
    AnswerStream().follow(outputs_of("12", prompt="<think>\n\n</think>\n\n"))
    assert shown == [("12", None), ("\n", None)]


def test_an_interrupted_stream_is_closed_and_its_last_state_kept(monkeypatch):
    def interrupt(text: str, style: str | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "write", interrupt)
    source, stream = outputs_of("half", "whole", prompt=""), AnswerStream()
    with pytest.raises(KeyboardInterrupt):
        stream.follow(source)
    assert stream.output is not None and stream.output["text"] == "half"
    assert next(source, None) is None, "a closed stream has aborted its request"


def test_speed_adds_up_requests():
    def output(first: float, finished: float, num: int, cached: int) -> RequestOutput:
        times = RequestMetrics(10.0, 10.0, first, finished)
        completion = CompletionOutput(0, "", list(range(num)))
        return RequestOutput("0", "", [0] * 100, [completion], True, num_cached_tokens=cached, metrics=times)

    speed = Speed([output(10.5, 11.5, 11, 0), output(10.25, 10.75, 6, 50)])
    # (100 + 50 new prompt tokens) in 0.75 s; (10 + 5 tokens after the first) in 1.5 s; mean of 500 and 250 ms
    assert speed.line() == "prompt 200 tok/s | output 10 tok/s | time to first token 375 ms"
    assert speed.counts() == "200 prompt tokens (50 cached), 17 output tokens"


def test_speed_of_nothing_is_a_dash():
    assert Speed([]).line() == "prompt - tok/s | output - tok/s | time to first token - ms"
