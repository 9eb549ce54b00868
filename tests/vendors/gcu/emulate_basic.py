"""Norms, positions, activation, weight-only product and cache writes.

Meaning: vLLM's operators of the same names, whose definitions these repeat, and the vendor's CPU references declared in
csrc/src/native_vllm.h (EnflameTechnology/vllm-gcu at 7b5aaca9).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.vendors.emulator import Implementations, require
from tests.vendors.gcu import chip
from tests.vendors.semantics import normed, one_scale, turned, written

IMPLEMENTATIONS = emulates = Implementations()


@emulates("_C::rms_norm")
def rms_norm(result, input, weight, epsilon):
    """result <- norm(input) weight."""
    chip.half(result=result, input=input, weight=weight)
    chip.contiguous(result=result, input=input, weight=weight)
    chip.shape("result", result, *input.shape)
    chip.shape("weight", weight, input.shape[-1])
    require(input.numel() > 0, "an empty tensor is not taken")
    result.copy_(normed(input, weight, epsilon))


@emulates("_C::fused_add_rms_norm")
def fused_add_rmsnormed(input, residual, weight, epsilon):
    """residual <- residual + input; input <- norm(residual) weight."""
    chip.half(input=input, residual=residual, weight=weight)
    chip.contiguous(input=input, residual=residual, weight=weight)
    chip.shape("residual", residual, *input.shape)
    chip.shape("weight", weight, input.shape[-1])
    total = residual.float() + input.float()
    residual.copy_(total.to(residual.dtype))
    input.copy_(normed(total, weight, epsilon).to(input.dtype))


@emulates("_C::rotary_embedding")
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Both in place, `[T, heads * head_size]`; the table is cosines, then sines, `[positions, D]`."""
    chip.dtype(torch.int64, positions=positions)
    chip.half(query=query, key=key, cos_sin_cache=cos_sin_cache)
    chip.contiguous(query=query, key=key, cos_sin_cache=cos_sin_cache)
    chip.shape("cos_sin_cache", cos_sin_cache, None, head_size)
    require(int(positions.min()) >= 0 and int(positions.max()) < len(cos_sin_cache), "positions lie in the table")
    for name, t in (("query", query), ("key", key)):
        require(t.dim() == 2 and t.shape[0] == positions.shape[0], f"{name} is [T, heads * D], got {list(t.shape)}")
        require(t.shape[1] % head_size == 0, f"{name} holds whole heads of {head_size}, got {t.shape[1]}")
        t.copy_(turned(t, positions, cos_sin_cache, head_size, is_neox))


@emulates("_C::silu_and_mul")
def silu_and_mul(result, input):
    """result <- silu(first half) * second half."""
    chip.half(result=result, input=input)
    chip.contiguous(result=result, input=input)
    chip.shape("result", result, *input.shape[:-1], input.shape[-1] // 2)
    require(input.shape[-1] % 2 == 0 and input.numel() > 0, f"an even last dimension, got {list(input.shape)}")
    a, b = input.float().chunk(2, -1)
    result.copy_((F.silu(a) * b).to(result.dtype))


@emulates("_C::weight_only_quant")
def weight_only_quant(output, input, qweight, bias, scale, group_size):
    """output <- input (qweight scale)^T + bias; int8 rows of outputs, a scale a row."""
    chip.half(output=output, input=input, scale=scale)
    chip.dtype(torch.int8, qweight=qweight)
    chip.contiguous(output=output, input=input, qweight=qweight, scale=scale)
    n, k = qweight.shape
    chip.shape("input", input, None, k)
    chip.shape("output", output, input.shape[0], n)
    require(group_size == -1, f"group_size {group_size} is not emulated: -1 is a scale a row")
    chip.shape("scale", scale, n)
    y = input.float() @ (qweight.float() * scale.float()[:, None]).t()
    if bias is not None:
        chip.half(output=output, bias=bias)
        chip.shape("bias", bias, n)
        y = y + bias.float()
    output.copy_(y.to(output.dtype))


@emulates("_C_cache_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Caches `[blocks, 64, heads, D]`, as flash attention reads them."""
    require(kv_cache_dtype == "auto", f"kv_cache_dtype {kv_cache_dtype!r} is not emulated")
    one_scale(k_scale=k_scale, v_scale=v_scale)
    chip.half(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        chip.shape(name, cache, None, chip.BLOCK, *rows.shape[1:])
    real, places = written(slot_mapping, key.shape[0], key_cache.shape[0] * chip.BLOCK)
    key_cache.flatten(0, 1)[places] = key[real]
    value_cache.flatten(0, 1)[places] = value[real]


@emulates("_C_cache_ops::concat_and_cache_mla")
def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """The cache is `[blocks, 64, latent + rotated]`."""
    require(kv_cache_dtype == "auto", f"kv_cache_dtype {kv_cache_dtype!r} is not emulated")
    one_scale(scale=scale)
    chip.half(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.contiguous(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.shape("k_pe", k_pe, kv_c.shape[0], None)
    chip.shape("kv_cache", kv_cache, None, chip.BLOCK, kv_c.shape[1] + k_pe.shape[1])
    real, places = written(slot_mapping, kv_c.shape[0], kv_cache.shape[0] * chip.BLOCK)
    kv_cache.flatten(0, 1)[places] = torch.cat((kv_c, k_pe), -1)[real]


@emulates("_C_cache_ops::gather_cache")
def gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts):
    """Each sequence's entries, one behind the other."""
    chip.half(src_cache=src_cache, dst=dst)
    chip.contiguous(src_cache=src_cache, dst=dst)
    chip.dtype(chip.INT32, block_table=block_table, cu_seq_lens=cu_seq_lens, seq_starts=seq_starts)
    chip.shape("src_cache", src_cache, None, chip.BLOCK, dst.shape[-1])
    chip.shape("cu_seq_lens", cu_seq_lens, batch_size + 1)
    chip.shape("seq_starts", seq_starts, batch_size)
    require(not seq_starts.any(), "sequences are gathered from their start only")
    ends = cu_seq_lens.tolist()
    require(ends[0] == 0 and ends == sorted(ends), f"cu_seq_lens is a running sum that begins with 0, got {ends}")
    chip.shape("dst", dst, ends[-1], None)
    for table, a, b in zip(block_table, ends, ends[1:]):
        blocks = table[: -(-(b - a) // chip.BLOCK)].long()
        dst[a:b] = src_cache[blocks].flatten(0, 1)[: b - a]
