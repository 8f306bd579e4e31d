"""A sweep as a picture: latency against throughput, as SVG by itself; PNG where cairosvg is installed."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pellucid.cli.load.figures import Figures
from pellucid.registry import load_object

WIDTH, HEIGHT, MARGIN = 480, 360, 56
COLOURS = {"p50": "#2563eb", "p90": "#d97706", "p99": "#dc2626"}
PANELS = {"ttft_ms": "time to first token, ms", "itl_ms": "between tokens, ms"}
FORMATS = (".html", ".svg", ".png")


def check_plot(path: str) -> None:
    """Raise ValueError if a plot cannot be written there, before anything is measured."""
    file = Path(path).absolute()
    if file.suffix not in FORMATS:
        raise ValueError(f"--plot {path!r} ends in none of {', '.join(FORMATS)}")
    if not file.parent.is_dir():
        raise ValueError(f"--plot {path!r} cannot be written; name a file in a folder that exists")
    if file.suffix == ".png":
        try:
            load_object("cairosvg:svg2png")
        except (ImportError, OSError) as error:
            raise ValueError(
                f"--plot {path!r} needs the package cairosvg ({error}); install it, or name an .html file"
            ) from None


def write_plot(path: str, runs: Sequence[Figures]) -> None:
    """Draw all runs into one file, in the format that its name ends in."""
    picture = draw(runs)
    file = Path(path)
    if file.suffix == ".png":
        load_object("cairosvg:svg2png")(bytestring=picture.encode(), write_to=str(file), scale=2)
    elif file.suffix == ".svg":
        file.write_text(picture, encoding="utf-8")
    else:
        title = html.escape(f"{runs[0].model}, {runs[0].workload}")
        page = f"<!doctype html><meta charset=utf-8><title>{title}</title><body>{picture}</body>"
        file.write_text(page, encoding="utf-8")


def draw(runs: Sequence[Figures]) -> str:
    """An SVG with a panel for each of PANELS, of the lane that streams."""
    panels = [_panel(key, title, runs, MARGIN + i * WIDTH) for i, (key, title) in enumerate(PANELS.items())]
    size = f"{len(PANELS) * WIDTH} {HEIGHT + 40}"
    title = html.escape(f"{runs[0].model}: {runs[0].workload}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="22" font-size="15">{title}</text>'
        f'<g transform="translate(0 36)">{"".join(panels)}</g></svg>'
    )


@dataclass(frozen=True, slots=True)
class _Axes:
    """Places of values: throughput from 0, latency on a logarithmic scale."""

    left: float
    most: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return self.left + (WIDTH - 2 * MARGIN) * value / self.most

    def y(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return HEIGHT - MARGIN - (HEIGHT - 1.4 * MARGIN) * share


def _panel(key: str, title: str, runs: Sequence[Figures], left: float) -> str:
    found = [
        (run.output_tokens_per_second, run.setting, {"p50": each.p50, "p90": each.p90, "p99": each.p99})
        for run in runs
        if run.lanes and (each := run.lanes[0].latencies.get(key)) is not None
    ]
    if not found:
        return f'<text x="{left}" y="40">{title}: nothing was measured</text>'
    values = [max(figures[name], 1e-3) for _, _, figures in found for name in COLOURS]
    axes = _Axes(left, 1.1 * max(x for x, _, _ in found), min(values) / 2, max(values) * 2)
    parts = [_frame(axes, title)]
    for name, colour in COLOURS.items():
        points = [(axes.x(x), axes.y(max(figures[name], 1e-3))) for x, _, figures in found]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            f'<text x="{x + 5:.1f}" y="{y - 5:.1f}" fill="{colour}">{figures[name]:,.3g}</text>'
            for (x, y), (_, _, figures) in zip(points, found, strict=True)
        ]
    parts += [
        f'<text x="{axes.x(x):.1f}" y="{HEIGHT - MARGIN + 26}" text-anchor="middle" fill="#555">'
        f"{html.escape(setting)}</text>"
        for x, setting, _ in found
    ]
    return "".join(parts)


def _frame(axes: _Axes, title: str) -> str:
    right, bottom, top = axes.x(axes.most), HEIGHT - MARGIN, 0.4 * MARGIN
    parts = [f'<text x="{axes.left}" y="12" font-size="13">{title}</text>']
    for i, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{right - 36 * (3 - i)}" y="12" fill="{colour}">{name}</text>')
    for value in _round_values(axes.low, axes.high):
        y = axes.y(value)
        parts.append(
            f'<path d="M{axes.left} {y:.1f}H{right:.1f}" stroke="#ddd"/>'
            f'<text x="{axes.left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for i in range(5):
        value = axes.most * i / 4
        parts.append(
            f'<text x="{axes.x(value):.1f}" y="{bottom + 13}" text-anchor="middle">{value:,.0f}</text>'
        )
    parts.append(f'<path d="M{axes.left} {top}V{bottom}H{right}" stroke="#333" fill="none"/>')
    middle = (axes.left + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">output tokens a second</text>')
    return "".join(parts)


def _round_values(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for p in powers for d in (1, 2, 5) if low <= (value := d * 10.0**p) <= high]
