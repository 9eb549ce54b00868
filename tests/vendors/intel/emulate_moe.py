"""Routing and experts.

Meaning: tests/ops/topk_op.py, tests/ops/grouped_topk_op.py and tests/fused_moe in vllm-project/vllm-xpu-kernels at
4543b580; limits from csrc/moe and csrc/xpu/grouped_gemm there.
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.intel import chip

IMPLEMENTATIONS = emulates = Implementations()
TOP_K = (1, 2, 4, 6, 7, 8, 10, 16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _topk(topk_weights, topk_indices, token_expert_indices, gating_output, scores, renormalize, bias, factor):
    chip.dtype(torch.float32, topk_weights=topk_weights)
    chip.dtype(chip.INT32, token_expert_indices=token_expert_indices)
    require(topk_indices.dtype in (torch.int32, torch.int64), f"indices are integers, got {topk_indices.dtype}")
    chip.floats(gating_output=gating_output)
    chip.contiguous(gating_output=gating_output, topk_weights=topk_weights, topk_indices=topk_indices)
    rows, k = topk_weights.shape
    chip.shape("topk_indices", topk_indices, rows, k)
    chip.shape("token_expert_indices", token_expert_indices, rows, k)
    chip.shape("gating_output", gating_output, rows, None)
    choice = scores
    if bias is not None:
        chip.dtype(torch.float32, bias=bias)
        chip.shape("bias", bias, scores.shape[1])
        choice = scores + bias
    ids = choice.topk(k, -1)[1]
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    topk_weights.copy_(weights * factor)
    topk_indices.copy_(ids)
    token_expert_indices.copy_(torch.arange(rows * k).view(k, rows).t())


@emulates("_moe_C::topk_softmax")
def topk_softmax(gating_output, renormalize, bias, is_padding, **results):
    """Softmax over all experts, the k largest; a bias chooses only."""
    chip.absent(is_padding=is_padding)
    scores = gating_output.float().softmax(-1)
    _topk(gating_output=gating_output, scores=scores, renormalize=renormalize, bias=bias, factor=1.0, **results)


@emulates("_moe_C::topk_sigmoid")
def topk_sigmoid(gating_output, renormalize, bias, routed_scaling_factor, is_padding, **results):
    """The same with the sigmoid, and a factor behind."""
    chip.absent(is_padding=is_padding)
    scores = gating_output.float().sigmoid()
    factor = routed_scaling_factor
    _topk(gating_output=gating_output, scores=scores, renormalize=renormalize, bias=bias, factor=factor, **results)


@emulates("_moe_C::grouped_topk")
def grouped_topk(scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func):
    """Groups count by the sum of their best two; scoring_func 0 takes scores as they are, 1 is the sigmoid."""
    require(scoring_func in (0, 1), f"scoring_func is 0 or 1, got {scoring_func}")
    chip.floats(scores=scores)
    chip.floats(bias=bias)
    chip.contiguous(scores=scores, bias=bias)
    require(scores.dim() == 2, f"scores have two dimensions, got {scores.dim()}")
    rows, experts = scores.shape
    chip.shape("bias", bias, experts)
    require(experts % n_group == 0 and n_group <= 32, f"at most 32 whole groups, got {n_group} of {experts} experts")
    require(topk <= 32 and topk <= topk_group * (experts // n_group), f"at most 32 of the chosen groups, got {topk}")
    x = scores.float().sigmoid() if scoring_func else scores.float()
    groups = (x + bias.float()).view(rows, n_group, -1)
    best = groups.topk(2, -1)[0].sum(-1).topk(topk_group, -1)[1]
    keep = torch.zeros(rows, n_group, dtype=torch.bool).scatter_(1, best, True)
    ids = groups.masked_fill(~keep[..., None], -torch.inf).flatten(1).topk(topk, -1)[1]
    weights = x.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    return weights * routed_scaling_factor, ids.int()


@emulates("_moe_C::remap_hidden_states")
def remap_hidden_states(
    hidden_states, hidden_states_scales, remapped_hidden_states, remapped_hidden_states_scales, expert_map,
    rows_per_expert, unpermuted_row_to_permuted_row, topk_ids, total_experts_num, local_experts_num,
):  # fmt: skip
    """Rows sorted by expert, how many each has (added to what stands there), and where each pair went."""
    chip.absent(
        hidden_states_scales=hidden_states_scales,
        remapped_hidden_states_scales=remapped_hidden_states_scales,
        expert_map=expert_map,
    )
    chip.floats(hidden_states=hidden_states, remapped_hidden_states=remapped_hidden_states)
    chip.dtype(
        chip.INT32,
        rows_per_expert=rows_per_expert,
        unpermuted_row_to_permuted_row=unpermuted_row_to_permuted_row,
    )
    require(topk_ids.dtype in (torch.int32, torch.int64), f"topk_ids are integers, got {topk_ids.dtype}")
    chip.contiguous(hidden_states=hidden_states, topk_ids=topk_ids, remapped_hidden_states=remapped_hidden_states)
    (rows, width), k = hidden_states.shape, topk_ids.shape[1]
    require(k in TOP_K, f"Unsupported TopK value {k}")
    require(local_experts_num <= 1024, f"at most 1024 experts, got {local_experts_num}")
    require(total_experts_num == local_experts_num, "experts elsewhere need expert_map")
    vector = 16 // (2 if hidden_states.dtype is torch.float32 else hidden_states.element_size())
    require(width % vector == 0, f"rows in {vector}s, got {width}")
    chip.shape("topk_ids", topk_ids, rows, k)
    chip.shape("remapped_hidden_states", remapped_hidden_states, rows * k, width)
    chip.shape("rows_per_expert", rows_per_expert, local_experts_num)
    chip.shape("unpermuted_row_to_permuted_row", unpermuted_row_to_permuted_row, rows, k)
    require(not rows_per_expert.any(), "rows_per_expert begins with zeros")
    flat = topk_ids.flatten().long()
    require(bool(((flat >= 0) & (flat < local_experts_num)).all()), f"experts lie in [0, {local_experts_num})")
    order = flat.argsort(stable=True)
    remapped_hidden_states.copy_(hidden_states[order // k])
    places = torch.empty_like(order)
    places[order] = torch.arange(rows * k)
    unpermuted_row_to_permuted_row.copy_(places.view(rows, k))
    rows_per_expert.copy_(flat.bincount(minlength=local_experts_num))


def _int4(ptr_B, scale, a):
    """Bytes `[E, N, K / 2]` of two signed nibbles, the even column low; scales `[E, N, groups]` in A's dtype."""
    require(scale is not None, "int4 needs scales")
    chip.dtype(a.dtype, ptr_B_scale=scale)
    columns = ptr_B.shape[2] * 2
    chip.shape("ptr_B_scale", scale, ptr_B.shape[0], ptr_B.shape[1], None)
    require(columns % scale.shape[2] == 0, f"{columns} columns in {scale.shape[2]} groups")
    group = columns // scale.shape[2]
    require(group in (32, 64, 128, 256), f"groups of 32, 64, 128 or 256, got {group}")
    nibbles = torch.stack((ptr_B & 15, (ptr_B >> 4) & 15), -1).flatten(2)
    values = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    return (values * scale.float().repeat_interleave(group, -1)).transpose(1, 2)


