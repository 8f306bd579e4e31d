"""What is in deploy/ is read by the tools that it is for, where they are here, and asks for what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pellucid.cli.main import build_parser
from tests.patience import PATIENCE, eventually
from tests.server.conftest import Running

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "pellucid.json").read_text())
RULES = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


def checked(*command: str) -> str:
    """What a tool says to our files, if there is that tool."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_metric_that_is_asked_for_exists(server: Running, query: str) -> None:
    httpx.get(f"{server.url}/health")
    text = httpx.get(f"{server.url}/metrics").text
    known = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    known |= {match[1] + "_total" for match in re.finditer(r"^# TYPE (\S+) counter", text, re.MULTILINE)}
    known |= {match[1] for match in re.finditer(r"^# TYPE (\S+) ", text, re.MULTILINE)}
    known |= {rule["record"] for rule in RULES if "record" in rule} | {"up"}
    names = set(re.findall(r"\b(?:vllm:|pellucid:|http_)[a-z0-9_:]+", query)) or {"up"}
    assert names <= known, names - known


def test_prometheus_takes_the_rules_and_its_configuration() -> None:
    checked("promtool", "check", "rules", str(DEPLOY / "rules.yml"))
    checked("promtool", "test", "rules", str(DEPLOY / "rules.test.yml"))
    checked("promtool", "check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_prometheus_scrapes_a_server_and_answers_what_the_board_asks(
    server: Running, tmp_path: Path
) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    shutil.copy(DEPLOY / "rules.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:

            def ask(path: str, **params: str) -> Any:
                answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/{path}", params=params, timeout=PATIENCE)
                return answer.json()["data"]

            def is_up() -> bool:
                try:
                    found = ask("query", query='up{job="pellucid"}')["result"]
                except (httpx.TransportError, ValueError):
                    return False
                return bool(found) and found[0]["value"][1] == "1"

            eventually(is_up)
            eventually(lambda: ask("query", query="vllm:request_success_total")["result"])
            server.client().completions.create(model="sprout", prompt=["a", "b"], max_tokens=9)
            eventually(lambda: all(rule["health"] == "ok" for rule in ask("rules")["groups"][0]["rules"]))
            for query in QUERIES:
                known = query.replace("$__rate_interval", "1m").replace("$model", ".*")
                eventually(lambda known=known: is_number(ask("query", query=known)["result"], known))
        finally:
            process.terminate()


def is_number(result: list[dict[str, Any]], query: str) -> bool:
    """Has a query an answer that a board can show?  Nothing drafts here."""
    return bool(result) and ("spec_decode" in query or all(row["value"][1] != "NaN" for row in result))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_compose_takes_its_file() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("docker compose is not installed")
    checked("docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet")


def test_kubernetes_takes_the_manifests() -> None:
    built = list(yaml.safe_load_all(checked("kubectl", "kustomize", str(DEPLOY / "kubernetes"))))
    assert {each["kind"] for each in built} == {"Deployment", "Service", "PersistentVolumeClaim"}


def test_every_tool_that_is_here_finds_no_fault() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(DEPLOY / "check.sh")], capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0 and "FAULT" not in done.stdout, done.stdout + done.stderr
    assert "ok: the board is JSON" in done.stdout


def test_a_pod_has_time_to_drain() -> None:
    deployment: Any = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    args = build_parser().parse_args(["serve", *container["args"]])
    assert template["spec"]["terminationGracePeriodSeconds"] > args.drain_seconds + 5
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_copy_what_there_is_and_start_a_server(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    entry = next(line for line in lines if line.startswith("ENTRYPOINT"))
    build_parser().parse_args(json.loads(entry.removeprefix("ENTRYPOINT "))[1:])
    assert lines[-1] == entry and any(line.startswith("USER ") for line in lines)
