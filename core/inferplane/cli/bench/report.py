"""A measurement as a table, as JSON (docs/schemas/bench.json) and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferplane.cli.bench.drive import Trace
from inferplane.cli.bench.kinds import Measured
from inferplane.cli.bench.page import page
from inferplane.cli.screen import Screen, counted
from inferplane.files import write_whole

SCHEMA = 1
LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
RATES = {
    "requests": "requests",
    "output_tokens": "output tokens",
    "total_tokens": "prompt and output tokens",
    "prefill_tokens": "prefill",
    "static_output_tokens": "output tokens, static batching",
}


def data(measured: Measured) -> dict[str, Any]:
    """The measurement as docs/schemas/bench.json has it."""
    return {
        "schema": SCHEMA,
        "benchmark": measured.kind,
        "environment": measured.environment,
        "options": measured.options,
        "latencies": measured.latencies,
        "rates": measured.rates,
        "continuous_over_static": measured.ratio,
        "speculation": measured.speculation,
        "runs": [
            {"batching": batching, **_run(trace)}
            for batching, traces in (("continuous", measured.traces), ("static", measured.compared))
            for trace in traces
        ],
    }


def _run(trace: Trace) -> dict[str, Any]:
    requests = [
        {
            "prompt_tokens": s.prompt_tokens,
            "output_tokens": s.output_tokens,
            "due_s": s.due_s,
            "ttft_s": s.ttft_s,
            "tpot_s": s.tpot_s,
            "e2e_s": s.e2e_s,
        }
        for s in trace.sequences
    ]
    names = ("end_s", "spent_s", "batch", "used_blocks", "tokens")
    steps = {name: [getattr(step, name) for step in trace.steps] for name in names}
    return {"duration_s": trace.duration_s, "total_blocks": trace.total_blocks, "requests": requests, "steps": steps}


def show(measured: Measured, screen: Screen) -> None:
    """The tables, or one JSON object."""
    if screen.json:
        screen.facts(data(measured))
        return
    from rich.table import Table
    from rich.text import Text

    where = measured.environment
    title = f"{measured.kind}: {where['model']} on {where['device']} ({where['device_name']}), {where['dtype']}"
    tables = [Text(title, "bold")]
    found = {name: s for name in LATENCIES if (s := measured.latencies.get(name)) is not None}
    if found:
        table = _table(Table, "ms", *COLUMNS)
        for name, s in found.items():
            table.add_row(LATENCIES[name], *(f"{1e3 * s[column]:.2f}" for column in COLUMNS))
        tables.append(table)
    if measured.rates:
        table = _table(Table, f"over {counted(measured.options['repeats'], 'repeat')}", "median", "min", "max", "")
        for name, s in measured.rates.items():
            factor, unit = (1e3, "ms") if s["unit"] == "s" else (1, s["unit"])
            figures = (f"{factor * s[column]:.2f}" for column in ("median", "min", "max"))
            table.add_row(RATES.get(name, name), *figures, unit)
        if (ratio := measured.ratio) is not None:
            figures = (f"{ratio[column]:.2f}" for column in ("median", "min", "max"))
            table.add_row("continuous over static batching", *figures, "times")
        tables.append(table)
    if measured.speculation is not None:
        table = _table(Table, "draft", "drafted", "accepted", "share")
        for i, (d, a) in enumerate(zip(measured.speculation["drafted"], measured.speculation["accepted"])):
            table.add_row(f"{i + 1}", f"{d}", f"{a}", f"{a / d:.3f}" if d else "")
        tables.append(table)
    screen.show(*tables)


def _table(kind: Any, first: str, *columns: str) -> Any:
    table = kind(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    return table


def write(measured: Measured, as_json: Path | None, as_html: Path | None, screen: Screen) -> None:
    """Write the files that were asked for, each whole or not at all."""
    facts = data(measured)
    for path, text in (
        (as_json, lambda: json.dumps(facts, indent=1, allow_nan=False) + "\n"),
        (as_html, lambda: page(measured, facts)),
    ):
        if path is not None:
            write_whole(path, text())
            screen.said(f"wrote {path}")
