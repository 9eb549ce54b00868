"""Writes the page of a server's figures with the parts of the other benchmarks' page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from inferplane.cli.verbs.bench import plots
from inferplane.cli.verbs.bench.html_page import BUCKETS, DISTRIBUTIONS, document, figure, pairs, table
from inferplane.cli.verbs.bench.plots import PlotLine
from inferplane.cli.verbs.bench.serve.figures import latencies, requests_running, tokens_over_time
from inferplane.cli.verbs.bench.serve.load import LevelResult
from inferplane.cli.verbs.bench.serve.measurement import ServeMeasurement
from inferplane.cli.verbs.bench.serve.wording import (
    RATES,
    client_line,
    describe_requests,
    failure_lines,
    sweep_rows,
    tokens_line,
)
from inferplane.cli.verbs.bench.statistics import LATENCIES

COLUMNS = ("min", "mean", "p50", "p90", "p95", "p99", "max")
INTERVALS = ("mean", "p50", "p90", "p95", "p99")
SWEPT = {
    "ttft": "Time to first token over throughput",
    "tpot": "Time per output token over throughput",
    "e2e": "End-to-end latency over throughput",
}


def page(measurement: ServeMeasurement) -> str:
    """The page, as one text of HTML."""
    where = measurement.environment
    title = f"serve: {where['model'] or 'a server'} at {where['url']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(where['endpoint'])}, {escape(where['date'])}</p>",
        *(f"<p>{escape(note)}</p>" for note in measurement.notes),
        *_sweep(measurement.figures),
    ]
    for figures, result in zip(measurement.figures, measurement.results):
        body += _level(figures, result)
    body += [*pairs("Environment", where), *pairs("Options", measurement.options)]
    return document(title, body)


def _sweep(each: list[dict[str, Any]]) -> list[str]:
    if len(each) < 2:
        return []
    head, rows = sweep_rows(each)
    parts = ["<h2>Levels, latencies in milliseconds</h2>", table(head, rows)]
    for name, title in SWEPT.items():
        shown = [figures for figures in each if figures["latencies"][name] is not None]
        if not shown:
            continue
        x = [figures["rates"]["output_tokens"]["value"] for figures in shown]
        drawn = [PlotLine(mark, x, [1e3 * f["latencies"][name][mark] for f in shown]) for mark in ("p50", "p99")]
        labels = [figures["load"]["label"] for figures in shown]
        parts.append(figure(title, plots.curve(drawn, labels, title, "output tokens/s", "ms")))
    return parts


def _level(figures: Mapping[str, Any], result: LevelResult) -> list[str]:
    words = [describe_requests(figures), tokens_line(figures), client_line(figures), *failure_lines(figures)]
    parts = [f"<h2>{escape(figures['load']['words'])}</h2>", *(f"<p>{escape(line)}</p>" for line in words)]
    found = {name: one for name in LATENCIES if (one := figures["latencies"][name]) is not None}
    rows = [
        [LATENCIES[name], *(f"{1e3 * one[column]:.2f}" for column in COLUMNS), f"{one['count']}"]
        for name, one in found.items()
    ]
    if rows:
        parts.append(table(("ms", *COLUMNS, "count"), rows))
    rows = [[LATENCIES[name], *_interval_cells(one["intervals"])] for name, one in found.items() if one["intervals"]]
    if rows:
        parts.append(table(("95 % intervals, ms", *INTERVALS), rows))
    rates = [[RATES[name], f"{one['value']:.4g}", one["unit"]] for name, one in figures["rates"].items()]
    parts.append(table(("", "", ""), rates))
    values = latencies(result.records)
    for name, title in DISTRIBUTIONS.items():
        if name in found:
            marks = [(mark, 1e3 * found[name][mark]) for mark in ("p50", "p99")]
            parts.append(figure(title, plots.histogram([1e3 * v for v in values[name]], title, "ms", marks)))
    return [*parts, *_over_time(figures, result)]


def _interval_cells(each: Mapping[str, Any]) -> list[str]:
    ranges = [each[name] for name in INTERVALS]
    return ["" if one is None else f"{1e3 * one[0]:.2f} to {1e3 * one[1]:.2f}" for one in ranges]


def _over_time(figures: Mapping[str, Any], result: LevelResult) -> list[str]:
    ended = [record for record in result.records if not record.failure]
    if not ended:
        return []
    running = requests_running(result.records)
    tokens = tokens_over_time(ended, figures["duration_s"], BUCKETS)
    waits = sorted((record.sent_s, 1e3 * record.ttft_s) for record in ended if record.ttft_s is not None)
    drawn: dict[str, tuple[Sequence[tuple[float, float]], str]] = {
        "Output tokens a second": (tokens, "tokens/s"),
        "Requests running": (running, "requests"),
        "Time to first token by when a request was sent": (waits, "ms"),
    }
    return [
        figure(title, plots.lines([PlotLine(title, [x for x, _ in points], [y for _, y in points])], title, "s", unit))
        for title, (points, unit) in drawn.items()
        if points
    ]
