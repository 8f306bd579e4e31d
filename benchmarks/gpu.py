"""All that only a GPU can show: `python benchmarks/gpu.py new table --out FOLDER --minutes 25`.

The rows of gpu.toml, in its order: tests that need a GPU, and figures beside what was recorded.  Each is a
process with GPUs of its own; as many rows of one GPU run at once as there are GPUs, rows of more run alone.
FOLDER gets summary.md, summary.json and log.txt, whole after every row, and the log of what runs on a GPU
until that has ended.  Exits with 1 if a row failed, ran too long, or shows worse than it must.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from math import inf
from pathlib import Path

HERE = Path(__file__).parent
LOG_BYTES, ROW_BYTES = 6 << 20, 96 << 10  # of log.txt at most, and of a row's part of it
BAD = ("failed", "too long", "worse")


@dataclass(frozen=True, slots=True)
class Gpu:
    index: str
    name: str
    gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of the table."""

    path: str  # GROUP/NAME
    run: str  # for a shell in the repository's root; $SCRATCH is a folder of its own
    shows: str
    seconds: float  # on an H200, caches of kernels empty
    limit: float | None = None  # seconds, after which it is killed; None: twice as many and a minute
    gpus: int = 1
    gib: float = 20  # of memory, each
    needs: Sequence[str] = ()  # modules, beside those of pytest where it is run
    figures: str = ""  # pattern of the log's lines that are shown, or of their groups; "": the last line
    recorded: str = ""  # where it has run
    # What numbers in these figures must be, by their places in them, from "1" on.
    at_most: Mapping[str, float] = field(default_factory=dict[str, float])
    at_least: Mapping[str, float] = field(default_factory=dict[str, float])

    def figures_of(self, log: str) -> tuple[str, list[float]]:
        """What is shown of a log, and the numbers in it."""
        lines = [" ".join(re.sub("[│┃|]", " ", line).split()) for line in log.splitlines()]
        cells = [line for line in lines if line][-1:]
        if self.figures:
            found = [match for line in lines if (match := re.search(self.figures, line))]
            cells = [" ".join(filter(None, match.groups())) or match[0] for match in found]
        text = "; ".join(cells)
        return text[:600], [float(n.replace(",", "")) for n in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*", text)]

    def is_worse(self, numbers: Sequence[float]) -> bool:
        """Than it must be, or without a number that must be there."""
        there = {str(place): number for place, number in enumerate(numbers, start=1)}
        highs = (there.get(place, inf) > limit for place, limit in self.at_most.items())
        lows = (there.get(place, -inf) < limit for place, limit in self.at_least.items())
        return any(highs) or any(lows)

    def lacks(self, gpus: Sequence[Gpu]) -> str:
        """Why it cannot run here; nothing if it can."""
        needs = (*self.needs, *(("pytest", "hypothesis") if "pytest" in self.run else ()))
        if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
            return f"not installed: {', '.join(missing)}"
        if len(gpus) < self.gpus:
            return f"it needs {self.gpus} GPUs"
        least = min(gpu.gib for gpu in gpus)
        return f"it needs {self.gib:g} GiB of a GPU, which has {least:.0f}" if least < self.gib else ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row."""

    row: Row
    verdict: str  # passed, worse, failed, too long, interrupted, or skipped
    figures: str  # or why it was skipped
    seconds: float = 0.0
    exit_code: int | None = None


class Running:
    """A row's process, which leads a session of its own."""

    def __init__(self, row: Row, gpus: Sequence[Gpu], log: Path, scratch: Path, until: float) -> None:
        self.row, self.gpus, self.log, self.began = row, gpus, log, time.monotonic()
        self.until = min(until, self.began + (row.limit or 60 + 2 * row.seconds))
        (own := scratch / row.path.replace("/", "-")).mkdir()
        there = {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu.index for gpu in gpus),
            "TRITON_CACHE_DIR": str(scratch / f"triton-{gpus[0].index}"), "SCRATCH": str(own),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1", "COLUMNS": "200",
        }  # fmt: skip
        command = re.sub(r"\bpython(?= )", lambda _: shlex.quote(sys.executable), row.run)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, shell=True, cwd=HERE.parent, env=os.environ | there, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def end(self, *, interrupted: bool = False) -> Outcome | None:
        """None: it runs on.  Whoever is left of its session, all of it after too long, is killed."""
        code, now = self.process.poll(), time.monotonic()
        if code is None and now < self.until and not interrupted:
            return None
        kill_session(self.process.pid)
        figures, numbers = self.row.figures_of(trimmed(self.log, ROW_BYTES))
        verdict = "failed" if code else "worse" if self.row.is_worse(numbers) else "passed"
        if code is None:
            verdict = "interrupted" if interrupted else "too long"
        return Outcome(self.row, verdict, figures, round(now - self.began, 1), self.process.wait())


