"""Counters of refused and aborted requests, summed over all processes: each process reports the same totals."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from inferplane.serving.request_fields import IGNORED
from inferplane.serving.shared_state.shared_counters import SharedCounters

REJECTED, ABORTED, IGNORED_FIELDS = "requests_rejected_total", "requests_aborted_total", "ignored_fields_total"
ACCEPTED, ENDED = "server_requests_accepted_total", "server_requests_ended_total"
"""As the server counts requests, and sees each one's end; the engine counts sequences, until it dies."""
OTHER = "other"
OPERATIONS = ("text_completion", "chat", "embeddings", OTHER)
OUTCOMES = ("finished", "timeout", "disconnect", "refused", "aborted", "failed", "worker_ended")
REASONS = (
    *("aborted", "body_timeout", "body_too_large", "busy", "constraint_too_complex", "context_length_exceeded"),
    *("duplicate", "engine_ended", "failed", "generation_failed", "headers_too_large", "http_error"),
    *("internal_error", "invalid_api_key", "reader_failed"),
    *("invalid_json", "invalid_value", "key_queue_full", "key_tokens_used_up", "loading", "malformed_http"),
    *("missing_required_parameter", "model_not_found", "no_chat_template", "queue_full", "shutting_down"),
    *("template_failed", "timeout", "tiny_chunks", "too_many", "too_many_connections", "too_slow", "unknown_host"),
    *("unknown_parameter", "unsupported", "unsupported_encoding", "unsupported_media_type"),
    *("unsupported_version", OTHER),
)
"""Why requests are refused: the codes of `ApiError`, and reasons that apply before there is a request."""
COUNTER_LABELS = (
    *((REJECTED, reason) for reason in REASONS),
    (ABORTED, "disconnect"),
    *((ACCEPTED, operation) for operation in OPERATIONS),
    *((ENDED, outcome) for outcome in OUTCOMES),
    *((IGNORED_FIELDS, field) for field in (*IGNORED, OTHER)),
)
"""Name and label of every counter, in the order of the cells of `SharedCounters`."""
SLOTS_CELL, LAG_CELL = 0, 1
"""Cells of `SharedCounters`: the slots a process has acquired, and the lag of its event loop in microseconds."""
NUM_CELLS = 2 + len(COUNTER_LABELS)
_CELL = {counter: 2 + i for i, counter in enumerate(COUNTER_LABELS)}


class RequestCounters:
    """Counts refused and aborted requests of all processes that share a `SharedCounters` table.

    Each process adds to its own row. A process that replaces another takes over its row and its counts.

    Args:
        shared: a table with `NUM_CELLS` cells per row; None creates one for this process alone.
        process: this process's row.
    """

    def __init__(self, shared: SharedCounters | None = None, process: int = 0) -> None:
        self._shared, self._process = shared or SharedCounters(1, NUM_CELLS), process
        self._lock = threading.Lock()  # the port of health has a thread of its own

    def add(self, name: str, label: str, number: int = 1) -> None:
        """Add to a counter; an unknown label counts as "other"."""
        cell = _CELL.get((name, label)) or _CELL[name, OTHER]
        with self._lock:
            self._shared.write(self._process, cell, self._shared.read(self._process, cell) + number)

    def set_loop_lag(self, seconds: float) -> None:
        """Show the lag of this process's event loop to all processes."""
        self._shared.write(self._process, LAG_CELL, round(1e6 * seconds))

    def loop_lags(self) -> list[float]:
        """Return the lag of each process's event loop, in seconds."""
        return [self._shared.read(process, LAG_CELL) / 1e6 for process in range(self._shared.processes)]

    def total(self, name: str) -> int:
        """Return the sum of a counter over all its labels."""
        return sum(number for (counter, _), number in self.items() if counter == name)

    def end_lost(self) -> None:
        """Count the requests that ended with their process: this row's accepted ones that have not ended."""
        accepted, ended = (
            sum(self._shared.read(self._process, cell) for (counter, _), cell in _CELL.items() if counter == name)
            for name in (ACCEPTED, ENDED)
        )
        self.add(ENDED, "worker_ended", accepted - ended)

    def __getitem__(self, counter: tuple[str, str]) -> int:
        return self._shared.sum(_CELL[counter])

    def items(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield every counter above zero with its value."""
        for counter, cell in _CELL.items():
            if number := self._shared.sum(cell):
                yield counter, number
