"""Cache writes and attention over K, V and latents in FP8 with static scales: one a layer for K, for V and for latents.

The same operators as for a cache in 16 bits; attention converts entries to the queries' dtype and multiplies scores and
result by the scales. Each kernel that the wheel holds for 16 bits it holds for FP8 too.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/cache.cpp for writes and the gathering of latents,
csrc/quantization/fp8/quant_utils.h for their rounding, csrc/xpu/attn/xe_2/paged_decode_xe2.cpp and fmha_xe2.cpp for the
scales; symbols and schemas of its wheel 0.1.16.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused import vllm_calls
from inferplane.kernels.fused.needs import declare_fused
from inferplane.kernels.fused.operands import cumulative_lengths
from inferplane.plugin import Batch, Kernels, StaticKV, latents
from inferplane_xpu.intel.kernels import attention, mla
from inferplane_xpu.intel.kernels.when import MATRIX
from inferplane_xpu.intel.kvcache import PAGED_FP8

cache_ops = torch.ops._C_cache_ops
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_xpu", kv_layouts=(PAGED_FP8,), features=MATRIX)


@fused("kv_write")
def kv_write_fp8(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: StaticKV) -> None:
    """_C_cache_ops::reshape_and_cache_flash, which rounds; it skips slot -1."""
    keys, values = kv.view_blocks()
    vllm_calls.kv_write(cache_ops.reshape_and_cache_flash, k, v, (keys, values), batch, vllm_calls.CACHE_FP8, kv.scales)


@fused("mla_kv_write")
def mla_kv_write_fp8(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: StaticKV) -> None:
    """_C_cache_ops::concat_and_cache_mla, which rounds both parts alike; it skips slot -1."""
    write, cache = cache_ops.concat_and_cache_mla, latents(kv)
    vllm_calls.mla_kv_write(write, latent, k_rope, cache, batch, vllm_calls.CACHE_FP8, kv.scales[0])


@fused("attention", attention.FEW, when=attention.WITH_SINKS)
def attention_few_fp8(view: Any, q: torch.Tensor, batch: Batch, kv: StaticKV) -> torch.Tensor:
    """As `attention_few`, with the scales."""
    return attention.attention_few(view, q, batch, kv)


@fused("attention", attention.MANY, when=attention.WITH_SINKS)
def attention_many_fp8(view: Any, q: torch.Tensor, batch: Batch, kv: StaticKV) -> torch.Tensor:
    """As `attention_many`, with the scales."""
    return attention.attention_many(view, q, batch, kv)


@fused("mla_absorbed", *mla.ABSORBED)
def mla_absorbed_fp8(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: StaticKV) -> torch.Tensor:
    """As `mla_absorbed`, with the scales."""
    return mla.mla_absorbed(view, q_nope, q_rope, batch, kv)


@fused("mla_expanded", *mla.EXPANDED, capture_safe=False, needs_host_lens=True)
def mla_expanded_fp8(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: StaticKV) -> torch.Tensor:
    """As `mla_expanded`, with latents that are converted to the queries' dtype while they are gathered."""
    d, lens, device = view.dims, batch.lens().seq_lens, q_nope.device
    key_starts, keys = cumulative_lengths(lens, device), sum(lens)
    dense = q_nope.new_empty(keys, d.latent + d.rope)
    sequences = torch.repeat_interleave(key_starts.diff(), output_size=keys).int()
    cache_ops.gather_and_maybe_dequant_cache(
        latents(kv), dense, batch.block_tables, key_starts, sequences, keys, vllm_calls.CACHE_FP8, kv.scales[0], None,
    )  # fmt: skip
    return mla.attend_expanded(view, q_nope, q_rope, batch, dense, key_starts)
