"""Counters of refused and aborted requests, summed over all processes: each process reports the same totals."""

from __future__ import annotations

from collections.abc import Iterator

from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.shared_state.slots import SLOTS_CELL

REJECTED, ABORTED = "requests_rejected_total", "requests_aborted_total"
OTHER = "other"
REASONS = (
    *("aborted", "body_timeout", "body_too_large", "busy", "context_length_exceeded", "duplicate", "engine_ended"),
    *("failed", "generation_failed", "headers_too_large", "http_error", "internal_error", "invalid_api_key"),
    *("invalid_json", "invalid_value", "loading", "malformed_http", "missing_required_parameter", "model_not_found"),
    *("no_chat_template", "queue_full", "shutting_down", "template_failed", "timeout", "too_many"),
    *("too_many_connections", "too_slow", "unknown_parameter", "unsupported", "unsupported_encoding"),
    *("unsupported_media_type", "unsupported_version", OTHER),
)
"""Why requests are refused: the codes of `ApiError`, and reasons that apply before there is a request."""
COUNTER_LABELS = (*((REJECTED, reason) for reason in REASONS), (ABORTED, "disconnect"))
"""Name and label of every counter, in the order of the cells of `SharedCounters`."""
NUM_CELLS = SLOTS_CELL + 1 + len(COUNTER_LABELS)
_CELL = {counter: SLOTS_CELL + 1 + i for i, counter in enumerate(COUNTER_LABELS)}


class RequestCounters:
    """Counts refused and aborted requests of all processes that share a `SharedCounters` table.

    Each process adds to its own row. A process that replaces another takes over its row and its counts.

    Args:
        shared: a table with `NUM_CELLS` cells per row; None creates one for this process alone.
        process: this process's row.
    """

    def __init__(self, shared: SharedCounters | None = None, process: int = 0) -> None:
        self._shared, self._process = shared or SharedCounters(1, NUM_CELLS), process

    def add(self, name: str, label: str, number: int = 1) -> None:
        """Add to a counter; an unknown label counts as "other"."""
        cell = _CELL.get((name, label)) or _CELL[name, OTHER]
        self._shared.write(self._process, cell, self._shared.read(self._process, cell) + number)

    def __getitem__(self, counter: tuple[str, str]) -> int:
        return self._shared.sum(_CELL[counter])

    def items(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield every counter above zero with its value."""
        for counter, cell in _CELL.items():
            if number := self._shared.sum(cell):
                yield counter, number
