"""Latent attention (MLA) around an operator that knows ordinary attention only.

Either `kv_b` is folded into the queries, which then attend to latents as keys and values, and the result is unfolded;
or latents are expanded to keys and values. `view` is that of an `mla_absorbed` or `mla_expanded` kernel, whose `dims`
are `heads`, `nope`, `rope`, `value` and `latent`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.renamed import old_names_of_module


def split_kv_b(view: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of `kv_b` `[H (nope + value), latent]` per head, as views that share its memory: the rows for keys
    `[H, nope, latent]`, and those for values `[H, value, latent]`.
    """
    d = view.dims
    w_k, w_v = view.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    return w_k, w_v


def fold_query(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """Fold `kv_b` into queries, so that the cached latents are their keys and need not be expanded.

    Args:
        view: of an `mla_absorbed` kernel.
        q_nope: `[T, H, nope]`. q_rope: `[T, H, rope]`.

    Returns:
        `[T, H, latent + rope]`, a new tensor.
    """
    return torch.cat((torch.bmm(q_nope.transpose(0, 1), split_kv_b(view)[0]).transpose(0, 1), q_rope), -1)


def unfold_result(view: Any, mid: torch.Tensor) -> torch.Tensor:
    """Turn attention's result with latents as values, `mid` `[T, H, latent]`, into values `[T, H, value]`, contiguous,
    by the value rows of `kv_b`.
    """
    return torch.bmm(mid.transpose(0, 1), split_kv_b(view)[1].transpose(1, 2)).transpose(0, 1).contiguous()


def expand_latents(view: Any, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand latents to keys and values by one product with `kv_b`.

    Args:
        view: of an `mla_expanded` kernel.
        entries: cached entries `[..., latent + rope]`: latents, and behind each the rotated key that all heads share.

    Returns:
        Keys and values, both `[..., H, nope + rope]`; values are padded with zeros to the keys' width, since such
            operators take one width.
    """
    d = view.dims
    latent, k_rope = entries.split((d.latent, d.rope), -1)
    k_nope, v = F.linear(latent, view.kv_b.weight).unflatten(-1, (d.heads, -1)).split((d.nope, d.value), -1)
    shared = k_rope[..., None, :].expand(*k_rope.shape[:-1], d.heads, d.rope)
    return torch.cat((k_nope, shared), -1), F.pad(v, (0, d.nope + d.rope - d.value))


__getattr__ = old_names_of_module(
    __name__,
    {
        "halves": "split_kv_b",
        "folded": "fold_query",
        "unfolded": "unfold_result",
        "expanded": "expand_latents",
    },
)
