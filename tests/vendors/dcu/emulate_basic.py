"""Norms, positions, activation, int8 products, the gate and cache writes.

Meaning: the references of HYGON-AI/vllm-plugin-das's own tests of these kernels (tests/accuracy), vLLM's operators of
the same names, and SGLang's fused gate, from which lightop's is derived.
"""

from __future__ import annotations

import torch

from tests.vendors.dcu import chip
from tests.vendors.emulator import Implementations, require
from tests.vendors.semantics import (
    add_normalize,
    check_heads,
    normalize,
    one_scale,
    plain_cache,
    rotate,
    silu_mul,
    write_blocks,
    write_latents,
    written_slots,
)

IMPLEMENTATIONS = emulates = Implementations()


@emulates("lightop__norm::rmsnorm_forward_autograd")
def rmsnorm_forward_autograd(x, weight, eps, training):
    """norm(x) weight, rows `[T, D]`."""
    require(not training, "nothing is trained here")
    chip.half(x=x, weight=weight)
    chip.contiguous(x=x, weight=weight)
    chip.shape("x", x, None, None)
    chip.shape("weight", weight, x.shape[-1])
    return normalize(x, weight, eps)


@emulates("lightop__norm::fused_add_rms_norm")
def fused_add_rms_norm(x, residual, weight, eps):
    """residual <- residual + x; x <- norm(residual) weight."""
    chip.half(x=x, residual=residual, weight=weight)
    chip.contiguous(x=x, residual=residual, weight=weight)
    chip.shape("residual", residual, *x.shape)
    chip.shape("weight", weight, x.shape[-1])
    add_normalize(x, residual, weight, eps)


