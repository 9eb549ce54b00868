"""Gating, sorting by expert, grouped products and the weighted sum, as their pages describe them.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu, and for FP8 at 02ea4757; npu_moe_token_unpermute has
a test there, no page.
"""

from __future__ import annotations

import torch

from tests.vendors.calls import make_open
from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip
from tests.vendors.npu.emulate_quant import FP8, SCALAR_TYPES, unpack_int4

IMPLEMENTATIONS = emulates = Implementations()


@emulates("npu::npu_moe_gating_top_k")
def moe_gating_top_k(
    x, k, bias, input_ids, tid2eid, k_group, group_count, group_select_mode, renorm, norm_type, out_flag,
    routed_scaling_factor, eps,
):  # fmt: skip
    """Scores, the best groups by their best expert or their best two, the best experts, stable."""
    chip.runs_on("npu_moe_gating_top_k", *chip.A2_A3)
    chip.unused(input_ids=input_ids, tid2eid=tid2eid, renorm=renorm, out_flag=out_flag)
    chip.dtype("x", x, *chip.FLOATS)
    chip.shape("x", x, None, None)
    rows, experts = x.shape
    require(experts <= 2048, f"at most 2048 experts, got {experts}")
    require(group_count > 0 and experts % group_count == 0, f"{experts} experts in {group_count} groups")
    size = experts // group_count
    require(size > 2, f"more than 2 experts a group, got {size}")
    require(-(-size // 32) * 32 * group_count <= 2048, "groups padded to 32 experts hold at most 2048")
    require(1 <= k_group <= group_count, f"k_group {k_group} of {group_count} groups")
    require(1 <= k <= size * k_group, f"k is 1 to {size * k_group}, got {k}")
    require(norm_type in (0, 1) and group_select_mode in (0, 1), "norm_type and group_select_mode are 0 or 1")
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores
    if bias is not None:
        chip.same_dtype("x and bias", x, bias)
        chip.shape("bias", bias, experts)
        choice = scores + bias.float()
    groups = choice.view(rows, group_count, size)
    rank = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1)[0].sum(-1)
    best = rank.sort(stable=True, dim=-1, descending=True)[1][:, :k_group]
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
    masked = groups.masked_fill(~keep[..., None], -torch.inf).flatten(1)
    ids = masked.sort(stable=True, dim=-1, descending=True)[1][:, :k]
    y = scores.gather(1, ids)
    if norm_type == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), ids.int(), make_open()


@emulates("npu::npu_moe_gating_top_k_softmax")
def moe_gating_top_k_softmax(x, finished, k):
    """Softmax, then the k largest, not renormalized."""
    chip.runs_on("npu_moe_gating_top_k_softmax", *chip.A2_A3)
    chip.unused(finished=finished)
    chip.dtype("x", x, *chip.FLOATS)
    require(x.dim() in (2, 3), f"x has 2 or 3 dimensions, got {x.dim()}")
    require(0 < k <= min(1024, x.shape[-1]), f"k is 1 to {min(1024, x.shape[-1])}, got {k}")
    y, ids = x.float().softmax(-1).topk(k, -1)
    rows = torch.arange(ids.numel(), dtype=torch.int32).view(k, -1).t()
    return y.to(x.dtype), ids.int(), rows