def kill_session(leader: int) -> None:
    """Kill its processes, in whichever groups: members of an engine each lead one."""
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended meanwhile, or is none
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)


class Report:
    """What has become of rows, in files that are whole at any time."""

    def __init__(self, folder: Path, gpus: Sequence[Gpu], log_bytes: int) -> None:
        """log_bytes: of log.txt at most for each row."""
        self.folder, self.log_bytes, self.outcomes = folder, log_bytes, list[Outcome]()
        self.machine: dict[str, object] = {"gpus": [gpu.name for gpu in gpus], "cores": os.cpu_count()}
        for name in filter(importlib.util.find_spec, ("torch", "triton")):
            self.machine[name] = importlib.metadata.version(name)
        asked = ["git", "rev-parse", "--short", "HEAD"]
        with suppress(OSError, subprocess.CalledProcessError):
            self.machine["commit"] = subprocess.check_output(asked, cwd=HERE, text=True).strip()
        (folder / "log.txt").write_bytes(b"")

    def add(self, outcome: Outcome, log: Path | None = None) -> None:
        self.outcomes.append(outcome)
        row, took = outcome.row, ""
        if log is not None:
            took = f"{outcome.seconds:6.1f} s, exit {outcome.exit_code}: "
            with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"\n=== {row.path}: {outcome.verdict}\n{row.run}\n\n")
                file.write(trimmed(log, self.log_bytes) + "\n")
            log.unlink()
        rows = [each.pop("row") | each for each in map(asdict, self.outcomes)]
        self._write("summary.json", json.dumps({"machine": self.machine, "rows": rows}, indent=1))
        self._write("summary.md", self._table())
        with suppress(BrokenPipeError):  # the files count, whoever reads along
            print(f"{row.path:24} {outcome.verdict:11} {took}{outcome.figures}", flush=True)

    def _table(self) -> str:
        lines = [", ".join(f"{name}: {value}" for name, value in self.machine.items()), ""]
        lines += ["| row | | s | figures | recorded | must |", "|---|---|---|---|---|---|"]
        for each in self.outcomes:
            row = each.row
            musts = [f"number {place} <= {limit:g}" for place, limit in row.at_most.items()]
            musts += [f"number {place} >= {limit:g}" for place, limit in row.at_least.items()]
            cells = (
                row.path,
                each.verdict,
                f"{each.seconds:.0f}",
                each.figures,
                row.recorded,
                ", ".join(musts),
            )
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def _write(self, name: str, text: str) -> None:
        (new := self.folder / f"{name}.new").write_text(text, encoding="utf-8")
        new.replace(self.folder / name)


