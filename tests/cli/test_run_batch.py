"""A file of requests becomes a file of answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from pellucid.cli.main import main
from pellucid.server.batch import ORDERS, run_batch

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
        line("asleep", "/sleep", {}),
        line("later", "/v1/responses", {"input": "a", "background": True}),
        json.dumps({"custom_id": "half \ud83d", "method": "post", "url": "/v1/completions", "body": ["a"]}),
        json.dumps(["a"]),
        "no text",
    ]
    asked.write_bytes("\n".join(lines).encode("utf-8-sig").replace(b"no text", b'{"custom_id": "\xff"}'))
    assert main(["run-batch", "-i", str(asked), "-o", str(answered), *SMALL]) == 1
    said = capsys.readouterr().err
    assert "9 of 11 requests failed" in said and "max_tokens" in said
    answers = [json.loads(text) for text in answered.read_text().splitlines()]
    names = [each["custom_id"] for each in answers]
    assert names[:5] == ["sum", "text", "wrong", "streamed", "nowhere"] and names[6:8] == ["asleep", "later"]
    total, text, wrong, streamed, nowhere, broken, asleep, later, half, listed, coded = answers
    assert total["response"]["body"]["choices"][0]["message"]["content"] == "132" and total["error"] is None
    assert text["response"]["status_code"] == 200
    assert wrong["response"]["status_code"] == 400 and "max_tokens" in wrong["error"]["error"]["message"]
    assert streamed["response"] is None and "leave stream out" in streamed["error"]["message"]
    assert "must be a route" in asleep["error"]["message"] and "background" in later["error"]["message"]
    assert half["custom_id"] == "half \ud83d" and "body an object" in half["error"]["message"]
    assert "must be an object" in listed["error"]["message"] and "decode" in coded["error"]["message"]
    assert nowhere["response"]["status_code"] == 404 and "no request" in broken["error"]["message"]


def test_lines_give_no_orders_about_adapters() -> None:
    async def called(request: Request) -> JSONResponse:
        raise AssertionError(f"{request.url.path} was called")

    async def answers() -> list[str]:
        app = Starlette(routes=[Route(path, called, methods=["POST"]) for path in ORDERS])
        lines = [line("order", path, {"lora_name": "a"}).encode() for path in ORDERS]
        return [answer async for answer in run_batch(app, lines)]

    for answer in map(json.loads, asyncio.run(answers())):
        assert answer["response"] is None and "must be a route" in answer["error"]["message"]


def test_a_file_is_not_answered_into_itself(tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text("{}")
    assert main(["run-batch", "-i", str(asked), "-o", f"{tmp_path}/../{tmp_path.name}/in.jsonl"]) == 2
    assert asked.read_text() == "{}"


def test_one_line_that_breaks_the_server_is_one_line_and_so_many_are_under_way() -> None:
    num_now, most = 0, 0

    async def answered(request: Request) -> JSONResponse:
        nonlocal num_now, most
        most = max(most, num_now := num_now + 1)
        await asyncio.sleep(0)
        num_now -= 1
        if (await request.json())["n"] == 7:
            raise RuntimeError("broken")
        return JSONResponse(await request.json())

    def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": "an internal error"}}, 500)

    app = Starlette(routes=[Route("/v1/a", answered, methods=["POST"])], exception_handlers={500: failed})

    async def run() -> list[dict[str, Any]]:
        lines = [line(f"{n}", "/v1/a", {"n": n}).encode() for n in range(30)]
        return [json.loads(each) async for each in run_batch(app, lines, at_once=5)]

    answers = asyncio.run(run())
    assert [each["custom_id"] for each in answers] == [f"{n}" for n in range(30)] and most == 5
    statuses = [each["response"]["status_code"] for each in answers]
    assert statuses == [500 if n == 7 else 200 for n in range(30)]
    assert answers[7]["error"] == {"error": {"message": "an internal error"}}
