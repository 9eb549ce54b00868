"""Cache writes and gathers, as their pages describe them.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu. ATB's write and npu_gather_pa_kv_cache have no page;
what is asserted of them is how vllm-ascend at 182b75ea calls them.
"""

from __future__ import annotations

import torch

from tests.vendors.calls import make_open
from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip
from tests.vendors.npu.emulate_basic import deinterleave, norm

IMPLEMENTATIONS = emulates = Implementations()
NZ = 16


def _slots(name: str, slots: torch.Tensor, blocks: int, block_tokens: int) -> list[int]:
    found = slots.tolist()
    bad = [s for s in found if not 0 <= s < blocks * block_tokens]
    require(not bad, f"{name} lies in [0, {blocks * block_tokens - 1}], got {bad[:3]}")
    require(len(set(found)) == len(found), f"{name} has equal entries")
    return found


def _put(cache: torch.Tensor, slots: list[int], rows: torch.Tensor, nz: bool) -> None:
    """Rows `[T, N, D]` into blocks of ND `[B, S, N, D]`, or of NZ `[B, N D / 16, S, 16]`."""
    for slot, row in zip(slots, rows):
        if nz:
            cache[slot // cache.shape[2], :, slot % cache.shape[2]] = row.reshape(-1, NZ)
        else:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row


@emulates("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, compress_lens, compress_seq_offsets, seq_lens, cache_mode
):
    """The page's first case: keys and values of three dimensions."""
    chip.runs_on("npu_scatter_pa_kv_cache", *chip.A2_A3)
    chip.unused(compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    chip.same_dtype("key, value and caches", key, value, key_cache, value_cache)
    chip.shape("key", key, None, None, None)
    chip.shape("value", value, *key.shape[:2], None)
    chip.shape("slot_mapping", slot_mapping, key.shape[0])
    require(
        slot_mapping.dtype in (torch.int32, torch.int64), f"slot_mapping is int32 or int64, got {slot_mapping.dtype}"
    )
    require(cache_mode in (None, "Norm", "PA_NZ"), f"cache_mode {cache_mode!r}")
    nz = cache_mode == "PA_NZ"
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        heads, dim = rows.shape[1:]
        if nz:
            chip.shape(name, cache, None, heads * dim // NZ, None, NZ)
        else:
            chip.shape(name, cache, None, None, heads, dim)
    size = key_cache.shape[2 if nz else 1]
    slots = _slots("slot_mapping", slot_mapping, key_cache.shape[0], size)
    _put(key_cache, slots, key, nz)
    _put(value_cache, slots, value, nz)


@emulates("atb::_npu_reshape_and_cache")
def reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    """On the 310P the caches are NZ."""
    chip.runs_on("_npu_reshape_and_cache", *chip.EVERY)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    chip.same_dtype("key, value and caches", key, value, key_cache, value_cache)
    chip.dtype("key", key, *chip.HALF)
    require(slot_indices.dtype is torch.int32, f"slot_indices is int32, got {slot_indices.dtype}")
    nz = chip.ARCH == "310p"
    if nz:
        chip.in_nz(key_cache=key_cache, value_cache=value_cache)
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        heads, dim = rows.shape[1:]
        chip.shape(name, cache, *((None, heads * dim // NZ, None, NZ) if nz else (None, None, heads, dim)))
    slots = _slots("slot_indices", slot_indices, key_cache.shape[0], key_cache.shape[2 if nz else 1])
    _put(key_cache, slots, key, nz)
    _put(value_cache, slots, value, nz)


@emulates("npu::npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v, epsilon,
    cache_mode, is_output_kv,
):  # fmt: skip
    """576 entries: the norm of 512, the rotation of 64, both written; the caches are changed although unmarked."""
    chip.runs_on("npu_kv_rmsnorm_rope_cache", *chip.A2_A3)
    chip.unused(k_rope_scale=k_rope_scale, c_kv_scale=c_kv_scale, k_rope_offset=k_rope_offset, c_kv_offset=c_kv_offset)
    chip.unused(v=v, is_output_kv=is_output_kv)
    require(cache_mode in ("PA", "PA_BNSD"), f"cache_mode {cache_mode!r} is not emulated")
    chip.dtype("kv", kv, *chip.HALF)
    chip.same_dtype("kv, gamma, cos, sin and caches", kv, gamma, cos, sin, k_cache, ckv_cache)
    chip.shape("kv", kv, None, 1, None, 576)
    batch, _, tokens, _ = kv.shape
    chip.shape("gamma", gamma, 512)
    chip.shape("cos", cos, batch, 1, tokens, 64)
    chip.shape("sin", sin, batch, 1, tokens, 64)
    chip.shape("k_cache", k_cache, None, None, 1, 64)
    chip.shape("ckv_cache", ckv_cache, *k_cache.shape[:2], 1, 512)
    chip.shape("index", index, batch * tokens)
    require(index.dtype is torch.int64, f"index is int64, got {index.dtype}")
    blocks, size = k_cache.shape[:2]
    need = -(-tokens // size) * batch
    require(blocks >= need, f"at least ceil(seq_len / block_size) * batch_size = {need} blocks, got {blocks}")
    latent = norm(kv[..., :512], gamma, epsilon)[0]
    rotated = deinterleave(kv[..., 512:], cos, sin).to(kv.dtype)
    slots = _slots("index", index, blocks, size)
    _put(ckv_cache, slots, latent.view(-1, 1, 512), nz=False)
    _put(k_cache, slots, rotated.view(-1, 1, 64), nz=False)
    return k_cache, ckv_cache, make_open(), make_open()


@emulates("npu::npu_gather_pa_kv_cache")
def gather_pa_kv_cache(key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum):
    """Each sequence's tokens, one behind the other."""
    chip.runs_on("npu_gather_pa_kv_cache", *chip.A2_A3)
    chip.unused(seq_offset=seq_offset, is_seq_lens_cumsum=is_seq_lens_cumsum)
    chip.same_dtype("caches and results", key_cache, value_cache, key, value)
    require(block_tables.dtype is seq_lens.dtype is torch.int32, "block_tables and seq_lens are int32")
    total = int(seq_lens.sum())
    for cache, out in ((key_cache, key), (value_cache, value)):
        chip.shape("a result", out, total, *cache.shape[2:])
        rows = [tokens_of(cache.flatten(2), table, int(n)) for table, n in zip(block_tables, seq_lens)]
        out.copy_(torch.cat(rows).view(out.shape))


def tokens_of(cache: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first tokens of a sequence in a cache `[B, S, W]`: `[tokens, W]`."""
    return cache[table[: -(-tokens // cache.shape[1])].long()].flatten(0, 1)[:tokens]
