"""ATB's attention: that over latents as its documentation in torch_npu describes it.

Source: Ascend/op-plugin at 517f2e7d, _atb_api_docs.py. ATB's other operators have no page; what is asserted of them is
how vllm-ascend at 182b75ea calls them.
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip
from tests.vendors.npu.emulate_attention import MASK, hidden_keys, is_same_mask, nz_to_nd, triangle, weigh_values
from tests.vendors.npu.emulate_cache import NZ, tokens_of

IMPLEMENTATIONS = emulates = Implementations()


@emulates("atb::npu_multi_head_latent_attention")
def multi_head_latent_attention(
    q_nope, q_rope, ctkv, k_rope, block_tables, context_lens, q_headnum, qk_scale, kv_headnum, mask, qseqlen,
    qk_descale, pv_descale, mask_type, calc_type, cache_mode,
):  # fmt: skip
    """Its default mode: a token of each sequence, no mask, latent and rotated key apart."""
    chip.runs_on("npu_multi_head_latent_attention", "910b", "910_93")
    chip.unused(mask=mask, qseqlen=qseqlen, qk_descale=qk_descale, pv_descale=pv_descale)
    chip.unused(mask_type=mask_type, calc_type=calc_type, cache_mode=cache_mode)
    chip.dtype("q_nope", q_nope, *chip.HALF)
    chip.same_dtype("queries and caches", q_nope, q_rope, ctkv, k_rope)
    chip.contiguous(q_nope=q_nope, q_rope=q_rope)
    tokens = q_nope.shape[0]
    chip.shape("q_nope", q_nope, None, q_headnum, 512)
    chip.shape("q_rope", q_rope, tokens, q_headnum, 64)
    chip.shape("ctkv", ctkv, None, None, kv_headnum, 512)
    chip.shape("k_rope", k_rope, *ctkv.shape[:2], kv_headnum, 64)
    require(ctkv.shape[1] <= 128, f"block_size is at most 128, got {ctkv.shape[1]}")
    require(len(context_lens) == tokens <= 8192, f"a context length a token, got {len(context_lens)} for {tokens}")
    require(block_tables.dtype is torch.int32 and block_tables.shape[0] == tokens, "an int32 block table a token")
    out = torch.zeros_like(q_nope)
    for t, n in enumerate(context_lens):
        latent, rotated = (tokens_of(c.flatten(2), block_tables[t], n)[:, None] for c in (ctkv, k_rope))
        q, k = torch.cat((q_nope[t], q_rope[t]), -1)[None], torch.cat((latent, rotated), -1)
        out[t] = weigh_values(q, k, latent, None, qk_scale)[0].to(out.dtype)
    return out


def _atb_checks(name, query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out):
    chip.runs_on(name, *chip.EVERY)
    chip.dtype("query", query, *chip.HALF)
    chip.same_dtype("query, caches and out", query, key_cache, value_cache, out)
    chip.contiguous(query=query, out=out)
    chip.shape("query", query, None, num_heads, None)
    require(chip.ARCH == "310p", f"{name} over ND caches is not emulated")
    dim = query.shape[-1]
    chip.shape("key_cache", key_cache, None, num_kv_heads * dim // NZ, None, NZ)
    chip.shape("value_cache", value_cache, *key_cache.shape)
    require(key_cache.shape[2] in (64, 128), f"blocks of 64 or 128 tokens, got {key_cache.shape[2]}")
    require(key_cache.shape[2] * dim <= 128 * 128, f"tokens of a block times entries of a head are at most {128 * 128}")
    chip.in_nz(key_cache=key_cache, value_cache=value_cache)
    require(block_table.dtype is context_lens.dtype is torch.int32, "block_table and context_lens are int32")
    require(out.shape == query.shape, "out has the query's shape")


@emulates("atb::_npu_paged_attention")
def paged_attention(
    query, key_cache, value_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, out, workspace
):
    """A token of each sequence."""
    chip.unused(workspace=workspace)
    _atb_checks(
        "_npu_paged_attention", query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out
    )
    require(len(context_lens) == query.shape[0], f"a context length a token, got {len(context_lens)}")
    k, v = nz_to_nd(key_cache), nz_to_nd(value_cache)
    for t, n in enumerate(context_lens.tolist()):
        keys, values = (tokens_of(c, block_table[t], n).view(n, num_kv_heads, -1) for c in (k, v))
        out[t] = weigh_values(query[t : t + 1], keys, values, None, scale_value)[0].to(out.dtype)


@emulates("atb::_npu_paged_attention_splitfuse_v2")
def paged_attention_splitfuse_v2(
    query, key_cache, value_cache, block_table, context_lens, mask, seq_len, num_kv_heads, num_heads, scale_value,
    mask_type, out,
):  # fmt: skip
    """Longer queries: the last `seq_len` of each sequence's tokens; its mask_type is 5 and no other."""
    name = "_npu_paged_attention_splitfuse_v2"
    _atb_checks(name, query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out)
    require(mask_type == 5, f"mask_type is 5, got {mask_type}")
    chip.shape("mask", mask, MASK, MASK)
    require(mask.dtype is torch.float16, f"mask is float16, got {mask.dtype}")
    require(is_same_mask(mask, triangle(-10000.0, mask.dtype)), "mask is -10000 above the diagonal and 0 elsewhere")
    require(seq_len.dtype is torch.int32, f"seq_len is int32, got {seq_len.dtype}")
    require(int(seq_len.sum()) == query.shape[0], f"seq_len adds up to {query.shape[0]} rows, got {int(seq_len.sum())}")
    k, v, at = nz_to_nd(key_cache), nz_to_nd(value_cache), 0
    for b, (s, n) in enumerate(zip(seq_len.tolist(), context_lens.tolist())):
        keys, values = (tokens_of(c, block_table[b], n).view(n, num_kv_heads, -1) for c in (k, v))
        hidden = hidden_keys(3, s, n, 0, 0)
        out[at : at + s] = weigh_values(query[at : at + s], keys, values, hidden, scale_value).to(out.dtype)
        at += s
