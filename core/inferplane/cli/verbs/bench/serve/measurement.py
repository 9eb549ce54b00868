"""What a benchmark of a server has measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inferplane.cli.verbs.bench.serve.load import LevelResult


@dataclass
class ServeMeasurement:
    """The figures of one benchmark of a server.

    Args:
        environment: the server, the client, date and versions.
        options: of the command, without keys.
        notes: what a reader of the figures has to know.
        results: the levels as they were recorded.
        figures: of each level, as `figures.level_figures` returns them.
    """

    environment: dict[str, Any]
    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    results: list[LevelResult] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_interrupted(self) -> bool:
        """Whether the user ended it."""
        return any(result.interrupted for result in self.results)

    @property
    def num_ended(self) -> int:
        """Requests that ended, of all levels."""
        return sum(figures["counts"]["ended"] for figures in self.figures)
