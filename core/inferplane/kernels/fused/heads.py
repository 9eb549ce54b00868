"""The output head by a product with a quantized weight that a kernel of `linear` computes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.plugin import Batch


def run_head(
    product: Callable[[Any, torch.Tensor], torch.Tensor], view: Any, x: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """The op `lm_head` by a kernel of `linear`, in the plan's dtype.

    Args:
        product: `(view, x)` -> `x weight^T`; its view has `weight` and `bias`.
        view: of the head; its weight is packed as the product reads it.
        x: `[T, D]`.
        batch: says which rows need logits.

    Returns:
        float32 `[R, V]`. Vendors' products may refuse no rows at all, which a step has that ends no prompt: then one
        row is multiplied, and none of it returned.
    """
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    if not rows.shape[0]:
        return product(_as_linear(view), x[:1])[:0].float()
    return product(_as_linear(view), rows).float()


def _as_linear(view: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=view.weight, bias=None)