@emulates("lightop__activation::silu_and_mul_opt")
def silu_and_mul_opt(out, input):
    """out <- silu(first half) * second half."""
    chip.half(out=out, input=input)
    chip.contiguous(out=out, input=input)
    chip.shape("out", out, *input.shape[:-1], input.shape[-1] // 2)
    out.copy_(silu_mul(input).to(out.dtype))


def _rotary(positions, query, key, head_size, table):
    chip.half(query=query, key=key, cos_sin_cache=table)
    check_heads(positions, table, head_size, {"query": query, "key": key})


@emulates("lightop__op::rotary_embedding_fuse")
def rotary_embedding_fuse(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Both in place, `[T, heads * head_size]`; the table is cosines, then sines."""
    _rotary(positions, query, key, head_size, cos_sin_cache)
    for t in (query, key):
        t.copy_(rotate(t, positions, cos_sin_cache, head_size, is_neox))


@emulates("lightop__attention::rms_rotary_embedding_fuse")
def rms_rotary_embedding_fuse(
    positions, query, key, head_size, cos_sin_cache, is_neox, weight_q, weight_k, residual_q, residual_k, epsilon,
):  # fmt: skip
    """The same, each head normed first; what comes back are the arguments."""
    chip.absent("residual_q", residual_q)
    chip.absent("residual_k", residual_k)
    _rotary(positions, query, key, head_size, cos_sin_cache)
    for t, weight in ((query, weight_q), (key, weight_k)):
        chip.half(query=query, weight=weight)
        chip.shape("weight", weight, head_size)
        heads = normalize(t.float().view(t.shape[0], -1, head_size), weight, epsilon).view(t.shape)
        t.copy_(rotate(heads, positions, cos_sin_cache, head_size, is_neox).to(t.dtype))
    return query, key


@emulates("lightop__quant::per_token_quant_int8")
def per_token_quant_int8(x):
    """scale = amax / 127 a token, `[T, 1]`; amax is at least 1e-10."""
    chip.half(x=x)
    chip.contiguous(x=x)
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


@emulates("lightop__gemm_ops::hipblaslt_w8a8_gemm")
def hipblaslt_w8a8_gemm(a, b, scale_a, scale_b, m, n, k, layout, out_dtype):
    """(a scale_a) (b scale_b)^T, both row by row; a status comes first."""
    chip.dtype(torch.int8, a=a, b=b)
    chip.dtype(torch.float32, scale_a=scale_a, scale_b=scale_b)
    chip.contiguous(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    require(layout == "NT", f"layout is 'NT', got {layout!r}")
    require(out_dtype in chip.HALF or (chip.LIFTED and out_dtype is torch.float32), f"out_dtype {out_dtype}")
    chip.shape("a", a, m, k)
    chip.shape("b", b, n, k)
    chip.shape("scale_a", scale_a, m, 1)
    chip.shape("scale_b", scale_b, n, 1)
    sums = a.double() @ b.double().t()  # exact, as in int32
    return True, (sums.float() * scale_a * scale_b.t()).to(out_dtype)


@emulates("lightop__moe::moe_fused_gate")
def moe_fused_gate(
    router_logits, e_score_correction_bias, num_expert_group, topk_group, top_k, num_fused_shared_experts,
    routed_scaling_factor, apply_routed_scaling_factor_on_output,
):  # fmt: skip
    """Sigmoid scores, groups judged by their two best choices, weights that sum to 1, times the factor if requested."""
    chip.dtype(torch.float32, router_logits=router_logits, e_score_correction_bias=e_score_correction_bias)
    chip.contiguous(router_logits=router_logits)
    rows, experts = router_logits.shape
    chip.shape("e_score_correction_bias", e_score_correction_bias, experts)
    require(experts & (experts - 1) == 0, f"a power of two of experts, got {experts}")
    require(experts % num_expert_group == 0, f"{experts} experts in {num_expert_group} groups")
    require(experts // num_expert_group <= 32, f"at most 32 experts a group, got {experts // num_expert_group}")
    require(1 <= topk_group <= num_expert_group, f"{topk_group} of {num_expert_group} groups")
    require(num_fused_shared_experts == 0, "shared experts are not emulated")
    scores = router_logits.sigmoid()
    groups = (scores + e_score_correction_bias).view(rows, num_expert_group, -1)
    rank = groups.topk(2, -1)[0].sum(-1)
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(topk_group, -1)[1], True)
    ids = groups.masked_fill(~keep[..., None], -torch.inf).flatten(1).topk(top_k, -1)[1]
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor if apply_routed_scaling_factor_on_output else weights, ids.int()


@emulates("hcu_ops::reshape_and_cache")
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Blocks of heads: K `[blocks, heads, 64, D]`, V `[blocks, heads, D, 64]`."""
    _cache(key, value, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
    heads, dim = key.shape[1:]
    chip.shape("key_cache", key_cache, None, heads, chip.BLOCK, dim)
    chip.shape("value_cache", value_cache, None, heads, value.shape[2], chip.BLOCK)
    real, places = written_slots(slot_mapping, key.shape[0], key_cache.shape[0] * chip.BLOCK)
    block, offset = places // chip.BLOCK, places % chip.BLOCK
    key_cache[block, :, offset] = key[real]
    value_cache[block, :, :, offset] = value[real]


@emulates("hcu_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Plain blocks `[blocks, 64, heads, D]`."""
    _cache(key, value, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
    for name, cache, rows in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        chip.shape(name, cache, None, chip.BLOCK, *rows.shape[1:])
    write_blocks(key, value, key_cache, value_cache, slot_mapping)


def _cache(key, value, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale):
    plain_cache(kv_cache_dtype, k_scale=k_scale, v_scale=v_scale)
    chip.half(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    chip.contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    require(key.shape[2] == value.shape[2], "K and V have one width: csrc/hcu_cache_kernel.cu has one head_size")


def _in_fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float_to_fp8_e4m3 of csrc/hcu_cache_kernel.cu: what rounds beyond 448 is no number, as in torch's conversion."""
    return (rows.float() / scale).to(torch.float8_e4m3fn)


@emulates("hcu_ops::concat_and_cache_mla")
def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    """The cache is `[blocks, 64, latent + rotated]`; in FP8 both parts are divided by the scale."""
    chip.half(kv_c=kv_c, k_pe=k_pe)
    chip.contiguous(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache)
    chip.shape("kv_cache", kv_cache, None, chip.BLOCK, None)
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        one_scale(scale=scale)
        chip.dtype(torch.float8_e4m3fn, kv_cache=kv_cache)
        kv_c, k_pe = _in_fp8(kv_c, scale), _in_fp8(k_pe, scale)
    else:
        plain_cache(kv_cache_dtype, scale=scale)
        chip.half(kv_c=kv_c, kv_cache=kv_cache)
    write_latents(kv_c, k_pe, kv_cache, slot_mapping)
