"""Routing and experts: vLLM's operators of the same names (EnflameTechnology/vllm-gcu at 7b5aaca9, fused_moe.py)."""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.gcu import chip
from tests.vendors.gcu.emulate_basic import expand_int4

IMPLEMENTATIONS = emulates = Implementations()
MANY_EXPERTS = 224
"""From here on vllm-gcu calls the other alignment."""


@emulates("_moe_C::topk_softmax")
def topk_softmax(topk_weights, topk_indices, token_expert_indices, gating_output):
    """Softmax over all experts, the k largest, not renormalized."""
    chip.dtype(torch.float32, topk_weights=topk_weights, gating_output=gating_output)
    chip.dtype(chip.INT32, topk_indices=topk_indices, token_expert_indices=token_expert_indices)
    rows, k = topk_weights.shape
    chip.shape("topk_indices", topk_indices, rows, k)
    chip.shape("token_expert_indices", token_expert_indices, rows, k)
    chip.shape("gating_output", gating_output, rows, None)
    weights, ids = gating_output.softmax(-1).topk(k, -1)
    topk_weights.copy_(weights)
    topk_indices.copy_(ids)
    token_expert_indices.copy_(torch.arange(rows * k).view(k, rows).t())


@emulates("_C::fused_grouped_topk")
def fused_grouped_topk(
    topk_weights, topk_ids, gating_output, topk, renormalize, num_expert_group, topk_group, e_score_correction_bias,
    scoring_func,
):  # fmt: skip
    """Groups count by their best two experts where there is a bias, else by their best one."""
    chip.dtype(torch.float32, topk_weights=topk_weights)
    chip.dtype(chip.INT32, topk_ids=topk_ids)
    rows, experts = gating_output.shape
    chip.shape("topk_weights", topk_weights, rows, topk)
    chip.shape("topk_ids", topk_ids, rows, topk)
    require(scoring_func in ("softmax", "sigmoid"), f"scoring_func {scoring_func!r}")
    require(num_expert_group >= 1 and experts % num_expert_group == 0, f"{experts} experts, {num_expert_group} groups")
    require(1 <= topk_group <= num_expert_group, f"{topk_group} of {num_expert_group} groups")
    x = gating_output.float()
    scores = x.sigmoid() if scoring_func == "sigmoid" else x.softmax(-1)
    choice = scores
    if e_score_correction_bias is not None:
        chip.shape("e_score_correction_bias", e_score_correction_bias, experts)
        choice = scores + e_score_correction_bias.float()
    groups = choice.view(rows, num_expert_group, -1)
    rank = groups.amax(-1) if e_score_correction_bias is None else groups.topk(2, -1)[0].sum(-1)
    best = rank.topk(topk_group, -1)[1]
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
    ids = groups.masked_fill(~keep[..., None], -torch.inf).flatten(1).topk(topk, -1)[1]
    weights = scores.gather(1, ids)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_ids.copy_(ids)


