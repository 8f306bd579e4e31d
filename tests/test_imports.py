"""Who may import whom: the walls of the house.  The scheduler's rooms know no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pellucid
from pellucid.features.base import FEATURES, HostFeature, WorkerFeature

ROOT = Path(pellucid.__file__).parent
DATA = {"types", "sampling_params"}  # what goes into the engine and what comes back
PLAIN = {*DATA, "config", "resolve", "registry", "platform", "forward", "taps", "rows", "transfer"}
MAY_IMPORT = {  # room, or one file of it: what it may import besides itself
    "sampling_params": set[str](),
    "types": {"sampling_params"},
    "registry": set[str](),
    "platform": set[str](),
    "forward": {"taps"},
    "taps": set[str](),
    "rows": set[str](),
    "transfer": set[str](),
    "interrupts": set[str](),
    "bell": set[str](),
    "progress": set[str](),
    "no_effect": set[str](),
    "config": {"types", "platform", "no_effect"},
    "collector": set[str](),
    "resolve": {
        *("types", "platform", "config", "nodes.place", "models.checkpoint", "models.draft"),
        *("features.base", "connectors.config"),
    },
    "kv": {"types", "config"},
    "schedule": {*DATA, "config", "kv", "spec.drafter"},
    "schedule.scheduler": {
        *("schedule", "kv", "spec.wants", "features.base", "features.host", "types", "config"),
    },
    # How KV comes from elsewhere.  The halves beside the scheduler are as free of torch as it is.
    "connectors": {"kv", "schedule.plan", "features.base", "registry", "resolve", "types"},
    "connectors.config": {"config", "no_effect"},
    "connectors.events": {
        "connectors",
        "kv",
        "schedule.sequence",
        "features.base",
        "lora.request",
        "resolve",
    },
    "connectors.worker": {"connectors", "features.base", "registry"},
    "connectors.tiers": {"connectors", "kv", "types"},
    "connectors.host": {"connectors", "kv", "schedule.sequence", "features.base", "registry", "resolve"},
    # As free of torch: how many drafts rows want.
    "spec.wants": {"spec.switch", "spec.costs", "spec.chances", "spec.echoes", "spec.drafter", "schedule"},
    "spec.chances": set[str](),
    "spec.drafter": set[str](),
    "spec.echoes": set[str](),
    "spec.switch": set[str](),
    "spec.costs": set[str](),
    # Each feature has a half on either side; what both sides call is free of torch.
    "features.base": {"registry", "schedule.plan"},
    "features.host": {"schedule", "registry", "resolve", "types"},
    "features.worker": {"schedule.plan", "registry"},
    "features.lora.host": {"schedule", "resolve", "types"},
    "features.grammar.host": {"schedule", "sample.grammars", "resolve", "types"},
    "features.logprobs.host": {"schedule", "types"},
    "features.pooling.host": {"schedule", "resolve", "types"},
    "pooling": {"features.pooling", *DATA},
    "judging": {"text", *DATA},
    "features": {
        *(
            "schedule.plan",
            "sample",
            "kernels",
            "lora",
            "worker.inputs",
            "rows",
            "transfer",
            "forward",
            "types",
        ),
    },
    "kernels": {"config", "platform", "transfer", "rows"},
    "dist": {"kernels", "config", "platform"},
    "attention": {"kernels", "native", "dist", "kv.layout", *PLAIN},
    "native": {"platform"},
    "quant": {"kernels", "native", "dist", *PLAIN},
    "quant.codes": set[str](),
    "quant.layouts": {"quant.codes", "registry"},
    "quant.schemes": {"quant.codes", "quant.layouts", "registry"},
    "weights": {"quant.layouts", "models.fields"},
    "quantize": {"quant", "weights", "models", "layers", "attention.base", "dist", "text", *PLAIN},
    "sample": {"kernels", "native", "dist", "schedule.plan", *PLAIN},
    "lora": {"kernels", "quant.base", "weights.source", *PLAIN},
    "lora.merge": {"lora", "models", "weights.source", "quantize.output"},
    "lora.request": set[str](),
    "lora.content": set[str](),
    "lora.peft_config": set[str](),
    "layers": {"native", "attention.base", "quant.base", "lora.bank", "kernels", "dist", "forward"},
    "models.builder": {"layers", "lora.bank", "attention.base", "quant", "kv.layout", "dist", *PLAIN},
    "models.build": {
        "layers",
        "lora.bank",
        "attention.base",
        "quant",
        "weights",
        "kv.layout",
        "dist",
        *PLAIN,
    },
    "models.head": {"models", "layers", "attention.base", "kv.layout", "dist", *PLAIN},
    "models": {"layers", "attention.base", "quant", "weights", "kv.layout", "collector", *PLAIN},
    "spec.timing": {
        "spec.costs",
        "spec.drafter",
        "worker.runner",
        "worker.warm_up",
        "schedule.plan",
        "resolve",
    },
    "spec": {"models", "layers", "dist", "sample", "kernels", *PLAIN},
    "worker": {
        *("attention", "quant", "sample", "lora", "layers", "models", "spec", "kernels", "dist"),
        *("schedule.plan", "kv.kinds", "kv.layout", "executor.base", "progress", *PLAIN),
        *("features.base", "features.worker", "graphs", "sleep", "lockstep", "observe.profiler"),
    },
    "graphs": {"worker.inputs", "sample.state", "features.base", "features.worker", *PLAIN},
    # Engines in step: what they agree on before each, and how it is launched.
    "lockstep": {"graphs", "layers", "worker.inputs"},
    "lockstep.pace": {"cluster.line", "dist", "nodes.connection", "executor.base"},
    # Processes and what they say; what members do is known by name only.
    "cluster": {"config", "registry", "platform", "nodes.local"},
    "cluster.messages": {
        *("schedule.plan", "observe.statistics", "observe.xray", "types", "registry"),
    },
    "member": {"cluster", "registry", "nodes.local"},
    "sleep": set[str](),
    "sleep.weights": {"worker.abridged"},
    # Other machines: members are started there, and known by name only.
    "nodes": {"cluster", "config", "platform", "progress", "registry"},
    "nodes.ray": {"nodes", "cluster", "executor.multiproc", "member", "resolve"},
    # It knows its worker by name only.
    "executor": {
        *("cluster", "schedule.plan", "kv.kinds", "config", "resolve", "registry", "interrupts", "collector"),
        *("nodes.place", "observe.progress", "spec.drafter"),
    },
    "engine": {
        *(
            "cluster",
            "schedule",
            "kv",
            "executor",
            "observe",
            "types",
            "config",
            "resolve",
            "interrupts",
            "bell",
        ),
        *("collector", "sleep.host", "nodes.place"),
    },
    "engine.client": {"engine", "observe", "router.replicas", "sleep.state", "types", "config", "resolve"},
    "observe": {"schedule", "kv", "sleep.state", *DATA},
    "observe.replay": {"observe", "engine.core", "executor.base", "schedule", "kv", *DATA},
    "connectors.peer.facts": {"connectors", "executor.base", "models.checkpoint", "resolve"},
    "connectors.peer.host": {"connectors", "executor.base", "resolve", "types"},
    "connectors.peer.params": set[str](),
    "connectors.peer.shelf": {"connectors.peer.wire"},
    "connectors.peer.trust": {"connectors.peer.params", "nodes.connection"},
    "connectors.peer.lender": {"connectors.peer", "nodes.connection"},
    "connectors.peer.reader": {"connectors.peer", "nodes.connection"},
    "router": {
        *("engine", "observe", "cluster", "kv", "schedule.news", "executor", *DATA, "config", "resolve"),
        *("registry", "nodes.local", "nodes.place", "connectors.peer.params", "connectors.peer.trust"),
    },
    "engine.build": {
        *("engine", "observe", "schedule", "kv", "executor", "nodes.place", "features.host"),
        *("connectors.base", "models.checkpoint", "models.draft"),
        *("kernels.compile.compilers", "config", "resolve", "platform"),
    },
    "text": {*DATA, "config"},
    "llm": {
        "collector",
        "llm_engine",
        "judging",
        "pooling",
        "lora.request",
        "engine",
        "text",
        *DATA,
        "config",
        "progress",
        "interrupts",
        "sleep.state",
    },
    "llm_engine": {
        "lora.request",
        "engine",
        "observe",
        "text",
        "sample.grammars",
        *DATA,
        "config",
        "resolve",
        "interrupts",
    },
    "async_llm": {
        *("llm_engine", "lora.request", "engine", "router", "observe", "cluster.line", "text"),
        *(*DATA, "config", "resolve", "sleep.state"),
    },
    "server": {
        "async_llm",
        "connectors.peer.params",
        "connectors.peer.trust",
        "llm_engine",
        "judging",
        "pooling",
        "lora.request",
        "engine",
        "observe",
        "text",
        *DATA,
        "config",
        "registry",
        "collector",
        "sleep.state",
    },
    "cli": {
        *("llm", "llm_engine", "async_llm", "server", "engine", "observe", "text", "models.checkpoint"),
        *("models.draft", "progress", "no_effect", *PLAIN),
    },
    "proxy": {"cli.load.http", "router.router"},
    "cli.route": {"cli", "proxy", "server"},
    "cli.doctor": {"cli", "doctor"},
    "doctor": {"platform", "native.build", "nodes.connection", "nodes.launcher"},
    "cli.merge": {"cli", "lora.merge", "models.checkpoint", "config"},
    "cli.inspect": {"cli", "models", "platform", "config", "resolve"},
    "cli.quantize": {"cli", "models.checkpoint", "quantize", "text", *PLAIN},
    "__main__": {"cli"},
}
NO_TORCH = [
    "pellucid.schedule.scheduler",
    "pellucid.schedule.plan",
    "pellucid.kv.manager",
    "pellucid.engine.core",
    "pellucid.features.grammar.host",
    "pellucid.features.logprobs.host",
    "pellucid.features.pooling.host",
    "pellucid.features.lora.host",
    "pellucid.connectors.host",
    "pellucid.connectors.events",
    "pellucid.connectors.peer.host",
    "pellucid.cluster.messages",
    "pellucid.executor.multiproc",
    "pellucid.router.replicas",
    "pellucid.async_llm",
]


def modules() -> Iterator[tuple[str, Path]]:
    """Every module as (name without "pellucid.", path)."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            yield name, path


