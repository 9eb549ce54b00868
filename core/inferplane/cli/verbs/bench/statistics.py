"""Computes latencies, rates and spreads from traces. docs/benchmarks.md defines every metric."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane.cli.verbs.bench.job_runner import Trace

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
PERCENTILES = (50, 90, 95, 99)
NORMAL_95 = 1.959964
"""Half the width of the 95 % interval of a normal distribution, in standard deviations."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent of the values lie, interpolated linearly.

    Args:
        values: at least one, sorted.
        share: from 0 to 100.
    """
    place = (len(values) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def summary(values: Iterable[float], unit: str = "s") -> dict[str, Any] | None:
    """`{unit, count, mean, min, p50, p90, p95, p99, max}`; None when there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {f"p{share}": percentile(ordered, share) for share in PERCENTILES}
    extremes = {"min": ordered[0], "max": ordered[-1]}
    return {"unit": unit, "count": len(ordered), "mean": fmean(ordered), **extremes, **found}


def intervals(values: Sequence[float]) -> dict[str, list[float] | None]:
    """The 95 % intervals of the mean and the percentiles of independent values; None where there are too few values.

    The mean's is the normal one; those of percentiles lie between two of the values, by the binomial distribution of
    how many are below a percentile, so they assume no distribution of the values.
    """
    ordered = sorted(values)
    count = len(ordered)
    found: dict[str, list[float] | None] = {"mean": None}
    if count > 1:
        margin = NORMAL_95 * stdev(ordered) / math.sqrt(count)
        mean = fmean(ordered)
        found["mean"] = [mean - margin, mean + margin]
    for share in PERCENTILES:
        middle, margin = count * share / 100, NORMAL_95 * math.sqrt(count * share * (100 - share)) / 100
        low, high = math.floor(middle - margin) - 1, math.ceil(middle + margin)
        found[f"p{share}"] = [ordered[low], ordered[high]] if low >= 0 and high < count else None
    return found


def spread(values: Sequence[float], unit: str) -> dict[str, Any]:
    """`{unit, median, min, max, values}` of a figure over repeats."""
    return {"unit": unit, "median": median(values), "min": min(values), "max": max(values), "values": list(values)}


def latencies(traces: Iterable[Trace]) -> dict[str, list[float]]:
    """Every request's TTFT, TPOT and end-to-end latency, and every inter-token gap, in seconds."""
    sequences = [s for trace in traces for s in trace.sequences]
    return {
        "ttft": [s.ttft_s for s in sequences],
        "tpot": [t for s in sequences if (t := s.tpot_s) is not None],
        "itl": [gap for s in sequences for gap in s.gaps_s],
        "e2e": [s.e2e_s for s in sequences],
    }


def rates(trace: Trace) -> dict[str, tuple[float, str]]:
    """Figures of one run with their units."""
    duration = trace.duration_s
    out = sum(s.output_tokens for s in trace.sequences)
    prompts = sum(s.prompt_tokens for s in trace.sequences)
    first = max(s.arrivals[0][0] for s in trace.sequences)
    return {
        "requests": (len(trace.sequences) / duration, "requests/s"),
        "output_tokens": (out / duration, "tokens/s"),
        "total_tokens": ((out + prompts) / duration, "tokens/s"),
        "prefill_tokens": (prompts / first, "tokens/s"),
        "duration": (duration, "s"),
    }


def over_repeats(traces: Sequence[Trace], names: Sequence[str]) -> dict[str, Any]:
    """`spread` of the named rates."""
    each = [rates(trace) for trace in traces]
    return {name: spread([r[name][0] for r in each], each[0][name][1]) for name in names}


def ratio(faster: Sequence[Trace], slower: Sequence[Trace]) -> dict[str, Any]:
    """Output tokens per second of one way of batching over the other, pair by pair."""
    pairs = zip(faster, slower)
    return spread([rates(a)["output_tokens"][0] / rates(b)["output_tokens"][0] for a, b in pairs], "ratio")


def speculation(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """Drafted and accepted tokens between two `Engine.stats()`; None without drafts."""

    def grown_list(name: str) -> list[int]:
        old = list(before.get(name, ()))
        return [n - (old[i] if i < len(old) else 0) for i, n in enumerate(after.get(name, ()))]

    drafted = grown_list("spec_decode_num_draft_tokens_per_pos")
    if not any(drafted):
        return None
    accepted = grown_list("spec_decode_num_accepted_tokens_per_pos")
    drafts = "spec_decode_num_drafts_total"
    return {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": [a / d if d else 0.0 for a, d in zip(accepted, drafted)],
        "tokens_per_verification": 1 + sum(accepted) / max(1, after.get(drafts, 0) - before.get(drafts, 0)),
    }
