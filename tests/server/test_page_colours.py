"""What is read on the page can be read: contrast as WCAG 2.2 AA has it, computed from the style sheets."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "pellucid" / "server" / "page"
STYLES = (PAGE / "style.css").read_text()
SURFACES = ("paper", "card", "wash")
GOLDEN = 137.508  # degrees from one request's hue to the next, as paint.js has it
OF_TEXT, OF_SHAPES = 4.5, 3.0
Rgb = tuple[float, float, float]  # linear, 0 to 1


def palette(theme: str) -> dict[str, str]:
    selector = {"light": r":root \{", "dark": r':root\[data-theme="dark"\] \{'}[theme]
    body = re.search(selector + r"(.*?)\}", STYLES, re.DOTALL)
    assert body is not None
    return dict(re.findall(r"--([\w-]+): (.*?);", body[1]))


def linear(colour: str) -> Rgb:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return red, green, blue


def oklch(lightness: float, chroma: float, hue: float) -> Rgb:
    """Ottosson 2020, cut off at sRGB's borders."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short
    return min(1, max(0, red)), min(1, max(0, green)), min(1, max(0, blue))


def contrast(one: Rgb, other: Rgb) -> float:
    shares = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (one, other)]
    return (max(shares) + 0.05) / (min(shares) + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_what_it_stands_on(theme: str) -> None:
    colours = {name: linear(value) for name, value in palette(theme).items() if value.startswith("#")}
    on = {
        "ink": SURFACES,
        "soft": SURFACES,
        "faint": SURFACES,
        "warn": (*SURFACES, "warn-wash"),
        "accent": ("card",),
    }
    on["ink"] = (*SURFACES, "warn-wash")
    pairs = [(text, surface) for text, surfaces in on.items() for surface in surfaces]
    pairs.append(("card", "accent"))  # the button that sends
    weak = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert not {pair: ratio for pair, ratio in weak.items() if ratio < OF_TEXT}
    used = re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", STYLES + (PAGE / "docs.css").read_text())
    assert set(used) <= {text for text, _ in pairs}, "no text in a colour that is not looked at here"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_pictures_show_stands_out_from_the_card(theme: str) -> None:
    colours = palette(theme)
    card = linear(colours["card"])
    assert contrast(linear(colours["edge"]), card) >= OF_SHAPES, "fields have an edge"
    assert contrast(linear(colours["rest"]), card) >= OF_SHAPES, "cached blocks"
    assert contrast(linear(colours["rest"]), linear(colours["cell"])) >= 2.5, "and they are not free"
    lightness, chroma = float(colours["lightness"]), float(colours["chroma"])
    requests = [oklch(lightness, chroma, (195 + i * GOLDEN) % 360) for i in range(200)]
    assert min(contrast(each, card) for each in requests) >= OF_SHAPES
