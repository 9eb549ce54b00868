"""Computes the figures of a level from its records. docs/benchmarks.md defines every metric."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from inferplane.cli.verbs.bench.serve.load import LevelResult
from inferplane.cli.verbs.bench.serve.records import FAILURES, RequestRecord
from inferplane.cli.verbs.bench.serve.targets import meets
from inferplane.cli.verbs.bench.statistics import intervals, summary
from inferplane.errors import EngineError

MAX_EXAMPLES = 10
REQUEST_FIELDS = (
    *(
        "due_s",
        "sent_s",
        "finished_s",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "prompt_tokens",
        "output_tokens",
        "requested_tokens",
    ),
    *("counted_by", "finish_reason", "failure", "error"),
)


def latencies(records: Sequence[RequestRecord]) -> dict[str, Sequence[float]]:
    """Return the latencies of requests that ended, and every gap of theirs, in seconds."""
    ended = [record for record in records if not record.failure]
    return {
        "ttft": [value for record in ended if (value := record.ttft_s) is not None],
        "itl": array("d", (gap for record in ended for gap in record.gaps_s)),
        "tpot": [value for record in ended if (value := record.tpot_s) is not None],
        "e2e": [value for record in ended if (value := record.e2e_s) is not None],
    }


def level_figures(result: LevelResult, targets: dict[str, float]) -> dict[str, Any]:
    """Return a level's figures, JSON-ready, without its single requests.

    Args:
        result: of the level.
        targets: of goodput, in seconds by metric; empty for none.

    Raises:
        EngineError: the counts do not add up, which would be a bug.
    """
    records, plan = result.records, result.plan
    ended = [record for record in records if not record.failure]
    failures = Counter(record.failure for record in records if record.failure)
    if len(ended) + sum(failures.values()) != len(records) or not failures.keys() <= FAILURES.keys():
        raise EngineError(f"{len(records)} requests were sent, {len(ended)} ended, and {dict(failures)} failed.")
    duration_s = max(result.duration_s, 1e-9)
    met = sum(meets(record, targets) for record in records)
    found = {
        name: None
        if (one := summary(values)) is None
        else {**one, "intervals": None if name == "itl" else intervals(values)}
        for name, values in latencies(records).items()
    }
    prompt_tokens, output_tokens = (sum(getattr(r, name) for r in ended) for name in ("prompt_tokens", "output_tokens"))
    rates = {
        "requests": (len(ended), "requests/s"),
        "output_tokens": (output_tokens, "tokens/s"),
        "prompt_tokens": (prompt_tokens, "tokens/s"),
        "total_tokens": (prompt_tokens + output_tokens, "tokens/s"),
        **({"goodput": (met, "requests/s")} if targets else {}),
    }
    late = [max(0.0, record.sent_s - record.due_s) for record in records] if plan.rate is not None else []
    running = requests_running(records)
    return {
        "load": {
            "words": plan.describe(),
            "label": plan.label,
            "concurrency": plan.concurrency,
            "rate": None if plan.rate is None else str(plan.rate),
            "arrivals": None if plan.rate is None else str(plan.process),
            "requests": plan.max_requests,
            "duration_s": plan.duration_s,
        },
        "interrupted": result.interrupted,
        "duration_s": result.duration_s,
        "counts": {
            "sent": len(records),
            "ended": len(ended),
            "failed": sum(failures.values()),
            "failures": {kind: failures.get(kind, 0) for kind in FAILURES},
            "not_sent": result.not_sent,
            "resent": result.resent,
            "without_text": sum(not record.arrivals for record in ended),
            "shorter_than_requested": sum(record.output_tokens < record.requested_tokens for record in ended),
            "met_targets": met if targets else None,
        },
        "failure_examples": _examples(records),
        "tokens": {
            "prompt": prompt_tokens,
            "output": output_tokens,
            "counted_by": dict(Counter(record.counted_by for record in ended)),
            "without_prompt_count": sum(not record.prompt_tokens for record in ended),
        },
        "rates": {name: {"value": amount / duration_s, "unit": unit} for name, (amount, unit) in rates.items()},
        "latencies": found,
        "sent_late": summary(late),
        "requests_running": {
            "mean": _mean_running(records, duration_s),
            "max": max((n for _, n in running), default=0),
        },
        "client_cpu_share": result.cpu_s / duration_s,
    }


def requests_running(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Return when the number of running requests changed, and what it was then."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.finished_s, -1) for r in records])
    found, now = [], 0
    for at, change in changes:
        now += change
        found.append((at, now))
    return found


def _mean_running(records: Sequence[RequestRecord], duration_s: float) -> float:
    return sum(record.finished_s - record.sent_s for record in records) / duration_s


def _examples(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    found = Counter((record.failure, record.error) for record in records if record.failure)
    return [{"failure": kind, "error": error, "count": n} for (kind, error), n in found.most_common(MAX_EXAMPLES)]


def request_figures(record: RequestRecord) -> dict[str, Any]:
    """Return one request, JSON-ready."""
    return {name: getattr(record, name) for name in REQUEST_FIELDS}


def tokens_over_time(records: Sequence[RequestRecord], duration_s: float, buckets: int) -> list[tuple[float, float]]:
    """Return output tokens a second in equal intervals, by their middles; a request's events share its tokens."""
    wide = max(duration_s, 1e-9) / buckets
    tokens = [0.0] * buckets
    for record in records:
        for at in record.arrivals:
            place = min(buckets - 1, max(0, math.floor(at / wide)))
            tokens[place] += max(1, record.output_tokens) / len(record.arrivals)
    return [((i + 0.5) * wide, n / wide) for i, n in enumerate(tokens)]
