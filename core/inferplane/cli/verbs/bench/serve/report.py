"""Shows a measurement of a server as tables, JSON (docs/schemas/bench_serve.json) or an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inferplane.cli.screen import Screen
from inferplane.cli.verbs.bench.serve.figures import request_figures
from inferplane.cli.verbs.bench.serve.measurement import ServeMeasurement
from inferplane.cli.verbs.bench.serve.page import page
from inferplane.cli.verbs.bench.serve.wording import (
    RATES,
    client_line,
    describe_requests,
    failure_lines,
    margin_of_mean,
    sweep_rows,
    tokens_line,
)
from inferplane.cli.verbs.bench.statistics import COLUMNS, LATENCIES
from inferplane.files import write_atomically

SCHEMA = 1


def data(measurement: ServeMeasurement) -> dict[str, Any]:
    """The measurement in the form of docs/schemas/bench_serve.json."""
    levels = [
        {**figures, "requests": [request_figures(record) for record in result.records]}
        for figures, result in zip(measurement.figures, measurement.results)
    ]
    return {
        "schema": SCHEMA,
        "benchmark": "serve",
        "environment": measurement.environment,
        "options": measurement.options,
        "notes": measurement.notes,
        "levels": levels,
    }


def show(measurement: ServeMeasurement, screen: Screen) -> None:
    """Print the tables, or one JSON object with `--json`."""
    if screen.json:
        screen.facts(data(measurement))
        return
    from rich.text import Text

    where = measurement.environment
    shown: list[Any] = [
        Text(f"serve: {where['model'] or 'the server'} at {where['url']} ({where['endpoint']})", "bold")
    ]
    if len(measurement.figures) > 1:
        shown += _sweep(measurement.figures)
    else:
        shown += [part for figures in measurement.figures for part in _level(figures)]
    screen.show(*shown)


def _level(figures: Mapping[str, Any]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = [
        Text(words) for words in (describe_requests(figures), tokens_line(figures), client_line(figures))
    ]
    table = _table(Table, "ms", *COLUMNS, "mean ± 95 %")
    for name, words in LATENCIES.items():
        if (found := figures["latencies"][name]) is not None:
            margin = (
                "" if not (found["intervals"] and found["intervals"]["mean"]) else f"{1e3 * margin_of_mean(found):.2f}"
            )
            table.add_row(words, *(f"{1e3 * found[column]:.2f}" for column in COLUMNS), margin)
    if table.row_count:
        shown.append(table)
    table = _table(Table, "a second", "", "")
    for name, words in RATES.items():
        if name in figures["rates"]:
            rate = figures["rates"][name]
            table.add_row(words, f"{rate['value']:.2f}", rate["unit"].partition("/")[0])
    return [*shown, table, *(Text(line) for line in failure_lines(figures))]


def _sweep(each: Sequence[Mapping[str, Any]]) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    head, rows = sweep_rows(each)
    table = _table(Table, head[0], *head[1:])
    for row in rows:
        table.add_row(*row)
    legend = "a level is requests at a time, or conversations a second (/s); latencies are in milliseconds"
    shown: list[Any] = [table, Text(legend, "dim")]
    for figures in each:
        if figures["counts"]["failed"] or figures["counts"]["resent"] or figures["interrupted"]:
            shown += [Text(describe_requests(figures)), *(Text(f"  {line}") for line in failure_lines(figures))]
    return shown


def _table(kind: Any, first: str, *columns: str) -> Any:
    table = kind(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def write(measurement: ServeMeasurement, as_json: Path | None, as_html: Path | None, screen: Screen) -> None:
    """Write the requested files, each completely or not at all."""
    for path, text in (
        (as_json, lambda: json.dumps(data(measurement), indent=1, allow_nan=False) + "\n"),
        (as_html, lambda: page(measurement)),
    ):
        if path is not None:
            write_atomically(path, text())
            screen.print_remark(f"wrote {path}")
