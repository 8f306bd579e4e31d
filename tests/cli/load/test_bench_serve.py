"""`pellucid bench serve` against a server of known timings, and against our own."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from pellucid.cli.load.clients import observe
from pellucid.cli.load.http import Target
from pellucid.cli.load.workloads import Load, Wire, build_lanes
from pellucid.cli.main import main
from pellucid.cli.workloads import Lengths
from tests.cli.load.fake import Request, Writer, end, refuse, send, serving, token

WAIT, STEP = 0.06, 0.02  # seconds to the first token and between tokens
SLACK = 0.1  # seconds that half of all may be late on a busy machine


async def steady(writer: Writer, request: Request) -> None:
    """As many tokens as asked for, at a known pace."""
    num = request["max_tokens"]
    assert isinstance(num, int)
    between = [piece for i in range(1, num) for piece in (STEP, token(i))]
    await send(writer, WAIT, token(0), *between, end(num))


async def at_once(writer: Writer, request: Request) -> None:
    await send(writer, token(1, 2), end(2))


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["bench", "serve", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def load(workload: str = "random", **changes: object) -> Load:
    lengths = Lengths(low=4, high=4)
    fields = {"num_requests": 10, "inputs": lengths, "outputs": lengths, "wire": Wire(model="fake")}
    return Load(workload=workload, **{**fields, **changes})  # type: ignore[arg-type]


def test_latencies_are_the_servers(capsys, tmp_path):
    file = tmp_path / "runs.json"
    with serving(steady) as fake:
        status, out, err = bench(
            capsys, "--base-url", fake.url, "--num-requests", "12", "--output-len", "6",
            "--max-concurrency", "4", "--json", str(file),
        )  # fmt: skip
    assert status == 0 and "12 requests, 0 errors" in out and err == ""
    (run,) = json.loads(file.read_text())
    latencies = run["lanes"][0]["latencies"]
    assert WAIT <= latencies["ttft_ms"]["p50"] / 1000 < WAIT + SLACK
    for name in ("itl_ms", "gap_ms", "tpot_ms"):
        assert STEP * 0.9 <= latencies[name]["p50"] / 1000 < STEP + SLACK
    assert WAIT + 5 * STEP <= latencies["e2e_ms"]["p50"] / 1000 < WAIT + 5 * STEP + 3 * SLACK
    assert (run["num_output_tokens"], run["num_prompt_tokens"], run["tokens_per_chunk"]) == (72, 48, 1)
    assert run["output_tokens_per_second"] == pytest.approx(72 / run["seconds"])
    assert run["client_us_per_token"] > 0


def test_requests_say_what_is_wanted(capsys):
    with serving(at_once) as fake:
        bench(
            capsys, "--base-url", fake.url, "--api-key", "secret", "--num-requests", "2",
            "--num-warm-ups", "0", "--input-len", "7", "--output-len", "2",
            "--extra-body", '{"ignore_eos": null, "top_k": 5}',
        )  # fmt: skip
        assert all("Authorization: Bearer secret" in head for head in fake.headers)
        first, second = fake.requests
    assert first["model"] == "fake" and first["max_tokens"] == 2 and first["stream"] is True
    assert first["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert first["top_k"] == 5 and "ignore_eos" not in first
    assert len(first["prompt"]) == 7 and first["prompt"] != second["prompt"]  # type: ignore[arg-type]


def test_errors_are_counted_and_shown(capsys, tmp_path):
    turns = iter(range(100))

    async def unreliable(writer: Writer, request: Request) -> None:
        match next(turns) % 4:
            case 0:
                await send(writer, token(1), token(2), end(2))
            case 1:
                refuse(writer, 503, "too busy")
            case 2:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n")
                writer.close()
            case 3:
                await send(writer, token(1))

    file = tmp_path / "runs.json"
    with serving(unreliable) as fake:
        status, out, err = bench(
            capsys, "--base-url", fake.url, "--num-requests", "8", "--max-concurrency", "1",
            "--num-warm-ups", "0", "--json", str(file),
        )  # fmt: skip
    (run,) = json.loads(file.read_text())
    assert status == 0 and "8 requests, 6 errors" in out
    assert (run["num_errors"], run["num_output_tokens"]) == (6, 4)
    assert run["errors"] == {
        "HTTP 503: too busy": 2,
        "the server closed the connection": 2,
        "the stream ended without an end": 2,
    }
    assert "2 of 8 requests failed: HTTP 503: too busy" in err


def test_an_idle_connection_that_the_server_has_closed_is_no_error(capsys):
    async def closing_silently(writer: Writer, request: Request) -> None:
        await send(writer, token(1), end(1))
        asyncio.get_running_loop().call_later(0.005, writer.close)

    with serving(closing_silently) as fake:
        status, out, _ = bench(
            capsys, "--base-url", fake.url, "--num-requests", "20", "--request-rate", "100"
        )
    assert status == 0 and "20 requests, 0 errors" in out


def test_a_request_that_does_not_end_is_given_up(capsys):
    async def silent(writer: Writer, request: Request) -> None:
        await asyncio.sleep(30)

    with serving(silent) as fake:
        status, _, err = bench(
            capsys, "--base-url", fake.url, "--num-requests", "2", "--timeout", "0.1", "--num-warm-ups", "0"
        )
    assert status == 1 and "2 of 2 requests failed: no end after 0.1 s" in err


def test_a_failing_first_request_ends_it(capsys):
    async def refusing(writer: Writer, request: Request) -> None:
        refuse(writer, 400, "ignore_eos is unknown")

    with serving(refusing) as fake:
        status, _, err = bench(capsys, "--base-url", fake.url)
    assert status == 2 and "HTTP 400: ignore_eos is unknown" in err


def test_a_sweep_is_a_run_for_each_value_and_a_picture(capsys, tmp_path):
    plot, file = tmp_path / "sweep.html", tmp_path / "runs.json"
    with serving(steady) as fake:
        status, out, _ = bench(
            capsys, "--base-url", fake.url, "--num-requests", "4", "--output-len", "3", "--max-concurrency",
            "1", "4", "--plot", str(plot), "--json", str(file),
        )  # fmt: skip
        prompts = [tuple(request["prompt"]) for request in fake.requests]  # type: ignore[arg-type]
    one, four = json.loads(file.read_text())
    assert status == 0 and "1 at a time" in out and "4 at a time" in out
    assert four["output_tokens_per_second"] > 2 * one["output_tokens_per_second"]
    assert plot.read_text().count("<polyline") == 6  # three percentiles in each of two panels
    assert len(set(prompts)) == len(prompts)


def test_a_rate_is_kept_and_the_gaps_are_exponential():
    (lane,) = build_lanes(load(num_requests=4000, request_rate=50.0))
    times = [order.at for order in lane.orders]
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    with serving(at_once) as fake:
        seen = observe(Target.parse(fake.url, None), load(request_rate=50.0), num_processes=1, timeout=9)
    lateness = sorted(record.sent - (record.due or 0.0) for record in seen.records)
    assert lateness[0] > -0.002 and lateness[len(lateness) // 2] < SLACK


def test_several_processes_send_the_same_load():
    alone = load(num_requests=7, max_concurrency=3)
    (whole,) = build_lanes(alone)
    shared = [lane for part in range(3) for lane in build_lanes(alone, part, 3)]
    bodies = sorted(order.body for lane in shared for order in lane.orders)
    assert bodies == sorted(order.body for order in whole.orders)
    assert [lane.limit for lane in shared] == [1, 1, 1]
    with serving(at_once) as fake:
        seen = observe(Target.parse(fake.url, None), alone, num_processes=2, timeout=9)
        assert len(fake.requests) == 7
    assert len(seen.cpu_seconds) == 2 and all(record.error is None for record in seen.records)


def test_mixed_sends_long_prompts_as_long_as_streams_last(capsys, tmp_path):
    file = tmp_path / "runs.json"
    with serving(steady) as fake:
        bench(
            capsys, "--base-url", fake.url, "--workload", "mixed", "--num-requests", "4", "--output-len",
            "12", "--max-concurrency", "2", "--long-len", "100", "--long-every", "0.1", "--json", str(file),
            "--num-warm-ups", "0",
        )  # fmt: skip
        lengths = [len(request["prompt"]) for request in fake.requests]  # type: ignore[arg-type]
    streams, long_prompts = json.loads(file.read_text())[0]["lanes"]
    assert (streams["name"], streams["num_requests"], long_prompts["name"]) == ("streams", 4, "long prompts")
    assert lengths.count(100) == long_prompts["num_requests"] >= 3
    assert long_prompts["num_errors"] == 0


def test_prefixes_are_shared_and_what_follows_is_not():
    (lane,) = build_lanes(load("shared-prefix", num_prefixes=2, prefix_len=16))
    prompts = [json.loads(order.body)["prompt"] for order in lane.orders]
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 2
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 10


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--base-url", "http://127.0.0.1:9"], "no server answers"),
        (["--workload", "idle", "--request-rate", "3"], "pace of its own"),
        (["--request-rate", "1", "2", "--max-concurrency", "1", "2"], "not both"),
        (["--workload", "chat", "--input-len", "3"], "lengths of their own"),
        (["--plot", "x.pdf"], "ends in none of"),
        (["--base-url", "http://a", "--spawn"], "give one of them"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(argv, words, capsys):
    status, _, err = bench(capsys, *argv)
    assert status == 2 and words in err and err.count("\n") == 1


def test_a_png_without_cairosvg_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    status, _, err = bench(capsys, "--plot", "x.png")
    assert status == 2 and "needs the package cairosvg" in err and ".html" in err


def test_requests_that_the_model_cannot_take_are_refused_before(capsys):
    with serving(steady) as fake:
        status, _, err = bench(capsys, "--base-url", fake.url, "--workload", "mixed")
    assert status == 2 and "8,016 tokens" in err and "4,096" in err and "--long-len" in err


def test_our_own_server_answers_64_streams_without_an_error(capsys, tmp_path: Path):
    pytest.importorskip("fastapi")
    file = tmp_path / "runs.json"
    status, out, err = bench(
        capsys, "--num-requests", "80", "--max-concurrency", "64", "--input-len", "20:40", "--output-len",
        "8", "--json", str(file), "--spawn", "--num-threads", "1", "--cpu-kv-cache-gib", "0.5",
    )  # fmt: skip
    (run,) = json.loads(file.read_text())
    assert status == 0 and "ready after" in out and "failed" not in err
    assert (run["num_errors"], run["num_output_tokens"], run["num_miscounted"]) == (0, 640, 0)
    assert run["server_us_per_token"] > run["client_us_per_token"] and len(run["server_processes"]) >= 2
    assert run["seconds_to_ready"] > 0
