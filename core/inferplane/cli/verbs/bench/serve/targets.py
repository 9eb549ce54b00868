"""Targets of latencies, and which requests met them: goodput."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.cli.verbs.bench.serve.records import RequestRecord
from inferplane.errors import UsageError

METRICS = ("ttft", "tpot", "e2e")
"""Latencies of a request that may have a target."""
ALIASES = {"e2el": "e2e"}
"""Names of other engines."""


def parse_targets(words: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:500 tpot:50`, in milliseconds, into seconds by metric.

    Raises:
        UsageError: a word is no METRIC:MS, or a metric has two targets.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition(":")
        name = ALIASES.get(name, name)
        try:
            limit_s = float(number) / 1e3
        except ValueError:
            limit_s = 0.0
        if name not in METRICS or not 0 < limit_s < float("inf"):
            raise UsageError(
                f"--goodput {word!r} is no METRIC:MILLISECONDS.",
                there_is=", ".join(METRICS),
                remedy="pass for example --goodput ttft:500 tpot:50",
            )
        if name in found:
            raise UsageError(f"--goodput gives {name} two targets.", remedy="keep one of them")
        found[name] = limit_s
    return found


def meets(record: RequestRecord, targets: dict[str, float]) -> bool:
    """Whether a request ended and met every target.

    A latency that it does not have, as the time per output token of a single token, meets its target; but a request
    without any text has no time to first token, and meets none.
    """
    if record.failure or record.ttft_s is None:
        return False
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all((value := values[name]) is None or value <= limit_s for name, limit_s in targets.items())
