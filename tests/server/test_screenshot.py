"""deploy/screenshot.py, with a stand-in for Grafana and Prometheus, one for docker, and a real server.

The stand-in answers in the forms that Grafana's and Prometheus' documentations have.  Not shown here: that
a real Grafana draws the board (the browser sees the stand-in's page), nor that `docker compose` starts it.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.server.chromium import find_chromium
from tests.server.conftest import Running

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "pellucid.json").read_text())
RULES = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"][0]["rules"]
NAMES = [rule.get("record") or rule["alert"] for rule in RULES]
SERIES = {
    "schema": {"fields": [{"name": "Time"}, {"name": "Value"}]},
    "data": {"values": [[1, 2], [None, 0.5]]},
}
ONLY_NAN = {**SERIES, "data": {"values": [[1, 2], [None, None]]}}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("screenshot", DEPLOY / "screenshot.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


class StandIn(ThreadingHTTPServer):
    """Grafana and Prometheus at one address."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[dict[str, Any]] = []  # each query that came
        self.results: dict[str, dict[str, Any]] = {}  # by a part of the query, instead of SERIES
        self.target = {"scrapeUrl": "http://pellucid:8000/metrics", "health": "up", "lastError": ""}
        self.rules = [{"name": name, "health": "ok"} for name in NAMES]
        self.needs_login = self.lacks_board = False
        self.num_canvases = len(BOARD["panels"])


class Answers(BaseHTTPRequestHandler):
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        board = {"meta": {"slug": "pellucid"}, "dashboard": BOARD}
        status = 404 if self.server.lacks_board else 401 if self.server.needs_login else 200
        match self.path.split("?")[0]:
            case "/api/health":
                self.answer(200, {"commit": "0", "database": "ok", "version": "12.1.0"})
            case "/api/dashboards/uid/pellucid":
                self.answer(status, board if status == 200 else {"message": "refused"})
            case "/api/v1/targets":
                target = {**self.server.target, "labels": {"job": "pellucid"}}
                self.answer(200, {"status": "success", "data": {"activeTargets": [target]}})
            case "/api/v1/rules":
                groups = [{"name": "pellucid", "rules": self.server.rules}]
                self.answer(200, {"status": "success", "data": {"groups": groups}})
            case "/v1/models":
                self.answer(200, {"data": [{"id": "m"}]})
            case "/d/pellucid":
                self.answer(200, "<title>board</title>" + "<canvas></canvas>" * self.server.num_canvases)
            case _:
                self.answer(404, {"message": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/v1/"):
            return self.answer(503, {"error": "asleep"})
        assert self.path == "/api/ds/query" and int(body["from"]) > 0 and body["to"] == "now"
        results = {query["refId"]: self.result(query) for query in body["queries"]}
        self.answer(400 if any("error" in each for each in results.values()) else 200, {"results": results})

    def result(self, query: dict[str, Any]) -> dict[str, Any]:
        self.server.asked.append(query)
        found = next((value for part, value in self.server.results.items() if part in query["expr"]), None)
        return found or {"status": 200, "frames": [SERIES]}

    def answer(self, status: int, body: object) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if isinstance(body, str) else "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def grafana() -> Generator[StandIn, None, None]:
    with StandIn() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def checked(grafana: StandIn) -> int:
    return script.Grafana(grafana.url, None).check_panels(1.0, 0)


def test_each_query_of_each_panel_is_asked_as_the_board_has_it(grafana: StandIn) -> None:
    assert checked(grafana) == len(BOARD["panels"])
    asked = {query["expr"] for query in grafana.asked if query["datasource"]["uid"] == "prometheus"}
    wanted = {target["expr"] for panel in BOARD["panels"] for target in panel["targets"]}
    assert {expr.replace("$model", ".*") for expr in wanted} <= asked


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"status": 400, "error": "bad_data: parse error"}, "In the queue: bad_data: parse error"),
        ({"status": 200, "frames": [ONLY_NAN]}, "In the queue: no data"),
        ({"status": 200, "frames": []}, "In the queue: no data"),
    ],
)
def test_a_panel_with_an_error_or_nothing_to_show_is_told_of(
    grafana: StandIn, result: dict[str, Any], words: str
) -> None:
    grafana.results["request_queue_time_seconds"] = result
    with pytest.raises(script.Trouble) as told:
        checked(grafana)
    assert words in str(told.value) and "Whole requests" not in str(told.value)


