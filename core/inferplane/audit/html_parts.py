"""What pages of this package are made of: their style, tables, and plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #d9dee6; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; }
figcaption { color: #556070; }
svg text { font: 12px system-ui, sans-serif; fill: #556070; }
"""
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 240, 64, 28
COLOURS = ("#2457a6", "#b3541e", "#3f7d4e")
DECADES = 9
"""Most powers of ten that a logarithmic axis has below its largest value."""


def begin_page(title: str) -> str:
    """The head of a page, and its heading."""
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>"
    return f"{head}<style>{STYLE}</style>\n<h1>{escape(title)}</h1>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def wrap_figure(body: str, caption: str) -> str:
    """A figure of what is drawn, as SVG."""
    plot = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>{body}</svg>"
    return f"<figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>"


@dataclass(frozen=True)
class Series:
    """Values over the places of a plot.

    Args:
        name: of the series.
        values: one for each place, 0 or more; infinite ones stand at the upper edge.
        has_line: they are joined by a line; else each is a dot, with its place's name as title.
    """

    name: str
    values: Sequence[float]
    has_line: bool = False


def plot_decades(
    caption: str, places: Sequence[str], series: Sequence[Series], marks: Sequence[tuple[int, str]]
) -> str:
    """A plot with a logarithmic axis; values too small for it stand at the lower edge. Empty where all values are 0.

    Args:
        caption: below the plot.
        places: names of the places, from left to right.
        series: at most as many as there are `COLOURS`.
        marks: places with a word below the axis.
    """
    finite = [value for each in series for value in each.values if 0 < value < math.inf]
    if not finite:
        return ""
    top = math.ceil(math.log10(max(finite)) + 1e-9)
    bottom = max(math.floor(math.log10(min(finite))), top - DECADES)
    bottom = min(bottom, top - 1)
    has_less = any(value < 10.0**bottom for each in series for value in each.values)
    right, height = WIDTH - LEFT - 8, HEIGHT - BOTTOM - 20

    def at(i: float) -> float:
        return LEFT + right * (i + 0.5) / len(places)

    def level(value: float) -> float:
        power = bottom if value <= 0 else top if value == math.inf else math.log10(value)
        return 20 + height * (top - min(max(power, bottom), top)) / (top - bottom)

    drawn = []
    for power in range(bottom, top + 1):
        y = level(10.0**power)
        drawn.append(f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#d9dee6'/>")
        below = "≤" if power == bottom and has_less else ""
        drawn.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{below}{10.0**power:.0e}</text>")
    for number, (each, colour) in enumerate(zip(series, COLOURS)):
        drawn.append(f"<text x='{LEFT + 8 + 200 * number}' y='12' style='fill:{colour}'>{escape(each.name)}</text>")
        if each.has_line:
            points = " ".join(f"{at(i):.1f},{level(value):.1f}" for i, value in enumerate(each.values))
            drawn.append(f"<polyline fill='none' stroke='{colour}' stroke-width='1.5' points='{points}'/>")
            continue
        for i, value in enumerate(each.values):
            title = f"<title>{escape(places[i])}: {value:.3g}</title>"
            drawn.append(f"<circle cx='{at(i):.1f}' cy='{level(value):.1f}' r='2.5' fill='{colour}'>{title}</circle>")
    for i, word in marks:
        drawn.append(f"<text x='{at(i):.1f}' y='{HEIGHT - 8}' text-anchor='middle'>{escape(word)}</text>")
    return wrap_figure("".join(drawn), caption)
