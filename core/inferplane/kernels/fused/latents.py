"""Latent attention around a vendor's operator: `kv_b` folded into queries, or latents expanded to keys and values.

`p` is the op as a kernel gets it, with `dims` (`heads`, `nope`, `rope`, `value`, `latent`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def split_kv_b(p: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of `kv_b` that make keys `[H, nope, latent]` and those that make values `[H, value, latent]`: views."""
    d = p.dims
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    return w_k, w_v


def fold_query(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """Queries for latents as keys.

    Args:
        q_nope: `[T, H, nope]`. q_rope: `[T, H, rope]`.

    Returns:
        `[T, H, latent + rope]`.
    """
    return torch.cat((torch.bmm(q_nope.transpose(0, 1), split_kv_b(p)[0]).transpose(0, 1), q_rope), -1)


def unfold_result(p: Any, mid: torch.Tensor) -> torch.Tensor:
    """What attention gives with latents as values `[T, H, latent]`, as `[T, H, value]`."""
    return torch.bmm(mid.transpose(0, 1), split_kv_b(p)[1].transpose(1, 2)).transpose(0, 1).contiguous()


def expand_latents(p: Any, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of latents.

    Args:
        entries: `[..., latent + rope]`.

    Returns:
        Both `[..., H, nope + rope]`; values are padded to the keys' width, which such kernels want.
    """
    d = p.dims
    latent, k_rope = entries.split((d.latent, d.rope), -1)
    k_nope, v = F.linear(latent, p.kv_b.weight).unflatten(-1, (d.heads, -1)).split((d.nope, d.value), -1)
    shared = k_rope[..., None, :].expand(*k_rope.shape[:-1], d.heads, d.rope)
    return torch.cat((k_nope, shared), -1), F.pad(v, (0, d.nope + d.rope - d.value))
