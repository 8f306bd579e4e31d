"""A file of requests becomes a file of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pellucid.cli.main import main

SMALL = ["--device", "cpu", "--num-threads", "1", "--cpu-kv-cache-gib", "0.05", "--max-num-seqs", "4"]
SUM = {"messages": [{"role": "user", "content": "What is 47+85?"}], "temperature": 0, "max_tokens": 300}


def line(name: str, url: str, body: object) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_each_line_is_answered_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line("sum", "/v1/chat/completions", SUM),
        line("text", "/v1/completions", {"prompt": "import", "max_tokens": 3}),
        "",
        line("wrong", "/v1/completions", {"prompt": "a", "max_tokens": -3}),
        line("streamed", "/v1/completions", {"prompt": "a", "stream": True}),
        line("nowhere", "/v1/nothing", {}),
        "no json",
    ]
    asked.write_text("\n".join(lines))
    assert main(["run-batch", "-i", str(asked), "-o", str(answered), *SMALL]) == 1
    said = capsys.readouterr().err
    assert "4 of 6 requests failed" in said and "max_tokens" in said
    answers = [json.loads(text) for text in answered.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == ["sum", "text", "wrong", "streamed", "nowhere", None]
    total, text, wrong, streamed, nowhere, broken = answers
    assert total["response"]["body"]["choices"][0]["message"]["content"] == "132" and total["error"] is None
    assert text["response"]["status_code"] == 200
    assert wrong["response"]["status_code"] == 400 and "max_tokens" in wrong["error"]["error"]["message"]
    assert streamed["response"] is None and "no streams" in streamed["error"]["message"]
    assert nowhere["response"]["status_code"] == 404 and "no request" in broken["error"]["message"]
