"""Counters, gauges and histograms that the engine keeps; front ends publish them under the prefix `inferplane:`.

The names are those that dashboards for other engines use, so that they port by search and replace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LATENCY_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
"""Upper bounds of histogram buckets in seconds; the last bucket is open."""


@dataclass
class Histogram:
    """Counts by bucket, their sum and number.

    Args:
        bounds: upper bounds, inclusive.
    """

    bounds: tuple[float, ...] = LATENCY_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value in its bucket, in the sum and in the number."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """Mean of all values, 0 for none."""
        return self.total / self.count if self.count else 0.0


class Metrics:
    """The numbers of one engine. Intervals come from one monotonic clock.

    Attributes: counters and histograms by name; `accepted_per_position[i]` counts steps in which draft i was accepted;
    `waits` counts, by the reason, steps that were not prepared while another one ran (`loop/overlap.py`).
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.accepted_per_position: Counter[int] = Counter()
        self.drafts_per_position: Counter[int] = Counter()
        self.histograms = {
            name: Histogram()
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "step_time_seconds",
                "schedule_commit_time_seconds",
            )
        }

    def observe(self, name: str, value: float) -> None:
        """Add one interval of `value` seconds to the histogram `name`."""
        self.histograms[name].observe(value)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count one sequence's verification in one step: its number of drafts, and how many of them were accepted."""
        self.counters["spec_decode_num_drafts_total"] += 1
        self.counters["spec_decode_num_draft_tokens_total"] += num_drafts
        self.counters["spec_decode_num_accepted_tokens_total"] += num_accepted
        for i in range(num_drafts):
            self.drafts_per_position[i] += 1
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1

    def snapshot(self, **gauges: float) -> dict[str, Any]:
        """All numbers as JSON-ready data by name; `gauges`, values as of now which the engine passes, are included
        unchanged.
        """
        positions = range(max(self.drafts_per_position, default=-1) + 1)
        return {
            **gauges,
            **self.counters,
            "request_success_total": dict(self.finished),
            "requests_rejected_total": dict(self.rejected),
            "async_scheduling_waits_total": dict(self.waits),
            "spec_decode_num_accepted_tokens_per_pos": [self.accepted_per_position[i] for i in positions],
            "spec_decode_num_draft_tokens_per_pos": [self.drafts_per_position[i] for i in positions],
            **{
                name: {"bounds": list(h.bounds), "counts": list(h.counts), "sum": h.total, "count": h.count}
                for name, h in self.histograms.items()
            },
        }
