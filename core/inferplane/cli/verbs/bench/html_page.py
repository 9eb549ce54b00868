"""Writes one HTML page per measurement: no script, no other file, light and dark, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from inferplane.cli.screen import plural
from inferplane.cli.verbs.bench import plots, statistics
from inferplane.cli.verbs.bench.plots import PlotLine

if TYPE_CHECKING:
    from inferplane.cli.verbs.bench.job_runner import Trace
    from inferplane.cli.verbs.bench.measurements import Measurement

BUCKETS = 60
DISTRIBUTIONS = {
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "e2e": "End-to-end latency",
}
STYLE = """
:root{color-scheme:light dark;--ink:#1d2430;--soft:#5a6474;--paper:#fff;--card:#f5f7fa;--rule:#d9dee6;
--a:#2463b8;--b:#c2571a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b5;--paper:#14181f;--card:#1c222c;--rule:#323b49;
--a:#6ea8f5;--b:#f0975f}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
p{color:var(--soft);margin:.2rem 0;overflow-wrap:anywhere}
.wide{overflow-x:auto;margin-bottom:.8rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left}
td.words{text-align:left;white-space:normal;overflow-wrap:anywhere}
figure{margin:0 0 .8rem;padding:.6rem;background:var(--card);border-radius:8px}figcaption{font-weight:600}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--rule)}.tick{fill:var(--soft);font-size:11px}.end,.legend{text-anchor:end}.mid{text-anchor:middle}
.bar{fill:var(--a)}.mark{stroke:var(--b);stroke-dasharray:4 3;shape-rendering:crispEdges}
.line{fill:none;stroke-width:1.6}
.dot.c0{fill:var(--a)}.dot.c1{fill:var(--b)}
.legend{font-size:12px}.line.c0{stroke:var(--a)}.line.c1{stroke:var(--b)}.legend.c0{fill:var(--a)}.legend.c1{fill:var(--b)}
"""


def page(measurement: Measurement, facts: Mapping[str, Any]) -> str:
    """The page.

    Args:
        measured: what was found.
        facts: `report.data` of it.
    """
    where = measurement.environment
    title = f"{measurement.kind}: {where['model']} on {where['device']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(where['device_name'])}, {escape(where['dtype'])}, {escape(where['date'])}</p>",
        *_latencies(facts["latencies"]),
        *_rates(measurement),
        *_speculation(facts["speculation"]),
        *_distributions(measurement),
        *_over_time(measurement),
        *pairs("Environment", {**where, **{f"version of {k}": v for k, v in where["versions"].items()}}),
        *pairs("Options", measurement.options),
    ]
    return document(title, body)


def document(title: str, body: Iterable[str]) -> str:
    """A whole page: a title and the parts of its body, which are HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{lines}</table></div>'


def _latencies(found: Mapping[str, Any]) -> list[str]:
    columns = ("min", "mean", "p50", "p90", "p95", "p99", "max")
    rows = [[name, *(f"{1e3 * s[c]:.2f}" for c in columns), f"{s['count']}"] for name, s in found.items() if s]
    return ["<h2>Latencies in milliseconds</h2>", table(("", *columns, "count"), rows)] if rows else []


def _rates(measurement: Measurement) -> list[str]:
    columns = ("median", "min", "max")
    found = dict(measurement.rates)
    if measurement.ratio is not None:
        found["continuous over static batching"] = measurement.ratio
    rows = [[name, *(f"{s[c]:.4g}" for c in columns), s["unit"]] for name, s in found.items()]
    title = "Phases of a start" if measurement.kind == "startup" else "Rates"
    words = f"<h2>{title} over {plural(measurement.options['repeats'], 'repeat')}</h2>"
    return [words, table(("", *columns, "unit"), rows)] if rows else []


def _speculation(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    rows = [
        [f"{i + 1}", f"{d}", f"{a}", f"{share:.3f}"]
        for i, (d, a, share) in enumerate(zip(found["drafted"], found["accepted"], found["acceptance"]))
    ]
    each = f"<p>{found['tokens_per_verification']:.3f} tokens a verification</p>"
    return ["<h2>Drafts by position</h2>", each, table(("draft", "drafted", "accepted", "share"), rows)]


def _distributions(measurement: Measurement) -> list[str]:
    values = statistics.latencies(measurement.traces)
    out = []
    for name, title in DISTRIBUTIONS.items():
        found = measurement.latencies.get(name)
        if found:
            marks = [(mark, 1e3 * found[mark]) for mark in ("p50", "p99")]
            out.append(figure(title, plots.histogram([1e3 * v for v in values[name]], title, "ms", marks)))
    return ["<h2>Distributions</h2>", *out] if out else []


def figure(title: str, svg: str) -> str:
    """A plot with its title."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def throughput(trace: Trace, name: str) -> PlotLine:
    """Output tokens per second in each of 60 equal intervals of a run."""
    wide = trace.duration_s / BUCKETS
    tokens = [0] * BUCKETS
    for step in trace.steps:
        tokens[min(BUCKETS - 1, int(step.end_s / wide))] += step.tokens
    return PlotLine(name, [(i + 0.5) * wide for i in range(BUCKETS)], [n / wide for n in tokens])


def _over_time(measurement: Measurement) -> list[str]:
    last = [("continuous", measurement.traces), ("static", measurement.compared)]
    shown = [(name, traces[-1]) for name, traces in last if traces]
    if not shown:
        return []

    def steps(field: str) -> list[PlotLine]:
        return [PlotLine(n, [s.end_s for s in t.steps], [getattr(s, field) for s in t.steps]) for n, t in shown]

    total = shown[0][1].total_blocks
    drawn = {
        "Output tokens a second": ([throughput(t, n) for n, t in shown], "tokens/s"),
        "Sequences in a step": (steps("batch"), "sequences"),
        f"KV blocks in use, of {total}": (steps("used_blocks"), "blocks"),
    }
    figures = [figure(title, plots.lines(each, title, "s", unit)) for title, (each, unit) in drawn.items()]
    return ["<h2>The last repeat over time</h2>", *figures]


def pairs(title: str, values: Mapping[str, Any]) -> list[str]:
    """A section with names and values."""
    rows = "".join(
        f'<tr><td>{escape(str(name))}</td><td class="words">{escape(str(value))}</td></tr>'
        for name, value in values.items()
        if name != "versions"
    )
    return [f"<h2>{escape(title)}</h2>", f'<div class="wide"><table>{rows}</table></div>']
