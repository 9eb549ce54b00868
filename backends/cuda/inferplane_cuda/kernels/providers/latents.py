"""What every library's latent attention needs around it: `kv_b` folded into queries, and results unfolded."""

from __future__ import annotations

from typing import Any

import torch


def fold_query(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, kv_b: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold `kv_b`, by default the view's own, into queries: latent queries `[T, H, R + P]`, and `W_v` `[H, V, R]`."""
    d = view.dims
    kv_b = view.kv_b if kv_b is None else kv_b
    w_k, w_v = kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = q_nope.new_empty(q_nope.shape[0], d.heads, d.latent + d.rope)
    torch.bmm(q_nope.transpose(0, 1), w_k, out=q[..., : d.latent].transpose(0, 1))
    q[..., d.latent :].copy_(q_rope)
    return q, w_v


def unfold_result(mid: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """Multiply attention's result `mid` `[T, H, R]` by each head's `W_v`: `[T, H, V]`."""
    return torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
