"""Norms, positions, activation and cache writes.

Meaning: vLLM's operators of the same names, as baidu/vLLM-Kunlun at 09869ee7 calls the vendor's in their place
(ops/_custom_ops.py, _kunlun_ops.py, layernorm.py); halves of swiglu as its tests found on a P800
(tests/ut/ops/test_fused_moe.py at f926eebd).
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.kunlun import chip
from tests.vendors.semantics import check_heads, normalize, rotate, silu_mul

IMPLEMENTATIONS = emulates = Implementations()


def _weight(weight: torch.Tensor, width: int) -> None:
    chip.dtype(torch.float32, weight=weight)
    chip.shape("weight", weight, width)


@emulates("kunlun_ops::rmsnorm")
def rmsnorm(x, weight, output, eps):
    """output <- norm(x) weight; the weight is float32."""
    chip.half(x=x, output=output)
    chip.contiguous(x=x, output=output, weight=weight)
    chip.shape("x", x, None, None)
    chip.shape("output", output, *x.shape)
    _weight(weight, x.shape[-1])
    output.copy_(normalize(x.float(), weight, eps))


@emulates("kunlun_ops::add_rmsnorm")
def add_rmsnorm(x, y, residual_output, weight, eps, output):
    """residual_output <- x + y; output <- norm(x + y) weight."""
    chip.half(x=x, y=y, residual_output=residual_output, output=output)
    chip.contiguous(x=x, y=y, residual_output=residual_output, output=output, weight=weight)
    for name, t in (("y", y), ("residual_output", residual_output), ("output", output)):
        chip.shape(name, t, *x.shape)
    _weight(weight, x.shape[-1])
    total = x.float() + y.float()
    residual_output.copy_(total)
    output.copy_(normalize(total, weight, eps))


@emulates("kunlun_ops::rotary_embedding")
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Both in place, `[T, heads * head_size]`; the table is cosines, then sines, in the queries' dtype."""
    chip.half(query=query, key=key, cos_sin_cache=cos_sin_cache)
    check_heads(positions, cos_sin_cache, head_size, {"query": query, "key": key})
    for t in (query, key):
        t.copy_(rotate(t, positions, cos_sin_cache, head_size, is_neox))


@emulates("kunlun_ops::swiglu")
def swiglu(x, y):
    """y <- silu(first half) * second half."""
    chip.half(x=x, y=y)
    chip.contiguous(x=x, y=y)
    require(x.numel() > 0, "an empty tensor is not taken")
    chip.shape("y", y, *x.shape[:-1], x.shape[-1] // 2)
    y.copy_(silu_mul(x))


def _places(slot_mapping: torch.Tensor, rows: int, slots: int) -> torch.Tensor:
    """Where rows are written. What a negative slot does is not documented, so there must be none."""
    chip.dtype(torch.int64, slot_mapping=slot_mapping)
    chip.shape("slot_mapping", slot_mapping, rows)
    inside = bool(((slot_mapping >= 0) & (slot_mapping < slots)).all())
    require(inside, f"slots lie in [0, {slots}), got {slot_mapping.tolist()}")
    require(len(set(slot_mapping.tolist())) == rows, "no slot is written twice")
    return slot_mapping


@emulates("kunlun_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, BLHD_LAYOUT):
    """Caches `[blocks, heads, 16, D]`."""
    require(not BLHD_LAYOUT, "BLHD_LAYOUT is emulated as False, heads before tokens")
    chip.half(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        chip.shape(name, cache, None, rows.shape[1], chip.BLOCK, rows.shape[2])
    slots = _places(slot_mapping, key.shape[0], key_cache.shape[0] * chip.BLOCK)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache[slots // chip.BLOCK, :, slots % chip.BLOCK] = rows


@emulates("kunlun_ops::concat_and_cache_mla")
def concat_and_cache_mla(kv_c, k_pe, slot_mapping, kv_cache):
    """The cache is `[blocks, 64, latent + rotated]`."""
    chip.half(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.contiguous(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.shape("k_pe", k_pe, kv_c.shape[0], None)
    chip.shape("kv_cache", kv_cache, None, chip.LATENT_BLOCK, kv_c.shape[1] + k_pe.shape[1])
    slots = _places(slot_mapping, kv_c.shape[0], kv_cache.shape[0] * chip.LATENT_BLOCK)
    kv_cache.flatten(0, 1)[slots] = torch.cat((kv_c, k_pe), -1)
