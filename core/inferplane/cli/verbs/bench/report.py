"""Shows a measurement as tables, JSON (docs/schemas/bench.json) or an HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferplane.cli.screen import Screen, plural
from inferplane.cli.verbs.bench.html_page import page
from inferplane.cli.verbs.bench.job_runner import Trace
from inferplane.cli.verbs.bench.measurements import Measurement
from inferplane.cli.verbs.bench.statistics import COLUMNS, LATENCIES
from inferplane.files import write_atomically

SCHEMA = 1
REQUEST_FIELDS = ("prompt_tokens", "output_tokens", "due_s", "ttft_s", "tpot_s", "e2e_s")
STEP_FIELDS = ("end_s", "spent_s", "batch", "used_blocks", "tokens")
RATES = {
    "requests": "requests",
    "output_tokens": "output tokens",
    "total_tokens": "prompt and output tokens",
    "prefill_tokens": "prefill",
    "static_output_tokens": "output tokens, static batching",
}


def data(measurement: Measurement) -> dict[str, Any]:
    """The measurement in the form of docs/schemas/bench.json."""
    return {
        "schema": SCHEMA,
        "benchmark": measurement.kind,
        "environment": measurement.environment,
        "options": measurement.options,
        "latencies": measurement.latencies,
        "rates": measurement.rates,
        "continuous_over_static": measurement.ratio,
        "speculation": measurement.speculation,
        "runs": [
            {"batching": batching, **_run(trace)}
            for batching, traces in (("continuous", measurement.traces), ("static", measurement.compared))
            for trace in traces
        ],
    }


def _run(trace: Trace) -> dict[str, Any]:
    requests = [{name: getattr(s, name) for name in REQUEST_FIELDS} for s in trace.sequences]
    steps = {name: [getattr(step, name) for step in trace.steps] for name in STEP_FIELDS}
    return {"duration_s": trace.duration_s, "total_blocks": trace.total_blocks, "requests": requests, "steps": steps}


def show(measurement: Measurement, screen: Screen) -> None:
    """Print the tables, or one JSON object with `--json`."""
    if screen.json:
        screen.facts(data(measurement))
        return
    from rich.table import Table
    from rich.text import Text

    where = measurement.environment
    title = f"{measurement.kind}: {where['model']} on {where['device']} ({where['device_name']}), {where['dtype']}"
    tables = [Text(title, "bold")]
    found = {name: s for name in LATENCIES if (s := measurement.latencies.get(name)) is not None}
    if found:
        table = _table(Table, "ms", *COLUMNS)
        for name, s in found.items():
            table.add_row(LATENCIES[name], *(f"{1e3 * s[column]:.2f}" for column in COLUMNS))
        tables.append(table)
    if measurement.rates:
        table = _table(Table, f"over {plural(measurement.options['repeats'], 'repeat')}", "median", "min", "max", "")
        for name, s in measurement.rates.items():
            factor, unit = (1e3, "ms") if s["unit"] == "s" else (1, s["unit"])
            figures = (f"{factor * s[column]:.2f}" for column in ("median", "min", "max"))
            table.add_row(RATES.get(name, name), *figures, unit)
        if (ratio := measurement.ratio) is not None:
            figures = (f"{ratio[column]:.2f}" for column in ("median", "min", "max"))
            table.add_row("continuous over static batching", *figures, "times")
        tables.append(table)
    if measurement.speculation is not None:
        table = _table(Table, "draft", "drafted", "accepted", "share")
        for i, (d, a) in enumerate(zip(measurement.speculation["drafted"], measurement.speculation["accepted"])):
            table.add_row(f"{i + 1}", f"{d}", f"{a}", f"{a / d:.3f}" if d else "")
        tables.append(table)
    screen.show(*tables)


def _table(kind: Any, first: str, *columns: str) -> Any:
    table = kind(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    return table


def write(measurement: Measurement, as_json: Path | None, as_html: Path | None, screen: Screen) -> None:
    """Write the requested files, each completely or not at all."""
    facts = data(measurement)
    for path, text in (
        (as_json, lambda: json.dumps(facts, indent=1, allow_nan=False) + "\n"),
        (as_html, lambda: page(measurement, facts)),
    ):
        if path is not None:
            write_atomically(path, text())
            screen.print_remark(f"wrote {path}")
