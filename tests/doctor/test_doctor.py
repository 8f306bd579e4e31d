"""`pellucid doctor`: what is wrong is found and told, with what to do; what is right says how it is."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator

import pytest
import torch

from pellucid.cli.main import main
from pellucid.doctor import host, software
from pellucid.doctor.finding import Finding, look, ok
from pellucid.doctor.gpus import topology

MATRIX = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tNODE\t32-63\t1
NIC0\tPIX\tSYS\tNODE\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_are_read_from_the_drivers_matrix() -> None:
    kinds = topology(MATRIX)
    assert kinds[0, 1] == kinds[1, 0] == "NV18"
    assert kinds[0, 2] == "SYS" and kinds[1, 2] == "PHB" and (0, 0) not in kinds
    assert topology("") == {}


def named(findings: Iterator[Finding], name: str) -> Finding:
    return next(each for each in findings if each.name == name)


def test_a_port_that_is_taken_is_told_with_who_to_ask() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = named(host.ports({"a server": ("127.0.0.1", port)}), f"port {port}")
    assert found.verdict == "warning" and f"sport = {port}" in found.advice
    assert named(host.ports({"a server": ("127.0.0.1", port)}), f"port {port}").verdict == "ok"


def test_variables_of_nccl_are_shown_and_wrong_ones_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("PELLUCID_SECRET", "short")
    assert named(software.variables(), "NCCL_DEBUG").said == "INFO (passed to every worker)"
    assert named(software.variables(), "NCCL_BLOCKING_WAIT").advice == "TORCH_NCCL_BLOCKING_WAIT"
    assert named(software.variables(), "PELLUCID_SECRET").verdict == "error"
    missing = named(host.interfaces(), "NCCL_SOCKET_IFNAME")
    assert missing.verdict == "error" and "lo" in missing.advice
    for fits in ("lo", "^docker", "=eth0"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", fits)
        assert [each.name for each in host.interfaces()] == ["interfaces"]


def test_few_descriptors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, -1))
    found = named(host.limits(0), "open files")
    assert found.verdict == "warning" and found.said == "256 (at most unlimited)"
    assert "ulimit -n 65536" in found.advice


def test_a_check_that_fails_is_a_finding_behind_what_it_has_found() -> None:
    def check() -> Iterator[Finding]:
        yield ok("one", "fine")
        raise OSError("no such thing")

    one, failed = look("links", check)
    assert one.verdict == "ok" and failed.verdict == "warning" and "no such thing" in failed.said


def test_the_command_says_all_as_lines_or_json_and_ends_by_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PELLUCID_SECRET", raising=False)
    assert main(["doctor", "--port", "0", "--master-port", "0", "--no-links"]) == 0
    shown = capsys.readouterr().out
    assert "open files" in shown and "torch" in shown and "0 errors" in shown
    monkeypatch.setenv("PELLUCID_SECRET", "short")
    assert main(["doctor", "--port", "0", "--master-port", "0", "--no-links", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["errors"] == 1 and told["warnings"] >= 0
    wrong = next(each for each in told["findings"] if each["verdict"] == "error")
    assert wrong["name"] == "PELLUCID_SECRET" and "openssl rand -hex 16" in wrong["advice"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_links_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--port", "0", "--master-port", "0", "--json"])
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["findings"]]
    assert "GPU 0" in names and "host to GPU 0" in names and "NCCL" in names
