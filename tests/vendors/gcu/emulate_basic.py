"""Norms, positions, activation, weight-only product and cache writes.

Meaning: vLLM's operators of the same names, whose definitions these repeat, and the vendor's CPU references declared in
csrc/src/native_vllm.h (EnflameTechnology/vllm-gcu at 7b5aaca9).
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.gcu import chip
from tests.vendors.semantics import (
    add_normalize,
    check_heads,
    gather,
    normalize,
    plain_cache,
    rotate,
    silu_mul,
    write_blocks,
    write_latents,
    written_slots,
)

IMPLEMENTATIONS = emulates = Implementations()
PIECE = 16
"""Bytes of K that lie together."""


@emulates("_C::rms_norm")
def rms_norm(result, input, weight, epsilon):
    """result <- norm(input) weight."""
    chip.half(result=result, input=input, weight=weight)
    chip.contiguous(result=result, input=input, weight=weight)
    chip.shape("result", result, *input.shape)
    chip.shape("weight", weight, input.shape[-1])
    require(input.numel() > 0, "an empty tensor is not taken")
    result.copy_(normalize(input, weight, epsilon))


@emulates("_C::fused_add_rms_norm")
def fused_add_rms_norm(input, residual, weight, epsilon):
    """residual <- residual + input; input <- norm(residual) weight."""
    chip.half(input=input, residual=residual, weight=weight)
    chip.contiguous(input=input, residual=residual, weight=weight)
    chip.shape("residual", residual, *input.shape)
    chip.shape("weight", weight, input.shape[-1])
    add_normalize(input, residual, weight, epsilon)


@emulates("_C::rotary_embedding")
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Both in place, `[T, heads * head_size]`; the table is cosines, then sines, `[positions, D]`."""
    chip.half(query=query, key=key, cos_sin_cache=cos_sin_cache)
    check_heads(positions, cos_sin_cache, head_size, {"query": query, "key": key})
    for t in (query, key):
        t.copy_(rotate(t, positions, cos_sin_cache, head_size, is_neox))


