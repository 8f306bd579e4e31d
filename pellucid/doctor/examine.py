"""All checks, in the order in which they are shown."""

from __future__ import annotations

from functools import partial

from pellucid.doctor import gpus, host, software
from pellucid.doctor.finding import Finding, look


def examine(wanted_ports: dict[str, tuple[str, int]], *, measures_links: bool = True) -> list[Finding]:
    """wanted_ports: what for, and where.  measures_links: by copies from the host and between GPUs."""
    found = look("versions", software.versions)
    num_gpus = gpus.num_gpus()
    found += look("GPUs", gpus.gpus)
    if measures_links and num_gpus:
        found += look("links", gpus.links)
    checks = {
        "CPU": host.cores,
        "memory": host.memory,
        "shared memory": partial(host.shared_memory, num_gpus),
        "limits": partial(host.limits, num_gpus),
        "ports": partial(host.ports, wanted_ports),
        "interfaces": host.interfaces,
        "clock": host.clock,
        "compiler": host.compilers,
        "folders": host.folders,
        "processes": host.left_over,
        "extras": software.extras,
        "variables": software.variables,
    }
    for name, check in checks.items():
        found += look(name, check)
    return found
