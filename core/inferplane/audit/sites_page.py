"""An audit of sites as one HTML page that needs nothing else: figures, tables, plots over depth as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inferplane.audit.html_parts import Series, begin_page, plot_decades, table
from inferplane.audit.sitewise import SiteAudit, SiteErrors

MARKS = 12
"""Most words below a plot."""
HEADS = ("modules", "site", "arrived", "introduced", "by token", "result", "by token", "")


def write_sites_page(found: SiteAudit, model: str, reference: str, settings: Sequence[tuple[str, str]]) -> str:
    """The page's text.

    Args:
        found: what was measured.
        model: name of the model. reference: of the reference.
        settings: what was set, by name.
    """
    first = found.first
    words = "no site introduces more than its threshold" if first is None else f"{first.modules} ({first.site})"
    figures = [
        ("first site to diverge", words),
        *(("sites", f"{found.count(role):,} {role}") for role in ("introduces", "contains", "passes on", "agrees")),
    ]
    parts = [
        begin_page(f"Where {model} differs from {reference}"),
        f"<p>{found.windows:,} windows, {found.tokens:,} tokens. An error is the rms of a difference over the rms of ",
        "the reference's values. It arrives with a site's input; it is introduced if the site returns another result ",
        "for the reference's input. By token: the rms over tokens of each one's relative error, so that a token with ",
        "large values does not hide the others.</p>",
        table(("figure", ""), figures),
        table(("setting", ""), settings),
        _plot("Errors over depth: embedding, layers, last norm, head", found.units, ("introduced", "arrived", "out")),
        _plot("The same by token", found.units, ("introduced_by_token", "out_by_token")),
        _plot("Errors of all sites, in the order in which they return", found.sites, ("introduced", "arrived")),
        table(
            ("equal sites of all layers", "sites", "introduced: median", "largest", "at"),
            [(p.part, f"{p.sites:,}", as_text(p.median), as_text(p.maximum), p.at) for p in found.by_part],
        ),
        table(HEADS, [list_cells(each) for each in found.sites]),
    ]
    return "\n".join([*parts, "</html>"])


def as_text(error: float) -> str:
    """An error in three digits."""
    return f"{error:.3g}"


def list_cells(each: SiteErrors) -> tuple[str, ...]:
    """A row of a table of sites, below `HEADS`."""
    errors = each.arrived, each.introduced, each.introduced_by_token, each.out, each.out_by_token
    return (each.modules, each.site, *map(as_text, errors), each.role)


WORDS = {"out": "of the result", "introduced_by_token": "introduced", "out_by_token": "of the result"}
"""What plots call the fields of `SiteErrors`, if not by their names."""


def _plot(caption: str, sites: Sequence[SiteErrors], fields: Sequence[str]) -> str:
    """The first field as dots, the others as lines."""
    drawn = [
        Series(WORDS.get(name, name), [getattr(each, name) for each in sites], has_line=name != fields[0])
        for name in fields
    ]
    starts: list[tuple[int, str]] = []
    for i, each in enumerate(sites):
        word = each.site.partition(".")[0] if each.layer is None else str(each.layer)
        if not starts or starts[-1][1] != word:
            starts.append((i, word))
    every = math.ceil(len(starts) / MARKS)
    return plot_decades(caption, [each.site for each in sites], drawn, starts[::every])