def _fp8(ptr_B, scale):
    """`[E, K, N]` in FP8, float32 scales `[E, K / 128, N / 128]`."""
    require(scale is not None and scale.dtype is torch.float32, "FP8 needs float32 scales")
    _, k, n = ptr_B.shape
    require(k % 128 == 0 and n % 128 == 0, f"whole blocks of 128, got {k} and {n}")
    chip.shape("ptr_B_scale", scale, ptr_B.shape[0], k // 128, n // 128)
    return ptr_B.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


@emulates("_xpu_C::cutlass_grouped_gemm_interface")
def cutlass_grouped_gemm_interface(
    ptr_A, ptr_A_scale, ptr_B, ptr_B_scale, ptr_bias, ptr_D, rows_per_expert, N, K, num_experts
):
    """Rows sorted by expert, each expert's times its own matrix."""
    chip.absent(ptr_A_scale=ptr_A_scale)
    if ptr_bias is not None:
        chip.half(ptr_A=ptr_A, ptr_bias=ptr_bias)
        chip.contiguous(ptr_bias=ptr_bias)
        chip.shape("ptr_bias", ptr_bias, num_experts, N)
    chip.half(ptr_A=ptr_A, ptr_D=ptr_D)
    chip.contiguous(ptr_A=ptr_A, ptr_B=ptr_B, ptr_D=ptr_D)
    chip.dtype(chip.INT32, rows_per_expert=rows_per_expert)
    require(N % 8 == 0, f"N must be divisible by 8, got {N}")
    require(ptr_B_scale is None or ptr_B_scale.is_contiguous(), "scales are contiguous")
    require(ptr_B.dim() == 3, f"ptr_B has three dimensions, got {ptr_B.dim()}")
    if ptr_B.dtype is torch.int8:
        weight = _int4(ptr_B, ptr_B_scale, ptr_A)
    elif ptr_B.dtype in FP8:
        weight = _fp8(ptr_B, ptr_B_scale)
    else:
        chip.half(ptr_A=ptr_A, ptr_B=ptr_B)
        chip.absent(ptr_B_scale=ptr_B_scale)
        weight = ptr_B.float()
    require(tuple(weight.shape) == (num_experts, K, N), f"ptr_B is [{num_experts}, {K}, {N}], got {[*weight.shape]}")
    chip.shape("ptr_A", ptr_A, None, K)
    chip.shape("ptr_D", ptr_D, ptr_A.shape[0], N)
    chip.shape("rows_per_expert", rows_per_expert, num_experts)
    counts = rows_per_expert.tolist()
    require(sum(counts) == ptr_A.shape[0], f"{ptr_A.shape[0]} rows, {sum(counts)} counted")
    at = 0
    for expert, n in enumerate(counts):
        added = 0.0 if ptr_bias is None else ptr_bias[expert].float()
        ptr_D[at : at + n] = (ptr_A[at : at + n].float() @ weight[expert] + added).to(ptr_D.dtype)
        at += n
    return ptr_D.clone()


@emulates("_moe_C::moe_gather")
def moe_gather(output, moe_output, topk_weights, unpermuted_row_to_permuted_row, num_experts):
    """output[t] <- the weighted sum of the rows that t's pairs went to."""
    chip.floats(output=output, moe_output=moe_output)
    chip.dtype(torch.float32, topk_weights=topk_weights)
    chip.dtype(chip.INT32, unpermuted_row_to_permuted_row=unpermuted_row_to_permuted_row)
    chip.contiguous(output=output, moe_output=moe_output, topk_weights=topk_weights)
    rows, k = topk_weights.shape
    require(k in TOP_K, f"not support TOPK={k}")
    chip.shape("moe_output", moe_output, rows * k, output.shape[1])
    chip.shape("output", output, rows, None)
    y = moe_output[unpermuted_row_to_permuted_row.long()].float()
    output.copy_((y * topk_weights[..., None]).sum(1).to(output.dtype))