def test_drafts_are_missed_only_of_a_server_that_drafts(
    grafana: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    grafana.results["num_accepted_tokens"] = {"frames": [ONLY_NAN]}
    with pytest.raises(script.Trouble, match="Drafts that stand: no data"):
        checked(grafana)
    grafana.results[script.DRAFTED] = {"frames": [{"data": {"values": [[1], [0]]}}]}
    assert checked(grafana) == len(BOARD["panels"]) - 1
    assert "drafts nothing" in capsys.readouterr().out


def test_a_grafana_without_the_board_or_behind_a_login_is_told_of(grafana: StandIn) -> None:
    grafana.needs_login = True
    with pytest.raises(script.Trouble, match="give --token"):
        checked(grafana)
    grafana.lacks_board = True
    with pytest.raises(script.Trouble, match=r"import deploy/grafana/dashboards/pellucid\.json"):
        checked(grafana)


def test_rules_that_are_not_there_or_fail_are_told_of(grafana: StandIn) -> None:
    script.check_rules(grafana.url, 0)
    missing = grafana.rules.pop()["name"]
    with pytest.raises(script.Trouble, match=f"lacks rules .*{missing}"):
        script.check_rules(grafana.url, 0)
    grafana.rules.append({"name": missing, "health": "err", "lastError": "many-to-many"})
    with pytest.raises(script.Trouble, match=f"cannot evaluate {missing}: many-to-many"):
        script.check_rules(grafana.url, 0)
    grafana.target |= {"health": "down", "lastError": "connection refused"}
    with pytest.raises(script.Trouble, match="connection refused"):
        script.check_rules(grafana.url, 0)


def test_the_load_is_of_many_kinds(server: Running, grafana: StandIn) -> None:
    def answers(path: str, status: str) -> float:
        labels = {"handler": path, "status": status}
        return server.metric("http_requests_total", **labels)

    script.load(server.url, None, 0.5)
    assert answers("/v1/chat/completions", "200") and answers("/v1/completions", "404")
    with pytest.raises(script.Trouble, match="answered no request: .* answers 503: .*asleep"):
        script.load(grafana.url, None, 0.1)


def test_a_picture_of_a_page_whose_panels_are_drawn(
    grafana: StandIn, server: Running, tmp_path: Path
) -> None:
    if (browser := find_chromium()) is None:
        pytest.skip("NO CHROMIUM HERE: no picture is taken (apt-get install chromium)")
    output = tmp_path / "new" / "board.png"
    given = [
        "--grafana",
        grafana.url,
        "--prometheus",
        grafana.url,
        "--server",
        server.url,
        "--browser",
        browser,
    ]
    assert script.main([*given, "--seconds", "0.1", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    grafana.num_canvases = 3
    with pytest.raises(script.Trouble, match="3 of 12 panels are drawn"):
        script.shoot(script.Grafana(grafana.url, None), browser, output, 12, 0)


# docker


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker that notes what it is told, and keeps a copy of the last file that it is given."""
    program = tmp_path / "docker"
    program.write_text(
        f'#!/bin/sh\nPATH=/bin:/usr/bin\necho "$@" >> {tmp_path}/told\n'
        f'for each; do case "$each" in *changes.yaml) cp "$each" {tmp_path}; '
        f'cp "$(dirname "$each")/prometheus.yml" {tmp_path} 2>/dev/null;; esac; done\n'
        f'for each; do test ! -e "{tmp_path}/fails-$each" || {{ echo "no such thing" >&2; exit 1; }}; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def run(docker: Path, *arguments: str) -> tuple[int, list[str]]:
    """Without a Grafana at port 3000, of which nothing is waited for."""
    status = script.main([*arguments, "--wait", "0", "--browser", str(docker / "docker")])
    return status, (docker / "told").read_text().splitlines()


def test_what_was_started_is_stopped_though_grafana_never_came(
    docker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "call", lambda *_: (0, "refused"))
    status, told = run(docker, "--cpu")
    assert status == 1 and "no healthy Grafana" in capsys.readouterr().err
    files = f"-f {DEPLOY}/compose.yaml -f {DEPLOY}/compose.cpu.yaml -f "
    assert all(f"compose --project-name pellucid-board {files}" in line for line in told[-2:])
    assert told[-2].endswith(" up --detach --build") and " down " in told[-1]
    (command,) = [
        each["command"] for each in yaml.safe_load((docker / "changes.yaml").read_text())["services"].values()
    ]
    assert command[0] == "sprout" and "ngram" in command


def test_a_server_that_runs_is_scraped_instead_of_one_that_is_started(docker: Path) -> None:
    _, told = run(docker, "--server", "http://127.0.0.1:8123/")
    assert told[-2].endswith(" up --detach --build prometheus grafana") and "cpu" not in told[-2]
    assert "host.docker.internal:8123" in (docker / "prometheus.yml").read_text()
    changed = yaml.safe_load((docker / "changes.yaml").read_text())["services"]
    assert (
        list(changed) == ["prometheus"]
        and ":/etc/prometheus/prometheus.yml" in changed["prometheus"]["volumes"][0]
    )


@pytest.mark.parametrize(
    ("fails", "words"), [("compose", "docker has no compose"), ("info", "daemon does not answer"), ("up", "")]
)
def test_a_docker_that_fails_is_told_of(
    docker: Path, fails: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (docker / f"fails-{fails}").touch()
    status, told = run(docker)
    said = capsys.readouterr().err
    assert status == 1 and words in said and "--grafana" in said
    assert not words or ("no such thing" in said and not any(" down" in line for line in told))


def test_no_docker_and_no_browser_are_told_of(docker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docker / "sh").symlink_to("/bin/sh")
    (docker / "docker").unlink()
    assert script.main(["--browser", str(docker / "sh")]) == 1
    assert "docker is not installed" in capsys.readouterr().err
    assert script.main([]) == 1
    assert "no browser" in capsys.readouterr().err
