"""What stands beside a step's batch: block tables of entries that stand for several tokens, and a model's result."""

from __future__ import annotations

import torch


def place_entries(tables: torch.Tensor, rate: int, covered: int) -> torch.Tensor:
    """Block tables `[B, entries]` or `[B, blocks]` of entries that stand for `rate` tokens each: an entry lies in the
    block of its last token.

    Args:
        tables: of tokens, `[B, blocks]`. rate: tokens of an entry.
        covered: tokens of a sequence that a block is for.
    """
    if covered >= rate:
        return tables
    last = torch.arange(1, max(1, tables.shape[1] * covered // rate) + 1, device=tables.device) * rate - 1
    return tables[:, (last // covered).clamp(max=tables.shape[1] - 1)]


class ModelOutput(tuple[torch.Tensor, torch.Tensor]):
    """What a kernel of a whole model may return in place of the pair `(logits, hidden)`: the pair, with more.

    Args:
        logits: float32 `[R, V]`.
        hidden: `[T, D]`.
        argmax: int64 `[R]`: the token with the largest logit of each row, the first among equals, which the kernel
            found while it made the logits; None where it did not look.
    """

    argmax: torch.Tensor | None = None

    def __new__(cls, logits: torch.Tensor, hidden: torch.Tensor, argmax: torch.Tensor | None = None) -> ModelOutput:
        made = super().__new__(cls, (logits, hidden))
        made.argmax = argmax
        return made
