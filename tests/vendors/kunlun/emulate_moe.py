"""Routing and experts.

Meaning: the calls in baidu/vLLM-Kunlun at 09869ee7 (ops/_kunlun_ops.py, fused_moe), and what its tests found on a P800
(ops/moe/router.py, tests/ut/ops/test_route_matrix.py and test_fused_moe.py at f926eebd). Rows stay in the order of
experts through moe_fc; `moe_index` follows from how moe_post reads it: the place of each pair in that order.
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.kunlun import chip

IMPLEMENTATIONS = emulates = Implementations()
FEW_PAIRS, MOST_EXPERTS = 768, 512


def _check_routing(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[int, int]:
    chip.dtype(torch.float32, weights=weights)
    chip.dtype(chip.INT32, ids=ids)
    chip.contiguous(x=x, weights=weights, ids=ids)
    require(x.dim() == 2 and x.shape[0] > 0, f"scores are [T, E] of some tokens, got {list(x.shape)}")
    require(x.shape[1] <= MOST_EXPERTS, f"at most {MOST_EXPERTS} experts, got {x.shape[1]}")
    chip.shape("weights", weights, x.shape[0], None)
    chip.shape("ids", ids, *weights.shape)
    return x.shape[1], weights.shape[1]


def _count(ids: torch.Tensor, statistic: torch.Tensor) -> None:
    """Tokens an expert, by cluster; which token goes to which cluster is not documented, the sums are."""
    experts = statistic.shape[1]
    chip.dtype(chip.INT32, block_statistic=statistic)
    chip.shape("block_statistic", statistic, chip.CLUSTERS, None)
    statistic.zero_()
    statistic[0] = torch.bincount(ids.flatten().long(), minlength=experts).int()


def _choose_in_groups(choice: torch.Tensor, groups: int, chosen: int, best: int, k: int) -> torch.Tensor:
    rows, experts = choice.shape
    require(experts % groups == 0 and 1 <= chosen <= groups, f"{chosen} of {groups} groups of {experts} experts")
    by_group = choice.view(rows, groups, -1)
    rank = by_group.topk(best, -1)[0].sum(-1)
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, rank.topk(chosen, -1)[1], True)
    return by_group.masked_fill(~keep[..., None], -torch.inf).flatten(1).topk(k, -1)[1]


@emulates("kunlun_ops::moe_softmax_topk_norm")
def moe_softmax_topk_norm(x, normed_score, topk_index, block_statistic, stable):
    """Softmax, the k largest, divided by their sum."""
    chip.absent("block_statistic", block_statistic)
    _, k = _check_routing(x, normed_score, topk_index)
    weights, ids = x.float().softmax(-1).topk(k, -1)
    normed_score.copy_(weights / weights.sum(-1, keepdim=True))
    topk_index.copy_(ids)


@emulates("kunlun_ops::moe_softmax_topk")
def moe_softmax_topk(x, normed_score, topk_index, block_statistic):
    """Softmax, the k largest as they are."""
    chip.absent("block_statistic", block_statistic)
    _, k = _check_routing(x, normed_score, topk_index)
    weights, ids = x.float().softmax(-1).topk(k, -1)
    normed_score.copy_(weights)
    topk_index.copy_(ids)


@emulates("kunlun_ops::moe_sigmoid_group_topk_norm")
def moe_sigmoid_group_topk_norm(x, norm_score, topk_index, block_static, bias, n_group, topk_group, scale):
    """Sigmoid; the bias chooses only; groups count by their best two; renormalized, then scaled."""
    experts, k = _check_routing(x, norm_score, topk_index)
    chip.dtype(torch.float32, bias=bias)
    chip.shape("bias", bias, experts)
    scores = x.float().sigmoid()
    ids = _choose_in_groups(scores + bias, n_group, topk_group, 2, k)
    weights = scores.gather(1, ids)
    norm_score.copy_(weights / weights.sum(-1, keepdim=True) * scale)
    topk_index.copy_(ids)
    _count(topk_index, block_static)


@emulates("kunlun_ops::moe_group_topk")
def moe_group_topk(scores, n_group, topk_group, topk_weights, topk_ids, block_statistic):
    """By scores that are given; groups count by their best; weights are the scores."""
    _, k = _check_routing(scores, topk_weights, topk_ids)
    chip.dtype(torch.float32, scores=scores)
    ids = _choose_in_groups(scores, n_group, topk_group, 1, k)
    topk_weights.copy_(scores.gather(1, ids))
    topk_ids.copy_(ids)
    _count(topk_ids, block_statistic)


@emulates("kunlun_ops::gen_block_statistic")
def gen_block_statistic(topk_ids, block_statistic):
    """Counts tokens an expert."""
    chip.dtype(chip.INT32, topk_ids=topk_ids)
    chip.contiguous(topk_ids=topk_ids)
    _count(topk_ids, block_statistic)


def _by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs in the order of experts, the place of each pair in it, and where each expert starts."""
    chip.dtype(chip.INT32, topk_ids=ids)
    chip.contiguous(topk_ids=ids)
    require(bool(((ids >= 0) & (ids < experts)).all()), f"experts lie in [0, {experts})")
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.bincount(flat, minlength=experts).cumsum(0)))
    return order, order.argsort().int(), starts.int()