@emulates("npu::npu_moe_init_routing_v2")
def moe_init_routing_v2(
    x, expert_idx, scale, offset, active_num, expert_capacity, expert_num, drop_pad_mode, expert_tokens_num_type,
    expert_tokens_num_flag, quant_mode, active_expert_range, row_idx_type, x_dtype,
):  # fmt: skip
    """Every row once for each of its experts, sorted by expert; nothing dropped, nothing quantized."""
    chip.runs_on("npu_moe_init_routing_v2", *chip.EVERY)
    chip.unused(scale=scale, offset=offset, drop_pad_mode=drop_pad_mode, row_idx_type=row_idx_type, x_dtype=x_dtype)
    require(quant_mode == -1, f"quant_mode {quant_mode} is not emulated")
    chip.dtype("x", x, *chip.FLOATS)
    chip.shape("x", x, None, None)
    chip.shape("expert_idx", expert_idx, x.shape[0], None)
    require(expert_idx.dtype is torch.int32, f"expert_idx is int32, got {expert_idx.dtype}")
    pairs, k = expert_idx.numel(), expert_idx.shape[1]
    require(active_num in (-1, 0, pairs), f"active_num {active_num} is emulated for all {pairs} pairs only")
    require(0 < expert_num <= 10240, f"expert_num is 1 to 10240, got {expert_num}")
    first, last = active_expert_range or (0, expert_num)
    require((first, last) == (0, expert_num), "a part of the experts is not emulated")
    require(bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()), f"experts lie in [0, {expert_num})")
    require(expert_tokens_num_type in (0, 1), f"expert_tokens_num_type {expert_tokens_num_type} is not emulated")
    order = expert_idx.flatten().sort(stable=True)[1]
    places = torch.empty(pairs, dtype=torch.int32)
    places[order] = torch.arange(pairs, dtype=torch.int32)
    counts = expert_idx.flatten().bincount(minlength=expert_num)
    counts = counts if expert_tokens_num_type == 1 else counts.cumsum(0)
    return x[order // k], places, counts if expert_tokens_num_flag else make_open(), make_open()


@emulates("npu::npu_grouped_matmul")
def grouped_matmul(
    x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, group_list, activation_input,
    activation_quant_scale, activation_quant_offset, split_item, group_type, group_list_type, act_type, tuning_config,
    output_dtype, x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype,
):  # fmt: skip
    """One x, one stack of weights, one result, groups along rows; plain, with weights expanded within, or with both
    sides in 8 bits, a scale a row of x and a scale a column of weights.
    """
    chip.runs_on("npu_grouped_matmul", *chip.EVERY)
    chip.unused(offset=offset, act_type=act_type)
    chip.unused(activation_input=activation_input, activation_quant_scale=activation_quant_scale)
    chip.unused(activation_quant_offset=activation_quant_offset, tuning_config=tuning_config, x_dtype=x_dtype)
    chip.unused(weight_dtype=weight_dtype, scale_dtype=scale_dtype, per_token_scale_dtype=per_token_scale_dtype)
    require(len(x) == len(weight) == 1, "one x and one weight are emulated")
    rows, stack = x[0], weight[0]
    require(split_item in (2, 3), f"split_item is 2 or 3 for a single result, got {split_item}")
    require(group_type == 0, f"group_type is 0 for groups of rows, got {group_type}")
    require(group_list is not None and group_list.dtype is torch.int64, "group_list is an int64 tensor")
    chip.shape("x", rows, None, None)
    require(stack.dim() == 3, f"weight has 3 dimensions, got {stack.dim()}")
    experts = stack.shape[0]
    chip.shape("group_list", group_list, experts)
    require(experts <= 1024, f"at most 1024 groups, got {experts}")
    require(rows.is_contiguous(), "x may not be transposed")
    require(group_list_type in (0, 1), f"group_list_type {group_list_type} is for int8 on both sides")
    require(group_list_type == 0 or experts > 1, "counts have more than one entry")
    values = group_list.tolist()
    counts = values if group_list_type == 1 else [b - a for a, b in zip([0, *values], values)]
    require(all(n >= 0 for n in counts) and sum(counts) == rows.shape[0], f"group_list adds up to {rows.shape[0]} rows")
    require(max(rows.shape[1], stack.shape[2]) < chip.INNER_LIMIT, "inner dimensions are below 65536")
    if rows.dtype in (torch.int8, FP8):
        chip.unused(bias=bias, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
        return [_multiply_8_bits(rows, stack, scale, per_token_scale, counts, output_dtype)]
    chip.unused(scale=scale, per_token_scale=per_token_scale, output_dtype=output_dtype)
    if stack.dtype in (torch.int8, torch.int32):
        chip.unused(bias=bias)
        stack = _expand_rows(rows, stack, antiquant_scale, antiquant_offset)
    else:
        chip.unused(antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
        chip.dtype("x", rows, *((torch.float16,) if chip.ARCH == "310p" else chip.FLOATS))
        chip.same_dtype("x and weight", rows, stack)
    require(stack.shape[1] == rows.shape[1], f"weight [E, K, N] {list(stack.shape)} for rows of {rows.shape[1]}")
    parts = [part.float() @ w.float() for part, w in zip(rows.split(counts), stack)]
    if bias is not None:
        _check_bias(bias, rows, stack)
        parts = [part + b.float() for part, b in zip(parts, bias[0])]
    return [torch.cat(parts).to(rows.dtype)]


def _multiply_8_bits(rows, stack, scale, per_token_scale, counts, output_dtype) -> torch.Tensor:
    """int8, or FP8 on the 950: the tables of dtypes of its page at 517f2e7d, and for the 950 at 02ea4757."""
    require(rows.dtype is torch.int8 or chip.ARCH == "950", f"x in {rows.dtype} on {chip.ARCH}")
    require(chip.ARCH != "310p", "8 bits on both sides are not for the 310P")
    chip.same_dtype("x and weight", rows, stack)
    require(stack.shape[1] == rows.shape[1], f"weight [E, K, N] {list(stack.shape)} for rows of {rows.shape[1]}")
    require(scale is not None and per_token_scale is not None, "8 bits on both sides have scale and per_token_scale")
    require(len(scale) == len(per_token_scale) == 1, "a scale for each x and weight")
    require(output_dtype is not None, "without output_dtype the result has the dtype of x")
    out = SCALAR_TYPES[int(output_dtype)]
    wide = chip.LIFTED and out is torch.float32
    require(wide or out in chip.HALF, f"output_dtype {out}")
    chip.shape("scale", scale[0], stack.shape[0], stack.shape[2])
    chip.shape("per_token_scale", per_token_scale[0], rows.shape[0])
    require(per_token_scale[0].dtype is torch.float32, "per_token_scale is float32")
    allowed = {torch.float32}
    if rows.dtype is torch.int8 and out is torch.bfloat16:
        allowed = {torch.bfloat16, torch.float32} if chip.ARCH == "950" else {torch.bfloat16}
    require(scale[0].dtype in allowed, f"scale {scale[0].dtype} for a result of {out}")
    parts = [
        (part.double() @ w.double()).float() * s.float() for part, w, s in zip(rows.split(counts), stack, scale[0])
    ]
    return (torch.cat(parts) * per_token_scale[0][:, None]).to(out)


def _check_bias(bias, rows, stack) -> None:
    """One for the one weight, `[E, N]`, as Huawei's recipe for gpt-oss passes it (cann-recipes-infer); its page, where
    weights are a list, has one dimension. Its dtype by the page's table of dtypes.
    """
    require(len(bias) == 1, f"a bias for each weight, got {len(bias)}")
    chip.shape("bias", bias[0], stack.shape[0], stack.shape[2])
    want = torch.float32 if rows.dtype is torch.bfloat16 else rows.dtype
    require(bias[0].dtype is want, f"bias is {want} beside {rows.dtype}, got {bias[0].dtype}")


def _expand_rows(rows, stack, scale, offset) -> torch.Tensor:
    """`(w + offset) scale`: a scale a column, or, in int4, a column and group of rows."""
    chip.dtype("x", rows, *chip.HALF)
    require(scale is not None, "integer weights need antiquant_scale")
    require(len(scale) == 1 and (offset is None or len(offset) == 1), "a scale for each weight")
    chip.same_dtype("x and antiquant_scale", rows, scale[0])
    int4 = stack.dtype is torch.int32
    require(int4 or scale[0].dim() == 2, "int8 weights have one scale a column")
    w = unpack_int4(stack) if int4 else stack
    experts, k, n = w.shape
    groups = scale[0].shape[1] if scale[0].dim() == 3 else 1
    chip.shape("antiquant_scale", scale[0], *((experts, n) if scale[0].dim() == 2 else (experts, groups, n)))
    require(k % groups == 0, f"{groups} groups divide {k} rows")
    s = scale[0].view(experts, groups, n).repeat_interleave(k // groups, 1).float()
    o = 0 if offset is None else offset[0].view(experts, groups, n).repeat_interleave(k // groups, 1).float()
    return (w.float() + o) * s


@emulates("npu::npu_moe_token_unpermute")
def moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape):
    """out[t] = sum over j of probs[t, j] * permuted[sorted_indices[t k + j]]."""
    chip.runs_on("npu_moe_token_unpermute", *chip.A2_A3)
    chip.unused(padded_mode=padded_mode, restore_shape=restore_shape)
    chip.dtype("permuted_tokens", permuted_tokens, *chip.FLOATS)
    require(probs is not None, "a sum without weights is not emulated")
    chip.same_dtype("permuted_tokens and probs", permuted_tokens, probs)
    require(sorted_indices.dtype is torch.int32, f"sorted_indices is int32, got {sorted_indices.dtype}")
    chip.shape("sorted_indices", sorted_indices, probs.numel())
    chip.shape("permuted_tokens", permuted_tokens, probs.numel(), None)
    rows = permuted_tokens[sorted_indices.long()].view(*probs.shape, -1).float()
    return (rows * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)