@emulates("_C::silu_and_mul")
def silu_and_mul(result, input):
    """result <- silu(first half) * second half."""
    chip.half(result=result, input=input)
    chip.contiguous(result=result, input=input)
    chip.shape("result", result, *input.shape[:-1], input.shape[-1] // 2)
    require(input.numel() > 0, "an empty tensor is not taken")
    result.copy_(silu_mul(input).to(result.dtype))


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


@emulates("_C::dynamic_scaled_int8_quant")
def dynamic_scaled_int8_quant(output, input, scales, azp):
    """Each row by its largest magnitude / 127 (vLLM's operator of the name; its caller here gives `[T, 1]` scales)."""
    chip.absent("azp", azp)
    chip.half(input=input)
    chip.dtype(torch.int8, output=output)
    chip.dtype(torch.float32, scales=scales)
    chip.contiguous(output=output, input=input, scales=scales)
    chip.shape("output", output, *input.shape)
    chip.shape("scales", scales, input.shape[0], 1)
    scales.copy_(input.float().abs().amax(-1, keepdim=True) / 127)
    output.copy_((input.float() / scales.where(scales > 0, 1)).round().clamp(-127, 127))


@emulates("_C::dot_bias_quant")
def dot_bias_quant(out, lhs, rhs, scale, bias):
    """out <- lhs rhs scale, int8 by int8 `[K, N]` with a scale a column, as W8A8LinearMethod gives them."""
    chip.absent("bias", bias)
    chip.half(out=out)
    chip.dtype(torch.int8, lhs=lhs, rhs=rhs)
    chip.dtype(torch.float32, scale=scale)
    chip.contiguous(out=out, lhs=lhs, rhs=rhs, scale=scale)
    k, n = rhs.shape
    chip.shape("lhs", lhs, None, k)
    chip.shape("out", out, lhs.shape[0], n)
    chip.shape("scale", scale, n)
    out.copy_((lhs.double() @ rhs.double() * scale.double()).to(out.dtype))


def expand_int4(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """Bytes `[N, K / 2]` as weights `[N, K]`, with scales and zero points `[K / group, N]`, as rearrange.py packs them:
    a byte's low half is column j of 128, its high half column 64 + j.
    """
    require(group >= 64 and group % 64 == 0, f"groups are of 64 columns or a multiple, got {group}")
    require(k % 128 == 0, f"128 divides the columns, got {k}")
    chip.dtype(torch.uint8, weight=data)
    chip.shape("weight", data, None, k // 2)
    for name, values in (("scales", scale), ("zero points", zero)):
        chip.shape(name, values, k // group, data.shape[0])
        chip.contiguous(**{name: values})
    parts = data.unflatten(-1, (-1, 64)).to(torch.int32)
    entries = torch.stack((parts & 15, parts >> 4), -2).flatten(-3)
    spread = [values.float().t().repeat_interleave(group, -1) for values in (scale, zero)]
    return entries.float() * spread[0] - spread[1]


@emulates("_C::gptq_gemm_gcu")
def gptq_gemm_gcu(a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, bit, bias, group_size):
    """a w + bias, w from unsigned int4 (rearrange.py), zero points times scales, both in a's dtype."""
    chip.half(a=a, b_gptq_qzeros=b_gptq_qzeros, b_gptq_scales=b_gptq_scales)
    chip.contiguous(a=a, b_q_weight=b_q_weight)
    require(bit == 4, f"bit is 4, got {bit}")
    k = a.shape[1]
    chip.dtype(chip.INT32, b_g_idx=b_g_idx)
    want = torch.arange(k, dtype=torch.int32) // group_size
    require(torch.equal(b_g_idx, want), "g_idx has whole groups in order")
    w = expand_int4(b_q_weight.t(), b_gptq_scales, b_gptq_qzeros, group_size, k)
    y = a.float() @ w.t()
    if bias is not None:
        chip.half(a=a, bias=bias)
        chip.shape("bias", bias, w.shape[0])
        y = y + bias.float()
    return y.to(a.dtype)


@emulates("_C_cache_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Caches `[blocks, 64, heads, D]`, as flash attention reads them."""
    plain_cache(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
    chip.half(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        chip.shape(name, cache, None, chip.BLOCK, *rows.shape[1:])
    write_blocks(key, value, key_cache, value_cache, slot_mapping)


def in_int8(rows: torch.Tensor, scale: float, zero: float) -> torch.Tensor:
    """Entries as `rows / scale + zero`, rounded and limited; how the vendor rounds is not published."""
    return (rows.float() / scale + zero).round().clamp(-128, 127).to(torch.int8)


@emulates("_C_cache_ops::reshape_and_cache")
def reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, k_zero, v_zero
):
    """K `[blocks, heads, D / 16, 64, 16]` and V `[blocks, heads, D, 64]` in int8, as paged attention reads them."""
    require(kv_cache_dtype == "int8", f"kv_cache_dtype {kv_cache_dtype!r} is not emulated")
    require(k_scale > 0 and v_scale > 0, f"scales are positive, got {k_scale} and {v_scale}")
    chip.half(key=key, value=value)
    chip.dtype(torch.int8, key_cache=key_cache, value_cache=value_cache)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    rows, heads, dim = key.shape
    chip.shape("key_cache", key_cache, None, heads, dim // PIECE, chip.BLOCK, PIECE)
    chip.shape("value_cache", value_cache, key_cache.shape[0], heads, value.shape[2], chip.BLOCK)
    real, places = written_slots(slot_mapping, rows, key_cache.shape[0] * chip.BLOCK)
    block, offset = places // chip.BLOCK, places % chip.BLOCK
    key_cache[block, :, :, offset] = in_int8(key[real], k_scale, k_zero).unflatten(-1, (-1, PIECE))
    value_cache[block, :, :, offset] = in_int8(value[real], v_scale, v_zero)


@emulates("_C_cache_ops::concat_and_cache_mla")
def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """The cache is `[blocks, 64, latent + rotated]`."""
    plain_cache(kv_cache_dtype, scale=scale)
    chip.half(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.contiguous(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.shape("kv_cache", kv_cache, None, chip.BLOCK, None)
    write_latents(kv_c, k_pe, kv_cache, slot_mapping)


@emulates("_C_cache_ops::gather_cache")
def gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts):
    """Each sequence's entries, one behind the other."""
    chip.half(src_cache=src_cache, dst=dst)
    chip.contiguous(src_cache=src_cache, dst=dst)
    chip.dtype(chip.INT32, seq_starts=seq_starts)
    chip.shape("src_cache", src_cache, None, chip.BLOCK, dst.shape[-1])
    chip.shape("seq_starts", seq_starts, batch_size)
    require(not seq_starts.any(), "sequences are gathered from their start only")
    gather(src_cache, dst, block_table, cu_seq_lens, batch_size)
