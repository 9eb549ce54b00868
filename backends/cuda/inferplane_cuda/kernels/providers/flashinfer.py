"""FlashInfer: paged attention and latent attention, planned on the host for each step.

Source: flashinfer/prefill.py and flashinfer/mla.py of the wheel flashinfer-python 0.6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.providers import find_function
from inferplane_cuda.kernels.providers.latents import fold_query, unfold_result

WORKSPACE_BYTES = 128 << 20
PLAN_PARAMETERS = (
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
    "head_dim_qk", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type",
)  # fmt: skip
MLA_PLAN_PARAMETERS = (
    "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size",
    "causal", "sm_scale", "q_data_type", "kv_data_type",
)  # fmt: skip
_workspaces: dict[torch.device, torch.Tensor] = {}


@dataclass
class FlashInferWrapper:
    """The library's class for an op, and the kernel's object of it, made when the kernel first sees the device."""

    make: Callable[[torch.Tensor], Any]
    made: Any = None


def prepare_attention(op: Any, ctx: Any) -> FlashInferWrapper:
    """The library's class for `attention`."""
    return _find_wrapper("BatchPrefillWithPagedKVCacheWrapper", PLAN_PARAMETERS)


def prepare_mla_absorbed(op: Any, ctx: Any) -> FlashInferWrapper:
    """The library's class for `mla_absorbed`."""
    return _find_wrapper("mla.BatchMLAPagedAttentionWrapper", MLA_PLAN_PARAMETERS)


def _find_wrapper(name: str, plan_parameters: tuple[str, ...]) -> FlashInferWrapper:
    find_function("flashinfer", f"{name}.plan", plan_parameters)
    return FlashInferWrapper(find_function("flashinfer", name, ("float_workspace_buffer",)))


def _plan_step(view: Any, batch: Batch, **plan: Any) -> Any:
    """The op's wrapper, planned for this step with `plan`'s further arguments."""
    wrapper: FlashInferWrapper = view.prepared
    device = batch.seq_lens.device
    if wrapper.made is None:
        if device not in _workspaces:
            _workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper.made = wrapper.make(_workspaces[device])
    wrapper.made.plan(qo_indptr=batch.query_start, causal=True, sm_scale=view.scale, **plan)
    return wrapper.made


def _flatten_block_tables(batch: Batch, block_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables without padding: where each sequence's blocks begin, int32 `[B + 1]`, and their numbers, int32."""
    counts = [-(-n // block_tokens) for n in batch.lens().seq_lens]
    blocks = torch.cat([table[:n] for table, n in zip(batch.block_tables, counts, strict=True)])
    starts = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.pad(starts, (1, 0)).to(batch.seq_lens.device), blocks


def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """K and V as they lie in the cache."""
    size = kv.block_tokens
    starts, blocks = _flatten_block_tables(batch, size)
    wrapper = _plan_step(
        view, batch, paged_kv_indptr=starts, paged_kv_indices=blocks,
        paged_kv_last_page_len=torch.where(batch.seq_lens > 0, (batch.seq_lens - 1) % size + 1, 0),
        num_qo_heads=view.heads, num_kv_heads=view.kv.heads, head_dim_qk=view.kv.dim, page_size=size,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    out: torch.Tensor = wrapper.run(q, kv.view_blocks())  # type: ignore[attr-defined]
    return out


def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latents and rotated keys as two views of the cache."""
    d, size = view.dims, kv.block_tokens
    starts, blocks = _flatten_block_tables(batch, size)
    q, w_v = fold_query(view, q_nope, q_rope)
    wrapper = _plan_step(
        view, batch, kv_indptr=starts, kv_indices=blocks, kv_len_arr=batch.seq_lens, num_heads=d.heads,
        head_dim_ckv=d.latent, head_dim_kpe=d.rope, page_size=size, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    latent, turned = kv.view_blocks()[0].flatten(2).split((d.latent, d.rope), -1)  # type: ignore[attr-defined]
    mid = wrapper.run(q[..., : d.latent].contiguous(), q[..., d.latent :].contiguous(), latent, turned)
    return unfold_result(mid, w_v)
