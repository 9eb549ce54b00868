"""Norms, positions, activation, cache writes, and queries about the device.

Meaning and limits: vllm-project/vllm-xpu-kernels at 4543b580, csrc/layernorm.cpp, activation.cpp,
pos_encoding_kernels.cpp and cache.cpp with tests/ops and tests/test_cache.py.
"""

from __future__ import annotations

import torch

from tests.vendors import semantics
from tests.vendors.emulator import Implementations, require
from tests.vendors.intel import chip

IMPLEMENTATIONS = emulates = Implementations()


@emulates("_C::rms_norm")
def rms_norm(result, input, weight, epsilon):
    """result <- norm(input) weight, over two to four dimensions."""
    chip.floats(result=result, input=input, weight=weight)
    chip.contiguous(result=result, weight=weight)
    require(2 <= input.dim() <= 4, f"two to four dimensions, got {input.dim()}")
    chip.shape("result", result, *input.shape)
    chip.shape("weight", weight, input.shape[-1])
    result.copy_(semantics.normalize(input, weight, epsilon))


@emulates("_C::fused_add_rms_norm")
def fused_add_rms_norm(input, residual, weight, epsilon):
    """residual <- residual + input; input <- norm(residual) weight."""
    chip.floats(input=input, residual=residual, weight=weight)
    chip.contiguous(input=input, residual=residual, weight=weight)
    chip.shape("residual", residual, *input.shape)
    chip.shape("weight", weight, input.shape[-1])
    semantics.add_normalize(input, residual, weight, epsilon)


@emulates("_C::rotary_embedding")
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """In place, `[T, heads * head_size]`; the table is cosines, then sines, `[positions, D]`, in the queries' dtype."""
    given = {"query": query} if key is None else {"query": query, "key": key}
    chip.floats(cos_sin_cache=cos_sin_cache, **given)
    semantics.check_heads(positions, cos_sin_cache, head_size, given)
    for t in given.values():
        t.copy_(semantics.rotate(t, positions, cos_sin_cache, head_size, is_neox))


@emulates("_C::silu_and_mul")
def silu_and_mul(result, input):
    """result <- silu(first half) * second half."""
    chip.floats(result=result, input=input)
    chip.contiguous(result=result, input=input)
    chip.shape("result", result, *input.shape[:-1], input.shape[-1] // 2)
    result.copy_(semantics.silu_mul(input).to(result.dtype))


@emulates("_C::swigluoai_and_mul")
def swigluoai_and_mul(out, input, alpha, limit):
    """Of pairs (gate, up), gate clamped from above and up on both sides: `gate sigmoid(alpha gate) (up + 1)`."""
    chip.floats(out=out, input=input)
    chip.contiguous(out=out, input=input)
    chip.shape("out", out, *input.shape[:-1], input.shape[-1] // 2)
    gate, up = input.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_((gate * torch.sigmoid(alpha * gate) * (up + 1)).to(out.dtype))


E4M3, E4M3_LARGEST = torch.float8_e4m3fn, 448.0
CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")


def _in_cache(kv_cache_dtype: str, scales: dict[str, torch.Tensor], cache: torch.Tensor, **rows: torch.Tensor) -> tuple:
    """Rows as they are stored (CopyWithScaleOp in csrc/quantization/fp8/quant_utils.h), one scale for each. The
    operator does not look at the cache's dtype: what is wrong there would be written as bytes.
    """
    semantics.one_scale(**scales)
    require(kv_cache_dtype in CACHE_DTYPES, f"Unsupported data type of kv cache: {kv_cache_dtype}")
    chip.floats(**rows)
    if kv_cache_dtype == "auto":
        chip.floats(cache=cache, **rows)
        return tuple(rows.values())
    require(cache.dtype is E4M3, f"a cache in {kv_cache_dtype!r} is one of {E4M3}, got {cache.dtype}")
    scaled = (row.float() / scale for row, scale in zip(rows.values(), scales.values(), strict=True))
    return tuple(t.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(E4M3) for t in scaled)


@emulates("_C_cache_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Caches `[blocks, tokens, heads, D]`; heads apart from each other mean another layout, which is not emulated."""
    require(key_cache.dtype is value_cache.dtype, "K and V have one dtype in the cache")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    key, value = _in_cache(kv_cache_dtype, scales, key_cache, key=key, value=value)
    chip.contiguous(key=key, value=value)
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        chip.shape(name, cache, None, None, *rows.shape[1:])
        require(cache.stride(2) == rows.shape[2], f"heads of {name} follow one another")
    require(key_cache.stride(0) == value_cache.stride(0), "K and V have one stride of blocks")
    semantics.write_blocks(key, value, key_cache, value_cache, slot_mapping)


@emulates("_C_cache_ops::concat_and_cache_mla")
def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """The cache is `[blocks, tokens, latent + rotated]`; one scale stands for both parts."""
    chip.contiguous(kv_c=kv_c, k_pe=k_pe)
    kv_c, k_pe = _in_cache(kv_cache_dtype, {"scale": scale, "the same": scale}, kv_cache, kv_c=kv_c, k_pe=k_pe)
    semantics.write_latents(kv_c, k_pe, kv_cache, slot_mapping)


@emulates("_C_cache_ops::gather_cache")
def gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts):
    """Each sequence's entries, one behind the other."""
    chip.absent(seq_starts=seq_starts)
    chip.floats(src_cache=src_cache, dst=dst)
    chip.contiguous(dst=dst)
    chip.shape("src_cache", src_cache, None, None, dst.shape[-1])
    semantics.gather(src_cache, dst, block_table, cu_seq_lens, batch_size)


@emulates("_C_cache_ops::gather_and_maybe_dequant_cache")
def gather_and_maybe_dequant_cache(
    src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts
):
    """As gather_cache; each row of the result names its sequence, and entries in FP8 are multiplied by the scale."""
    chip.absent(seq_starts=seq_starts)
    semantics.one_scale(scale=scale)
    require(kv_cache_dtype in CACHE_DTYPES[1:], f"a cache in {kv_cache_dtype!r} is not emulated here")
    require(src_cache.dtype is E4M3, f"a cache in {kv_cache_dtype!r} is one of {E4M3}, got {src_cache.dtype}")
    chip.floats(dst=dst)
    chip.dtype(chip.INT32, token_to_seq=token_to_seq)
    chip.shape("src_cache", src_cache, None, None, dst.shape[-1])
    chip.shape("token_to_seq", token_to_seq, num_tokens)
    counts = cu_seq_lens.diff().long()
    sequences = torch.repeat_interleave(torch.arange(len(counts)), counts)
    require(torch.equal(token_to_seq.long(), sequences), "token_to_seq names the sequence of each row")
    entries = torch.empty(num_tokens, dst.shape[-1], dtype=E4M3)
    semantics.gather(src_cache, entries, block_table, cu_seq_lens, len(counts))
    dst.copy_((entries.float() * scale).to(dst.dtype))


@emulates("_C_cache_ops::getMemoryInfo")
def get_memory_info(device_index):
    """Free bytes, then all: here of a card of 12 GiB."""
    require(device_index >= 0, f"a device's number, got {device_index}")
    return 11 << 30, 12 << 30


@emulates("_xpu_C::is_xe2_arch")
def is_xe2_arch(device_index):
    """The emulated card is a Battlemage."""
    return True


@emulates("_xpu_C::is_xe3_arch")
def is_xe3_arch(device_index):
    return False
