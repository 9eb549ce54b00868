"""Draws histograms and lines over time as inline SVG in the colours of the page's theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 38
BINS, MAX_POINTS = 40, 400


@dataclass(frozen=True)
class PlotLine:
    """A line of a plot.

    Args:
        name: for the legend.
        x: sorted values.
        y: one value per x.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 and their powers of ten) inside an interval."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def histogram(values: Sequence[float], title: str, unit: str, marks: Sequence[tuple[str, float]]) -> str:
    """Draw the number of values in each of 40 equal intervals.

    Args:
        values: at least one.
        title: the label for screen readers.
        unit: unit of the values.
        marks: name and value of vertical lines.
    """
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(high), 1e-30):
        low, high = low - abs(low) * 0.05 - 1e-9, high + abs(high) * 0.05 + 1e-9
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
    frame = _Frame(low, high, 0, max(counts), title, unit, "count")
    bar = (high - low) / BINS
    drawn = [
        frame.box(low + i * bar, low + (i + 1) * bar, count, f"{count} from {low + i * bar:.4g} {unit}")
        for i, count in enumerate(counts)
        if count
    ]
    return frame.svg([*drawn, *(frame.mark(name, at) for name, at in marks if low <= at <= high)])


def lines(each: Sequence[PlotLine], title: str, x_unit: str, y_unit: str) -> str:
    """Draw lines over a common axis from 0, with at most 400 points each."""
    high_x = max((line.x[-1] for line in each if line.x), default=1.0)
    high_y = max((max(line.y) for line in each if line.y), default=1.0)
    frame = _Frame(0, high_x or 1.0, 0, high_y or 1.0, title, x_unit, y_unit)
    drawn = [frame.line(line, i) for i, line in enumerate(each)]
    return frame.svg(drawn, [line.name for line in each])


def curve(each: Sequence[PlotLine], labels: Sequence[str], title: str, x_unit: str, y_unit: str) -> str:
    """Draw lines through a few labelled points, in the order given, over axes from 0.

    Args:
        each: lines with one point per label.
        labels: of the points; shown beside those of the first line.
        title: the label for screen readers.
        x_unit: unit of the horizontal axis.
        y_unit: unit of the vertical axis.
    """
    high_x = max((max(line.x) for line in each if line.x), default=1.0)
    high_y = max((max(line.y) for line in each if line.y), default=1.0)
    frame = _Frame(0, 1.08 * high_x or 1.0, 0, 1.08 * high_y or 1.0, title, x_unit, y_unit)
    drawn = []
    for i, line in enumerate(each):
        drawn.append(frame.line(line, i))
        drawn += [frame.dot(x, y, i, f"{line.name}, {label}") for x, y, label in zip(line.x, line.y, labels)]
    drawn += [frame.label(x, y, label) for line in each[:1] for x, y, label in zip(line.x, line.y, labels)]
    return frame.svg(drawn, [line.name for line in each])


def thin_line(line: PlotLine) -> PlotLine:
    """Reduce a line to at most `MAX_POINTS` points: means of equally many neighbours."""
    many = -(-len(line.x) // MAX_POINTS)
    if many <= 1:
        return line
    at = range(0, len(line.x), many)
    mean = [sum(line.y[i : i + many]) / len(line.y[i : i + many]) for i in at]
    return PlotLine(line.name, [line.x[min(i + many, len(line.x)) - 1] for i in at], mean)


class _Frame:
    def __init__(self, x0: float, x1: float, y0: float, y1: float, title: str, x_unit: str, y_unit: str) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1
        self.title, self.x_unit, self.y_unit = title, x_unit, y_unit

    def x(self, value: float) -> float:
        return round(LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM), 1)

    def box(self, left: float, right: float, height: float, words: str) -> str:
        top = self.y(height)
        wide = max(0.5, self.x(right) - self.x(left) - 1)
        return (
            f'<rect class="bar" x="{self.x(left)}" y="{top}" width="{wide:.1f}" '
            f'height="{self.y(self.y0) - top:.1f}"><title>{escape(words)}</title></rect>'
        )

    def mark(self, name: str, at: float) -> str:
        x = self.x(at)
        return (
            f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="tick" x="{x + 3}" y="{TOP + 9}">{escape(name)}</text>'
        )

    def dot(self, x: float, y: float, colour: int, words: str) -> str:
        place = f'cx="{self.x(x)}" cy="{self.y(y)}"'
        return f'<circle class="dot c{colour}" {place} r="3.5"><title>{escape(words)}</title></circle>'

    def label(self, x: float, y: float, words: str) -> str:
        return f'<text class="tick mid" x="{self.x(x)}" y="{self.y(y) + 16}">{escape(words)}</text>'

    def line(self, line: PlotLine, colour: int) -> str:
        some = thin_line(line)
        points = " ".join(f"{self.x(a)},{self.y(b)}" for a, b in zip(some.x, some.y))
        return f'<polyline class="line c{colour}" points="{points}"/>'

    def svg(self, drawn: Sequence[str], names: Sequence[str] = ()) -> str:
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title, quote=True)}">',
            *self._axes(),
            *drawn,
        ]
        if len(names) > 1:
            parts += [
                f'<text class="legend c{i}" x="{WIDTH - RIGHT - 4}" y="{TOP + 12 + 14 * i}">{escape(name)}</text>'
                for i, name in enumerate(names)
            ]
        return "".join([*parts, "</svg>"])

    def _axes(self) -> list[str]:
        bottom = HEIGHT - BOTTOM
        out = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            out.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4}">{value:g}</text>')
        for value in ticks(self.x0, self.x1, 7):
            out.append(f'<text class="tick mid" x="{self.x(value)}" y="{bottom + 15}">{value:g}</text>')
        out.append(f'<text class="tick end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(self.x_unit)}</text>')
        out.append(f'<text class="tick" x="{LEFT}" y="{HEIGHT - 6}">{escape(self.y_unit)} (vertical)</text>')
        return out
