"""What every library's latent attention needs around it: queries folded into the latent space, results unfolded."""

from __future__ import annotations

from typing import Any

import torch


def fold(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[T, H, R + P]` in the latent space, and `W_v` `[H, V, R]`."""
    d = p.dims
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = q_nope.new_empty(q_nope.shape[0], d.heads, d.latent + d.rope)
    torch.bmm(q_nope.transpose(0, 1), w_k, out=q[..., : d.latent].transpose(0, 1))
    q[..., d.latent :].copy_(q_rope)
    return q, w_v


def unfold(mid: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """`[T, H, R]` times each head's `W_v`: `[T, H, V]`."""
    return torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