@emulates("xspeedgate_ops::moe_pre_small")
def moe_pre_small(topk_ids, global_num_experts, index_have_neg, sort_mode, x):
    """(place of each pair, where experts start, rows in the order of experts), for few pairs."""
    require(not index_have_neg and sort_mode, "ids that are all there, in the order of experts")
    require(topk_ids.numel() <= FEW_PAIRS, f"at most {FEW_PAIRS} pairs, got {topk_ids.numel()}")
    chip.half(x=x)
    chip.contiguous(x=x)
    order, places, starts = _by_expert(topk_ids, global_num_experts)
    return places, starts, x[order // topk_ids.shape[1]]


@emulates("kunlun_ops::moe_pre_sorted")
def moe_pre_sorted(
    x, topk_index, block_statistic, moe_expand, moe_index, expert_m, sorted_tokens_num_lod
):  # fmt: skip
    """The same for any number of pairs, with the counts that gen_block_statistic made."""
    experts = expert_m.shape[0]
    chip.half(x=x, moe_expand=moe_expand)
    chip.contiguous(x=x, moe_expand=moe_expand)
    chip.dtype(
        chip.INT32, block_statistic=block_statistic, moe_index=moe_index, expert_m=expert_m,
        sorted_tokens_num_lod=sorted_tokens_num_lod,
    )  # fmt: skip
    order, places, starts = _by_expert(topk_index, experts)
    chip.shape("block_statistic", block_statistic, chip.CLUSTERS, experts)
    require(torch.equal(block_statistic.sum(0), starts.diff().long()), "block_statistic counts these ids")
    chip.shape("moe_expand", moe_expand, topk_index.numel(), x.shape[1])
    chip.shape("moe_index", moe_index, topk_index.numel())
    chip.shape("sorted_tokens_num_lod", sorted_tokens_num_lod, experts + 1)
    moe_expand.copy_(x[order // topk_index.shape[1]])
    moe_index.copy_(places)
    expert_m.copy_(starts.diff())
    sorted_tokens_num_lod.copy_(starts)


@emulates("kunlun_ops::moe_fc")
def moe_fc(
    x, weight, sorted_tokens_num_lod, sorted_tokens_idx, moe_topk, y, act, x_perchannel_max, w_perchannel_max, topk_ids,
    topk_w, bias, tgemm_type, tweight_type, scale_n, scale_k, use_pack_int4, sort_mode,
):  # fmt: skip
    """y <- x weight[e]^T, each expert's rows by its own weight `[E, N, K]`; of int8 on both sides, times the maxima of
    rows on both sides, divided by 127 twice.
    """
    for name, value in (("topk_ids", topk_ids), ("topk_w", topk_w), ("bias", bias)):
        chip.absent(name, value)
    others = (act, tgemm_type, tweight_type, scale_n, scale_k, use_pack_int4)
    require(others == (None, None, None, 0, 0, False) and sort_mode, f"plain products are emulated, got {others}")
    int8 = x_perchannel_max is not None
    chip.half(y=y)
    if int8:
        chip.dtype(torch.int8, x=x, weight=weight)
        chip.dtype(torch.float32, x_perchannel_max=x_perchannel_max, w_perchannel_max=w_perchannel_max)
        chip.contiguous(x_perchannel_max=x_perchannel_max, w_perchannel_max=w_perchannel_max)
        chip.shape("x_perchannel_max", x_perchannel_max, x.shape[0], 1)
        chip.shape("w_perchannel_max", w_perchannel_max, *weight.shape[:2])
    else:
        chip.absent("w_perchannel_max", w_perchannel_max)
        chip.half(x=x, weight=weight)
    chip.contiguous(x=x, weight=weight, y=y)
    chip.dtype(chip.INT32, sorted_tokens_num_lod=sorted_tokens_num_lod, sorted_tokens_idx=sorted_tokens_idx)
    experts, columns, width = weight.shape
    pairs = sorted_tokens_idx.numel()
    chip.shape("x", x, pairs, width)
    chip.shape("y", y, pairs // moe_topk, moe_topk, columns)
    chip.shape("sorted_tokens_num_lod", sorted_tokens_num_lod, experts + 1)
    starts = sorted_tokens_num_lod.tolist()
    require(starts[0] == 0 and starts[-1] == pairs, f"experts' rows are {pairs} in all, got {starts}")
    out = y.view(pairs, columns)
    for e in range(experts):
        rows = slice(starts[e], starts[e + 1])
        product = (x[rows].double() @ weight[e].double().t()).float()
        if int8:
            product *= (x_perchannel_max[rows] / 127) * (w_perchannel_max[e] / 127)
        out[rows] = product.to(y.dtype)


@emulates("kunlun_ops::moe_post")
def moe_post(x, moe_index, normed_scale, dequant_scale, y):
    """y[t] <- sum over j of x[moe_index[t, j]] times both scales."""
    chip.half(x=x, y=y)
    chip.contiguous(x=x, y=y, moe_index=moe_index)
    chip.dtype(torch.float32, normed_scale=normed_scale, dequant_scale=dequant_scale)
    chip.dtype(chip.INT32, moe_index=moe_index)
    chip.shape("moe_index", moe_index, y.shape[0], None)
    chip.shape("normed_scale", normed_scale, *moe_index.shape)
    chip.shape("dequant_scale", dequant_scale, *moe_index.shape)
    chip.shape("x", x, *moe_index.shape, y.shape[1])
    rows = x.flatten(0, 1)[moe_index.flatten().long()].view_as(x).float()
    y.copy_((rows * (normed_scale * dequant_scale)[..., None]).sum(1))