def imports(path: Path) -> Iterator[str]:
    """What a file imports of ours when it runs, also inside functions; not what only type checkers read."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pellucid"))
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            if node.module and node.module.startswith("pellucid"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending += ast.iter_child_nodes(node)


def is_in(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


ROOMS = sorted({name.split(".", maxsplit=1)[0] for name, _ in modules()})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    found = [complaint(name, path) for name, path in modules() if is_in(name, {room})]
    assert not any(found), "\n".join(filter(None, found))


def complaint(name: str, path: Path) -> str:
    """About what a module imports, if it may not."""
    room = name.split(".", maxsplit=1)[0]
    allowed = {room, *MAY_IMPORT.get(name, MAY_IMPORT[room])}
    imported = {target.removeprefix("pellucid.") for target in imports(path)} - {"pellucid", "__version__"}
    strangers = sorted(target for target in imported if not is_in(target, allowed))
    return (
        f"{name} imports {', '.join(strangers)}; it may import {', '.join(sorted(allowed))}"
        if strangers
        else ""
    )


def test_only_the_build_reaches_past_the_engines_walls() -> None:
    loop = {
        target for path in (ROOT / "engine").glob("*.py") if path.stem != "build" for target in imports(path)
    }
    assert not any(target.startswith(("pellucid.models", "pellucid.worker")) for target in loop)


def test_kernels_lie_in_the_folders_of_their_map() -> None:
    room = ROOT / "kernels"
    folders = {file.parent.name for file in room.glob("*/__init__.py")}
    assert set(re.findall(r"^\* `(\w+)/`: ", (room / "__init__.py").read_text("utf-8"), re.M)) == folders
    assert [file.name for file in room.glob("*.py")] == ["__init__.py"]


def test_the_scheduler_knows_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *NO_TORCH], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# What requests may ask for is known to features alone: the loop calls hooks of whoever is asked for.
LOOP = [
    *("engine/core.py", "worker/runner.py", "worker/device_step.py", "worker/inputs.py", "worker/slots.py"),
    *("graphs/launch.py", *(f"schedule/{path.name}" for path in sorted((ROOT / "schedule").glob("*.py")))),
]
OF_FEATURES = re.compile(
    rf"{'|'.join(FEATURES)}|logprob|mask|toy|image|adapter|connector",
    re.IGNORECASE,
)


def names_of(tree: ast.AST) -> Iterator[str]:
    """All names of the code, and its texts but for docstrings and messages, which have spaces."""
    for node in ast.walk(tree):
        for name in ("id", "attr", "name", "arg", "module"):
            if isinstance(value := getattr(node, name, None), str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


@pytest.mark.parametrize("path", LOOP)
def test_the_loop_names_no_feature(path: str) -> None:
    names = {*names_of(ast.parse((ROOT / path).read_text(encoding="utf-8")))}
    assert not sorted(filter(OF_FEATURES.search, names))


def test_the_architecture_has_every_hook() -> None:
    """On the side where it is."""
    text = (
        (ROOT.parent / "ARCHITECTURE.md")
        .read_text(encoding="utf-8")
        .split("## Features")[1]
        .split("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*`) \| (host|worker)", text, re.MULTILINE)
    told = {
        side: {hook for hooks, at in rows if at == side for hook in re.findall(r"\w+", hooks)}
        for _, side in rows
    }
    rest = set(re.findall(r"`(\w+)`", text.split("Others speak of the engine")[1].split("\n\n")[0]))
    for side, half in ("host", HostFeature), ("worker", WorkerFeature):
        hooks = {name for name, value in vars(half).items() if callable(value) and not name.startswith("_")}
        assert hooks - rest == told[side]


def test_benchmarks_and_tools_import_what_is_there() -> None:
    """No other test runs most of them."""
    names = {f"pellucid.{name}": names_in(path) for name, path in modules()}
    names["pellucid"] = names_in(ROOT / "__init__.py")
    scripts = [*ROOT.parent.glob("benchmarks/*.py"), *ROOT.parent.glob("tools/**/*.py")]
    for script in scripts:
        for target in imports(script):
            module, _, name = target.rpartition(".")
            assert target in names or name in names[module], f"{script} imports {target}, which is not there"


def names_in(path: Path) -> set[str]:
    """What a module binds outside functions and classes, for whoever imports it."""
    found, pending = set[str](), list[ast.AST](ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        pending += ast.iter_child_nodes(node)
    return found


def test_the_way_of_a_request_can_be_read_in_an_afternoon() -> None:
    """The files that ARCHITECTURE.md lists."""
    text = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("## Reading order")[1].split("Beside the way")[0]
    files = re.findall(r"`([\w/]+\.py)`", table)
    assert len(files) == 17
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) <= 4000


HEART = ("schedule", "kv", "engine", "executor", "worker", "cluster")


def test_the_heart_stays_small() -> None:
    """What every request passes; what only some need, or who watches, has a room of its own."""
    files = (path for room in HEART for path in (ROOT / room).rglob("*.py"))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 7000
