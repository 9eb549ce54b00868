"""Words and rows of a server's figures, for the table in a terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferplane.cli.screen import plural
from inferplane.cli.verbs.bench.serve.records import FAILURES

RATES = {
    "requests": "requests",
    "goodput": "requests that met the targets",
    "output_tokens": "output tokens",
    "prompt_tokens": "prompt tokens",
    "total_tokens": "prompt and output tokens",
}
SWEPT = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"), ("e2e", "p50"))
"""Latency and percentile of each column of a sweep."""
COUNTERS = {"usage": "the server's usage", "tokenizer": "--tokenizer", "chunks": "events with text"}


def describe_requests(figures: Mapping[str, Any]) -> str:
    """How many requests were sent, ended and failed, in words."""
    counts = figures["counts"]
    failures = [f"{n} {FAILURES[kind]}" for kind, n in counts["failures"].items() if n]
    parts = [
        f"{figures['load']['words']}: {plural(counts['sent'], 'request')} sent in {figures['duration_s']:.1f} s",
        f"{counts['ended']} ended",
        f"{counts['failed']} failed" + (f" ({', '.join(failures)})" if failures else ""),
    ]
    if counts["not_sent"]:
        parts.append(f"{counts['not_sent']} of their conversations not sent")
    return ", ".join(parts) + ("; interrupted" if figures["interrupted"] else "")


def tokens_line(figures: Mapping[str, Any]) -> str:
    """How many tokens there were, and who counted them, in words."""
    tokens, counts = figures["tokens"], figures["counts"]
    by = ", ".join(f"{plural(n, 'answer')} by {COUNTERS[how]}" for how, n in tokens["counted_by"].items())
    words = f"{tokens['prompt']} prompt tokens, {tokens['output']} output tokens ({by or 'none counted'})"
    if tokens["without_prompt_count"]:
        words += f"; {plural(tokens['without_prompt_count'], 'prompt')} without a count"
    if counts["shorter_than_requested"]:
        words += f"; {plural(counts['shorter_than_requested'], 'answer')} shorter than requested"
    if counts["without_text"]:
        words += f"; {plural(counts['without_text'], 'answer')} without text"
    return words


def client_line(figures: Mapping[str, Any]) -> str:
    """What the client itself took, in words."""
    running = figures["requests_running"]
    words = f"{running['mean']:.1f} requests at a time (at most {running['max']})"
    words += f"; this client took {figures['client_cpu_share']:.0%} of a core"
    if (late := figures["sent_late"]) is not None:
        words += f", and sent {1e3 * late['p99']:.1f} ms late (p99)"
    return words


def failure_lines(figures: Mapping[str, Any]) -> list[str]:
    """The most frequent failures of a level, and how many requests were sent again, in words."""
    lines = [f"{one['count']} x {FAILURES[one['failure']]}: {one['error']}" for one in figures["failure_examples"]]
    if resent := figures["counts"]["resent"]:
        words = f"{plural(resent, 'request')} sent again, since the server closed a reused connection unanswered"
        lines.append(words)
    return lines


def margin_of_mean(found: Mapping[str, Any]) -> float:
    """Half the width of the interval of a latency's mean, in seconds."""
    low, high = found["intervals"]["mean"]
    return float(high - low) / 2


def sweep_rows(each: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of the table of a sweep, one row a level."""
    has_targets = any("goodput" in figures["rates"] for figures in each)
    head = ["level", "sent", "failed", "req/s", *(["met/s"] if has_targets else []), "tok/s"]
    head += [f"{name} {column}" for name, column in SWEPT]
    rows = []
    for figures in each:
        rates, counts = figures["rates"], figures["counts"]
        row = [figures["load"]["label"], f"{counts['sent']}", f"{counts['failed']}"]
        row.append(f"{rates['requests']['value']:.2f}")
        row += [f"{rates['goodput']['value']:.2f}"] if has_targets else []
        row.append(f"{rates['output_tokens']['value']:.1f}")
        for name, column in SWEPT:
            found = figures["latencies"][name]
            row.append("" if found is None else f"{1e3 * found[column]:.1f}")
        rows.append(row)
    return head, rows
