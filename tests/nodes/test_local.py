"""Members as processes of this machine: their names, and the CPUs that they inherit."""

from __future__ import annotations

import os

import psutil
import pytest

from pellucid import platform
from pellucid.nodes.local import LocalLauncher, own_cpus


def test_a_member_is_found_by_its_name_and_leaves_when_nobody_has_a_line_to_it() -> None:
    process, line = LocalLauncher().start("engine 7")
    assert "pellucid engine 7" in psutil.Process(process.pid).cmdline()
    assert process.exit_code() is None and not process.is_stopped
    assert process.notes() == bytes(64)
    line.close()
    assert process.exit_code(60) == 1
    process.kill()
    process.wait()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system pins no threads")
def test_a_process_inherits_cpus_of_its_own_only_where_openmp_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(platform, "CORES", [{cpu} for cpu in sorted(allowed)])
    for pinned in (False, True):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("OMP_PROC_BIND", "close") if pinned else monkeypatch.delenv("OMP_PROC_BIND", False)
        with own_cpus(0, len(allowed)):
            assert os.sched_getaffinity(0) == ({min(allowed)} if pinned else allowed)
        assert os.sched_getaffinity(0) == allowed
