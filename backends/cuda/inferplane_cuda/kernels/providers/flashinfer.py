"""FlashInfer: paged attention and latent attention, planned on the host for each step.

Source: flashinfer/prefill.py and flashinfer/mla.py of the wheel flashinfer-python 0.6.3.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.providers import looked_up
from inferplane_cuda.kernels.providers.latents import fold, unfold

WORKSPACE_BYTES = 128 << 20
WRAPPERS = {"attention": "BatchPrefillWithPagedKVCacheWrapper", "mla_absorbed": "mla.BatchMLAPagedAttentionWrapper"}
PLANS = {
    "attention": (
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
        "head_dim_qk", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type",
    ),
    "mla_absorbed": (
        "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size",
        "causal", "sm_scale", "q_data_type", "kv_data_type",
    ),
}  # fmt: skip
_workspaces: dict[torch.device, torch.Tensor] = {}


def prepare(op: Any, ctx: Any) -> Any:
    """The library's class for an op; each kernel makes its own object when it first knows the device."""
    name = WRAPPERS[op.name]
    looked_up("flashinfer", f"{name}.plan", PLANS[op.name])
    return SimpleNamespace(make=looked_up("flashinfer", name, ("float_workspace_buffer",)), wrapper=None)


def _planned(p: Any, batch: Batch, **plan: Any) -> Any:
    """The op's wrapper, planned for this step."""
    held, device = p.prepared, batch.seq_lens.device
    if held.wrapper is None:
        if device not in _workspaces:
            _workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        held.wrapper = held.make(_workspaces[device])
    held.wrapper.plan(qo_indptr=batch.query_start, causal=True, sm_scale=p.scale, **plan)
    return held.wrapper


def _blocks(batch: Batch, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sequence's blocks begin, int32 `[B + 1]`, and all blocks, int32."""
    counts = [-(-n // block_tokens) for n in batch.lens().seq_lens]
    blocks = torch.cat([table[:n] for table, n in zip(batch.block_tables, counts, strict=True)])
    starts = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.pad(starts, (1, 0)).to(batch.seq_lens.device), blocks


def attention(p: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """K and V as they lie in the cache."""
    size = kv.block_tokens
    starts, blocks = _blocks(batch, size)
    wrapper = _planned(
        p, batch, paged_kv_indptr=starts, paged_kv_indices=blocks,
        paged_kv_last_page_len=torch.where(batch.seq_lens > 0, (batch.seq_lens - 1) % size + 1, 0),
        num_qo_heads=p.heads, num_kv_heads=p.kv.heads, head_dim_qk=p.kv.dim, page_size=size, q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )  # fmt: skip
    out: torch.Tensor = wrapper.run(q, kv.blocked())  # type: ignore[attr-defined]
    return out


def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latents and rotated keys as two views of the cache."""
    d, size = p.dims, kv.block_tokens
    starts, blocks = _blocks(batch, size)
    q, w_v = fold(p, q_nope, q_rope)
    wrapper = _planned(
        p, batch, kv_indptr=starts, kv_indices=blocks, kv_len_arr=batch.seq_lens, num_heads=d.heads,
        head_dim_ckv=d.latent, head_dim_kpe=d.rope, page_size=size, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    latent, turned = kv.blocked()[0].flatten(2).split((d.latent, d.rope), -1)  # type: ignore[attr-defined]
    mid = wrapper.run(q[..., : d.latent].contiguous(), q[..., d.latent :].contiguous(), latent, turned)
    return unfold(mid, w_v)