def _align(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad):
    chip.dtype(
        chip.INT32,
        topk_ids=topk_ids,
        sorted_token_ids=sorted_token_ids,
        experts_ids=experts_ids,
        num_tokens_post_pad=num_tokens_post_pad,
    )
    chip.contiguous(topk_ids=topk_ids)
    pairs = topk_ids.numel()
    require(bool(((topk_ids >= 0) & (topk_ids < num_experts)).all()), f"experts lie in [0, {num_experts})")
    chip.shape("sorted_token_ids", sorted_token_ids, pairs + num_experts * (block_size - 1))
    chip.shape("experts_ids", experts_ids, sorted_token_ids.shape[0] // block_size)
    chip.shape("num_tokens_post_pad", num_tokens_post_pad, 1)
    at = 0
    flat = topk_ids.flatten()
    for expert in range(num_experts):
        own = torch.nonzero(flat == expert).flatten()
        size = -(-len(own) // block_size) * block_size
        sorted_token_ids[at : at + size] = pairs
        sorted_token_ids[at : at + len(own)] = own.int()
        experts_ids[at // block_size : (at + size) // block_size] = expert
        at += size
    num_tokens_post_pad.fill_(at)


@emulates("_moe_C::moe_align_block_size")
def moe_align_block_size(num_experts, **call):
    """Pairs by expert, each expert's padded to whole blocks with the number of pairs; what lies behind is left."""
    require(num_experts < MANY_EXPERTS, f"fewer than {MANY_EXPERTS} experts, got {num_experts}")
    _align(num_experts=num_experts, **call)


@emulates("_moe_C::sgl_moe_align_block_size")
def sgl_moe_align_block_size(num_experts, **call):
    """The same for many experts."""
    require(num_experts >= MANY_EXPERTS, f"at least {MANY_EXPERTS} experts, got {num_experts}")
    _align(num_experts=num_experts, **call)


@emulates("_C::fused_moe_kernel")
def fused_moe_kernel(
    C, A, B, topk_weights, topk_ids, sorted_topk_ids, expert_ids, num_tokens_post_pad, mul_routed_weight, topk,
    block_size, bias,
):  # fmt: skip
    """Row i of the pairs is A[i // topk] B[e]^T, times its weight where that is requested."""
    chip.half(A=A, B=B, C=C)
    _multiply_experts(
        C, A, B, topk_weights, topk_ids, sorted_topk_ids, expert_ids, num_tokens_post_pad, mul_routed_weight, topk,
        block_size, bias,
    )  # fmt: skip


def _multiply_experts(
    C, A, B, topk_weights, topk_ids, sorted_topk_ids, expert_ids, num_tokens_post_pad, mul_routed_weight, topk,
    block_size, bias,
):  # fmt: skip
    chip.absent("bias", bias)
    chip.half(C=C)
    chip.contiguous(A=A, B=B, C=C)
    chip.dtype(torch.float32, topk_weights=topk_weights)
    require(block_size == 64, f"block_size is 64 on this chip, got {block_size}")
    pairs = topk_ids.numel()
    chip.shape("B", B, None, None, A.shape[1])
    require(C.shape[-1] == B.shape[1], f"C has {B.shape[1]} columns, got {C.shape[-1]}")
    chip.shape("C", C, *topk_ids.shape, None)
    require(A.shape[0] * topk == pairs, f"{A.shape[0]} rows of A by topk {topk} for {pairs} pairs")
    rows = C.view(pairs, -1)
    used = int(num_tokens_post_pad)
    for block, expert in enumerate(expert_ids[: used // block_size].tolist()):
        own = sorted_topk_ids[block * block_size : (block + 1) * block_size].long()
        own = own[own < pairs]
        y = A[own // topk].float() @ B[expert].float().t()
        y = y * topk_weights.flatten()[own, None] if mul_routed_weight else y
        rows[own] = y.to(C.dtype)


@emulates("_C::fused_moe_quant_kernel")
def fused_moe_quant_kernel(
    C, A, B, A_scale, B_scale, gs, B_zp, topk_weights, topk_ids, sorted_token_ids, experts_ids, num_tokens_post_pad,
    mul_routed_weight, topk, block_size, bias, real_token_num,
):  # fmt: skip
    """As fused_moe_kernel, of int8 weights with a scale a row, or of int4 ones with scales and zero points for groups,
    all in A's dtype; or of int8 by int8, with scales of both sides in float32 (gs 1).
    """
    chip.absent("real_token_num", real_token_num)
    chip.contiguous(B=B, B_scale=B_scale)
    if A_scale is not None:
        chip.absent("B_zp", B_zp)
        require(gs == 1, f"gs {gs} is not emulated beside scales of A: 1 is a scale a row")
        chip.dtype(torch.int8, A=A, B=B)
        chip.dtype(torch.float32, A_scale=A_scale, B_scale=B_scale)
        chip.shape("A_scale", A_scale, A.shape[0], 1)
        chip.shape("B_scale", B_scale, B.shape[0], 1, B.shape[1])
        _multiply_experts(
            C, A.float() * A_scale, B.float() * B_scale.transpose(1, 2), topk_weights, topk_ids, sorted_token_ids,
            experts_ids, num_tokens_post_pad, mul_routed_weight, topk, block_size, bias,
        )  # fmt: skip
        return
    chip.half(A=A, B_scale=B_scale, C=C)
    if B.dtype is torch.uint8:
        require(B_zp is not None, "what int4 means without zero points is not published")
        chip.half(A=A, B_zp=B_zp)
        plain = torch.stack([expand_int4(b, s, z, gs, A.shape[1]) for b, s, z in zip(B, B_scale, B_zp)])
    else:
        chip.absent("B_zp", B_zp)
        require(gs == -1, f"gs {gs} is not emulated: -1 is a scale a row")
        chip.dtype(torch.int8, B=B)
        chip.shape("B_scale", B_scale, *B.shape[:2])
        plain = (B.float() * B_scale.float()[..., None]).to(torch.float32)
    _multiply_experts(
        C, A, plain, topk_weights, topk_ids, sorted_token_ids, experts_ids, num_tokens_post_pad, mul_routed_weight,
        topk, block_size, bias,
    )  # fmt: skip


@emulates("_moe_C::moe_sum_pad")
def moe_sum_pad(out, input, size, dim, keepdim):
    """Sums over a dimension in the first `size` rows; the others are left as they are."""
    chip.half(out=out, input=input)
    chip.dtype(chip.INT32, size=size)
    chip.shape("size", size, 1)
    require(dim == 1 and not keepdim, f"dim {dim} and keepdim {keepdim} are not emulated")
    chip.shape("out", out, input.shape[0], input.shape[2])
    n = int(size)
    out[:n] = input[:n].float().sum(1).to(out.dtype)
