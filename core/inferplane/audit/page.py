"""An evaluation as one HTML page that needs nothing else: figures, tables, plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from inferplane.audit.evaluate import Evaluation, Interval, Part
from inferplane.audit.html_parts import BOTTOM, COLOURS, HEIGHT, LEFT, WIDTH, begin_page, table, wrap_figure


def write_page(found: Evaluation, model: str, reference: str | None, settings: Sequence[tuple[str, str]]) -> str:
    """The page's text.

    Args:
        found: what was measured.
        model: name of the model. reference: of the reference, or None.
        settings: what was set, by name.
    """
    title = f"{model} on texts" if reference is None else f"{model} against {reference}"
    parts = [
        begin_page(title),
        f"<p>{found.windows:,} windows, {found.tokens:,} predicted tokens. ",
        "Intervals of 95 % are by bootstrap over windows.</p>",
        table(("figure", "value", "from", "to"), _list_figures(found)),
        table(("setting", ""), settings),
        _figure("Perplexity by position in the window", found.by_position, ("perplexity", "reference_perplexity")),
    ]
    if reference is not None:
        caption = "Kullback-Leibler divergence from the reference by position, in nats a token"
        parts.append(_figure(caption, found.by_position, ("divergence",)))
    for name, rows in (("positions", found.by_position), ("file", found.by_file)):
        heads = (name, "tokens", "perplexity", "of the reference", "divergence", "same first choice")
        parts.append(table(heads, [_list_cells(part) for part in rows]))
    return "\n".join([*parts, "</html>"])


def _list_figures(found: Evaluation) -> list[tuple[str, ...]]:
    named: tuple[tuple[str, Interval | None], ...] = (
        ("perplexity", found.perplexity),
        ("perplexity of the reference", found.reference_perplexity),
        ("ratio of perplexities", found.ratio),
        ("divergence from the reference, nats a token", found.divergence),
        ("same first choice, share of positions", found.agreement),
    )
    return [(name, *(f"{value:.5g}" for value in figure)) for name, figure in named if figure is not None]


def _list_cells(part: Part) -> tuple[str, ...]:
    figures = part.perplexity, part.reference_perplexity, part.divergence, part.agreement
    return part.name, f"{part.tokens:,}", *("-" if value is None else f"{value:.5g}" for value in figures)


def _figure(caption: str, parts: Sequence[Part], fields: Sequence[str]) -> str:
    """A plot with a line for each field that has values."""
    lines = [(name, [getattr(part, name) for part in parts]) for name in fields]
    lines = [(name, values) for name, values in lines if all(v is not None and math.isfinite(v) for v in values)]
    if not lines:
        return ""
    top = max(max(values) for _, values in lines) or 1.0
    right = WIDTH - LEFT - 8

    def place(i: int, value: float) -> str:
        x = LEFT + right * (i + 0.5) / len(parts)
        return f"{x:.1f},{(HEIGHT - BOTTOM) * (1 - 0.92 * value / top):.1f}"

    drawn = []
    for number, ((name, values), colour) in enumerate(zip(lines, COLOURS)):
        points = " ".join(place(i, value) for i, value in enumerate(values))
        drawn.append(f"<polyline fill='none' stroke='{colour}' stroke-width='2' points='{points}'/>")
        label = name.replace("_", " ")
        drawn.append(f"<text x='{LEFT + 8 + 200 * number}' y='14' style='fill:{colour}'>{label}</text>")
    for i, part in enumerate(parts):
        x = LEFT + right * (i + 0.5) / len(parts)
        drawn.append(f"<text x='{x:.1f}' y='{HEIGHT - 8}' text-anchor='middle'>{escape(part.name)}</text>")
    for share in (0.0, 0.5, 1.0):
        y = (HEIGHT - BOTTOM) * (1 - 0.92 * share)
        drawn.append(f"<line x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#d9dee6'/>")
        drawn.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{top * share:.3g}</text>")
    return wrap_figure("".join(drawn), caption)
