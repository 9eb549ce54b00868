"""Hidden states of prompts, pooled to one vector each, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.engine.schedule.scheduler import Scheduled
from inferplane.types import HOST


def parts(chosen: Sequence[Scheduled], hidden: torch.Tensor) -> list[torch.Tensor | None]:
    """What each sequence's `pooled` is after a step: float32 `[D]` on the host; it stands as it is until then.

    Args:
        chosen: the step's sequences.
        hidden: `[T, D]` of the step, as they stand in it.

    Raises:
        FloatingPointError: a pooled vector holds NaN or infinity.
    """
    out: list[torch.Tensor | None] = []
    row = 0
    for s in chosen:
        r = s.request
        done = r.params.pooling is None or r.generated
        out.append(r.pooled if done else _part(s, hidden[row : row + s.count]))
        row += s.rows
    return out


def _part(s: Scheduled, rows: torch.Tensor) -> torch.Tensor:
    r = s.request
    if r.params.pooling == "last":
        found = rows[-1].float().to(HOST)
    else:
        found = rows.float().sum(0).to(HOST)
        found = found + r.pooled if r.computed and r.pooled is not None else found
        found = found / len(r.prompt) if s.last else found
    if not bool(found.isfinite().all()):
        raise FloatingPointError("the model's hidden states hold NaN or infinity")
    return found
