"""Metrics for Prometheus: the engine's under the names that dashboards expect, and the source system's gauges."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from inferplane.serving.shared_state.counters import ACCEPTED, ENDED

if TYPE_CHECKING:
    from inferplane.serving.service import Service

PREFIX = "inferplane:"
SOURCE_FAMILY = "inference_server_metrics"
"""The family of the source system's gauges; each has its own name as its label."""
CONTENT_TYPE = CONTENT_TYPE_LATEST
LABELS = {
    "request_success_total": "finished_reason",
    "requests_rejected_total": "reason",
    "async_scheduling_waits_total": "reason",
}
OWN = {
    "requests_rejected_total": ("reason", "Refused requests, by reason."),
    "ignored_fields_total": ("field", "Fields of requests that had no effect; other: unknown ones."),
    ACCEPTED: ("operation", "Requests that were accepted."),
    ENDED: (
        "outcome",
        "Accepted requests that have ended: all but the running ones.",
    ),
    "requests_aborted_total": ("cause", "Sequences aborted because their client left."),
}


LOOP_LAG = "Longest time in the last 5 to 10 s that a process's event loop was held up."
OF_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("key_admitted_sequences", "Sequences of a key that run or wait.", GaugeMetricFamily),
    ("key_requests_total", "Accepted requests of a key that have ended.", CounterMetricFamily),
    ("key_tokens_total", "Tokens of a key's prompts and answers.", CounterMetricFamily),
)
"""What `KeyUsage.items` counts."""


class _Snapshot:
    """A collector of metrics that were made already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


async def render_metrics(service: Service) -> bytes:
    """Return all metrics in Prometheus' text format."""
    stats = await service.stats()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot([*_own(service), *_engine(stats), *_source(service, stats)]))
    return generate_latest(registry)


def _own(service: Service) -> Iterator[Metric]:
    condition = service.condition()
    yield _gauge("up", "1 while the process lives.", 1)
    yield _gauge("ready", "1 while requests are taken and move.", int(condition.ready))
    yield _gauge("server_uptime_seconds", "Seconds since the server was started.", time.monotonic() - service.started)
    yield _gauge("admitted_sequences", "Sequences that run or wait.", service.slots.in_use)
    yield _gauge("max_admitted_sequences", "Sequences that can run and wait.", service.slots.max_sequences)
    lag = GaugeMetricFamily(PREFIX + "loop_lag_seconds", LOOP_LAG, labels=["process"])
    for process, seconds in enumerate(service.counters.loop_lags()):
        lag.add_metric([str(process)], seconds)
    yield lag
    usage = list(service.slots.usage.items())
    for i, (name, words, kind) in enumerate(OF_KEYS if usage else ()):
        family = kind(PREFIX + name, words, labels=["key"])
        for key, used in usage:
            family.add_metric([key], used[i])
        yield family
    for name, (label, words) in OWN.items():
        numbers = [(value, n) for (counter, value), n in sorted(service.counters.items()) if counter == name]
        yield _counters(name, words, label, numbers)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, words, value=value)


def _counters(name: str, words: str, label: str, numbers: Iterable[tuple[object, float]]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, words, labels=[label])
    for value, number in numbers:
        family.add_metric([str(value)], number)
    return family


def _engine(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for name, value in stats.items():
        words = name.replace("_", " ")
        if isinstance(value, Mapping) and "bounds" in value:
            yield _histogram(name, words, value)
        elif isinstance(value, Mapping):
            if name not in OWN:  # the server sees refusals before the engine does
                yield _counters(name, words, LABELS.get(name, "kind"), sorted(value.items()))
        elif isinstance(value, list):
            yield _counters(name, words, "position", enumerate(value))
        elif name.endswith("_total") and not name.endswith("blocks_total"):
            yield CounterMetricFamily(PREFIX + name, words, value=value)
        elif isinstance(value, (int, float)):
            yield _gauge(name, words, value)


def _histogram(name: str, words: str, value: Mapping[str, Any]) -> Metric:
    buckets, below = [], 0
    for bound, number in zip([*map(str, value["bounds"]), "+Inf"], value["counts"]):
        below += number
        buckets.append((bound, below))
    return HistogramMetricFamily(PREFIX + name, words, buckets=buckets, sum_value=value["sum"])


def _source(service: Service, stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the source system's gauges. As in that system, `block_num` counts the free blocks."""
    total = stats.get("kv_blocks_total", 0)
    free = stats.get("kv_blocks_free", 0) + stats.get("kv_blocks_cached", 0)
    values = {
        "batch_size": stats.get("num_requests_running", 0),
        "max_batch_size": service.settings.max_num_seqs,
        "block_num": free,
        "max_block_num": total,
        "available_resource": 1.0 - stats.get("kv_cache_usage_perc", 1.0),
    }
    family = Metric(SOURCE_FAMILY, "Numbers of the server under the source system's names.", "gauge")
    for name, value in values.items():
        family.add_sample(SOURCE_FAMILY, {name: name}, value)
    yield family
