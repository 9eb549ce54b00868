"""FlashAttention 3: paged attention of any number of query tokens, and latents as values with a query of their own.

Source: hopper/flash_attn_interface.py of Dao-AILab/flash-attention at 01afd16d.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.providers import find_function
from inferplane_cuda.kernels.providers.latents import fold_query, unfold_result

PARAMETERS = (
    "q", "k_cache", "v_cache", "qv", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale",
    "causal", "window_size",
)  # fmt: skip


def prepare(op: Any, ctx: Any) -> Any:
    """The library's function."""
    return find_function("flash_attn_interface", "flash_attn_with_kvcache", PARAMETERS)


def _step_arguments(view: Any, batch: Batch) -> dict[str, Any]:
    return {
        "cache_seqlens": batch.seq_lens,
        "page_table": batch.block_tables,
        "cu_seqlens_q": batch.query_start,
        "max_seqlen_q": batch.max_query_tokens,
        "softmax_scale": view.scale,
        "causal": True,
    }


def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """K and V as they lie in the cache."""
    k, v = kv.view_blocks()  # type: ignore[attr-defined]
    window = (-1, -1) if view.kv.window is None else (view.kv.window - 1, 0)
    out: torch.Tensor = view.prepared(q=q, k_cache=k, v_cache=v, window_size=window, **_step_arguments(view, batch))
    return out


def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The rotated part as keys, the latent as values and, with the folded query, as further keys."""
    d = view.dims
    q, w_v = fold_query(view, q_nope, q_rope)
    latent, turned = kv.view_blocks()[0].flatten(2)[:, :, None].split((d.latent, d.rope), -1)  # type: ignore[attr-defined]
    mid = view.prepared(
        q=q[..., d.latent :].contiguous(), k_cache=turned, v_cache=latent, qv=q[..., : d.latent].contiguous(),
        **_step_arguments(view, batch),
    )  # fmt: skip
    return unfold_result(mid, w_v)
