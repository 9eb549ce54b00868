"""Latents in FP8 beside queries in 16 bits: FlashMLA's fork for few tokens, flash attention for many.

The vendor's write divides by the scale and does not clamp: what rounds beyond 448 becomes no number
(float_to_fp8_e4m3). So entries are clamped before it, to 448 scales.

Sources: HYGON-AI/vllm-plugin-das, csrc/hcu_cache_kernel.cu for the write; v1/attention/ops/flashmla.py and
backends/mla/flashmla.py, which plan and call fwd_kvcache_quantization_mla for every DCU but gfx938; SGLang's DCU port,
dcu_mla_backend.py, for the function of the wheel around it, with its keywords, and for a scale of one element.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused import vllm_calls
from inferplane.kernels.fused.latents import fold_query, unfold_result
from inferplane.kernels.fused.needs import FLASH_MLA_HEAD_SIZES, PLAIN_KV_B
from inferplane.kernels.fused.operands import one_sequence_per_token
from inferplane.plugin import Batch, Kernels, StaticKV, latents
from inferplane_dcu import vendor
from inferplane_dcu.chips import FP8_LATENTS
from inferplane_dcu.kernels.attention import OPERATORS, hcu
from inferplane_dcu.kernels.mla import DIMS, attend_expanded, gather_latents
from inferplane_dcu.kernels.when import declare, only
from inferplane_dcu.kvcache import LATENTS_FP8

KERNELS = Kernels()
fused = partial(declare, KERNELS, kv_layouts=(LATENTS_FP8,))
CACHE_DTYPE = "fp8_e4m3"
"""As FlashMLA writes it; the cache write takes it too."""


@fused("mla_kv_write", provider="hcu_ops", features=(*OPERATORS, FP8_LATENTS))
def mla_kv_write_fp8(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: StaticKV) -> None:
    """hcu_ops::concat_and_cache_mla of clamped entries; it skips slot -1."""
    largest = kv.spec.limit * kv.scale_values[0]
    latent, k_rope = (t.clamp(-largest, largest) for t in (latent, k_rope))
    write, cache = hcu.concat_and_cache_mla, latents(kv)
    vllm_calls.mla_kv_write(write, latent, k_rope, cache, batch, CACHE_DTYPE, kv.scales[0])


@fused(
    "mla_absorbed",
    vendor.MLA_FP8_PLAN,
    vendor.MLA_FP8,
    provider="flash_mla",
    features=(FP8_LATENTS,),
    needs=(DIMS,),
)
def mla_absorbed_fp8(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: StaticKV) -> torch.Tensor:
    """As `mla_absorbed`, with the schedule and the function for FP8."""
    plan, attend = view.prepared
    q, (lens, tables) = fold_query(view, q_nope, q_rope), one_sequence_per_token(batch)
    schedule, splits = plan(lens, view.dims.heads, 1)
    out = attend(
        q=q[:, None],
        k_cache=latents(kv)[:, :, None],
        block_table=tables,
        cache_seqlens=lens,
        head_dim_v=view.dims.latent,
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        softmax_scale=view.scale,
        causal=True,
        k_scale=kv.scales[0],
        kv_cache_dtype=CACHE_DTYPE,
    )
    return unfold_result(view, only(out)[:, 0])


@fused(
    "mla_expanded",
    vendor.FLASH,
    provider="flash_attn",
    features=(FP8_LATENTS,),
    needs=(FLASH_MLA_HEAD_SIZES, PLAIN_KV_B),
    capture_safe=False,
    needs_host_lens=True,
)
def mla_expanded_fp8(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: StaticKV) -> torch.Tensor:
    """As `mla_expanded`; bytes are gathered, and dequantized by torch."""
    found = gather_latents(latents(kv).view(torch.uint8), batch.block_tables, batch.lens().seq_lens)
    (dense,) = kv.dequantize(found.view(kv.spec.dtype))
    return attend_expanded(view, q_nope, q_rope, batch, dense)
