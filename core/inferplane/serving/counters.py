"""What a server counts of requests, over all its processes: one truth, whichever of them is asked."""

from __future__ import annotations

from collections.abc import Iterator

from inferplane.serving.slots import SharedCounters

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
"""Why requests are refused: the codes of `ApiError`, and what is refused before there is a request."""
COUNTER_LABELS = (*((REJECTED, reason) for reason in REASONS), (ABORTED, "disconnect"))
"""Name and label of everything that is counted, in the order of a board's cells."""
FIRST = 1
"""Cell of the first; the cell before is for places."""
NUM_CELLS = FIRST + len(COUNTER_LABELS)
_CELL = {counted: FIRST + i for i, counted in enumerate(COUNTER_LABELS)}


class RequestCounters:
    """Counters of all processes that share a board. Each process adds in its own slot, and what one has counted stays
    when another takes its slot over.

    Args:
        board: of `NUM_CELLS` cells a slot; None makes one for this process alone.
        slot: this process's.
    """

    def __init__(self, board: SharedCounters | None = None, slot: int = 0) -> None:
        self._board, self._slot = board or SharedCounters(1, NUM_CELLS), slot

    def add(self, name: str, label: str, number: int = 1) -> None:
        """Count something; a label that is not known counts as "other"."""
        cell = _CELL.get((name, label)) or _CELL[name, OTHER]
        self._board.write(self._slot, cell, self._board.read(self._slot, cell) + number)

    def __getitem__(self, counted: tuple[str, str]) -> int:
        return self._board.sum(_CELL[counted])

    def items(self) -> Iterator[tuple[tuple[str, str], int]]:
        """What was counted at least once."""
        for counted, cell in _CELL.items():
            if number := self._board.sum(cell):
                yield counted, number