def trimmed(log: Path, most: int) -> str:
    """A log, or a quarter of `most` bytes from its beginning and the rest from its end."""
    with log.open("rb") as file:
        if (size := os.fstat(file.fileno()).st_size) <= most:
            return file.read().decode(errors="replace")
        head = file.read(most // 4)
        file.seek(size - most * 3 // 4)
        return f"{head.decode(errors='replace')}\n[...]\n{file.read().decode(errors='replace')}"


def run_all(rows: Sequence[Row], gpus: Sequence[Gpu], report: Report, until: float, stops: list[int]) -> None:
    """until: when the last one must have ended (time.monotonic).  stops: signals that came, which end all."""
    waiting, running, free = deque[Row](), list[Running](), list(gpus)
    for row in rows:
        if why := row.lacks(gpus):
            report.add(Outcome(row, "skipped", why))
        else:
            waiting.append(row)
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
        while (waiting or running) and not stops:
            for each in tuple(running):
                if outcome := each.end():
                    running.remove(each)
                    free += each.gpus
                    report.add(outcome, each.log)
            if waiting and time.monotonic() + waiting[0].seconds > until:
                row = waiting.popleft()
                report.add(Outcome(row, "skipped", f"it takes {row.seconds:g} s, which are not left"))
            elif waiting and may_start(waiting[0], running, len(free)):
                row = waiting.popleft()
                own, free = free[: row.gpus], free[row.gpus :]
                log = report.folder / f"gpu{own[0].index}.log"
                running.append(Running(row, own, log, Path(scratch), until))
            else:
                time.sleep(0.02)
        for each in running:
            if outcome := each.end(interrupted=True):
                report.add(outcome, each.log)


def may_start(row: Row, running: Sequence[Running], num_free: int) -> bool:
    if row.gpus > 1:
        return not running
    return num_free > 0 and all(each.row.gpus == 1 for each in running)


def gpus_here() -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names by number, if it is set."""
    ask = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    found = [line.split(", ") for line in said.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [each[0] for each in found] if visible is None else visible.split(",")
    return [Gpu(index, name, float(mib) / 1024) for index, name, mib in found if index in wanted]


def choose(table: Path, wanted: Sequence[str], done: Sequence[Path]) -> list[Row]:
    """Rows of the groups, or rows, that are named, without those that are done."""
    rows = [
        Row(path=f"{group}/{name}", **fields)
        for group, named in tomllib.loads(table.read_text(encoding="utf-8")).items()
        for name, fields in named.items()
    ]
    names = {name for row in rows for name in (row.path, row.path.partition("/")[0])}
    for name in set(wanted) - names:
        near = get_close_matches(name, names, 1)
        raise ValueError(f"{name!r} is no group and no row; {f'{near[0]}? ' if near else ''}--list shows all")
    before = (each for file in done for each in json.loads(file.read_text(encoding="utf-8"))["rows"])
    ended = {each["path"] for each in before if each["verdict"] in ("passed", "worse")}
    chosen = [row for row in rows if not wanted or {row.path, row.path.partition("/")[0]} & {*wanted}]
    return [row for row in chosen if row.path not in ended]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="GROUP", help="or GROUP/NAME; all if none is named")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the summary is written")
    parser.add_argument("--minutes", type=float, default=1e6, help="in which all that begins must end")
    parser.add_argument(
        "--done", type=Path, nargs="*", default=[], help="summary.json of earlier runs: not again"
    )
    parser.add_argument("--list", action="store_true", help="show the rows, and run none")
    parser.add_argument("--table", type=Path, default=HERE / "gpu.toml", help="of rows")
    args = parser.parse_args()
    try:
        rows = choose(args.table, args.wanted, args.done)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for row in rows:
            print(f"{row.path:24} {row.seconds:4g} s, {row.gpus} x {row.gib:g} GiB: {row.shows}")
            print(f"    {row.run}")
        return 0
    if args.out is None:
        parser.error("say --out FOLDER, where the summary is written")
    if not (gpus := gpus_here()):
        parser.error("nvidia-smi shows no NVIDIA GPU, and each row needs one or two; --list shows the rows")
    args.out.mkdir(parents=True, exist_ok=True)
    stops, log_bytes = list[int](), min(ROW_BYTES, LOG_BYTES // (len(rows) or 1))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stops.append(number))
    report = Report(args.out, gpus, log_bytes)
    run_all(rows, gpus, report, time.monotonic() + 60 * args.minutes, stops)
    return 128 + stops[0] if stops else int(any(each.verdict in BAD for each in report.outcomes))


if __name__ == "__main__":
    sys.exit(main())
