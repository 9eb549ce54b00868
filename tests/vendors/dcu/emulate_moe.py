"""Experts: lightop's alignment, its product over weights in Marlin's order, activation and sum.

Meaning: vLLM's operators of the same names, and HYGON-AI/vllm-plugin-das's lightop_w16a16.py, which packs the weights,
makes these calls, and compares them with plain products in its accuracy tests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.vendors.dcu import chip
from tests.vendors.emulator import Implementations, require

IMPLEMENTATIONS = emulates = Implementations()
MOST_TOKENS = 40
"""Here, and nowhere but here: how many tokens there are configurations for. A table says no beyond what it holds."""
BLOCK_PAIRS = 16


@emulates("lightop__moe::get_moe_cuda_marlin_config_w16a16")
def get_moe_cuda_marlin_config_w16a16(experts, m, n1, k1, n2, k2, topk, device_name, num_cus, dtype):
    """Configurations of both products, and whether there are any."""
    require(n1 == 2 * k2 and k1 == n2, f"n1 is twice k2 and k1 is n2, got {n1}, {k1}, {n2}, {k2}")
    require(bool(device_name) and num_cus > 0, f"a DCU, got {device_name!r} with {num_cus} units")
    config = {"BLOCK_SIZE_M": BLOCK_PAIRS, "MODE": 1}
    return config, dict(config), m <= MOST_TOKENS


@emulates("lightop__moe::moe_align_block_size_out")
def moe_align_block_size_out(
    topk_ids, num_experts, block_size, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map, expert_mask,
    num_local_tokens, is_ep, is_fuse_fill,
):  # fmt: skip
    """Pairs by expert, each expert's padded to whole blocks; the caller has filled all places with their number."""
    for name, value in (("expert_map", expert_map), ("expert_mask", expert_mask), ("num_local", num_local_tokens)):
        chip.absent(name, value)
    require(not is_ep and not is_fuse_fill, "is_ep and is_fuse_fill are not emulated")
    chip.dtype(chip.INT32, topk_ids=topk_ids, sorted_token_ids=sorted_token_ids, expert_ids=expert_ids)
    chip.dtype(chip.INT32, num_tokens_post_pad=num_tokens_post_pad)
    chip.contiguous(topk_ids=topk_ids)
    pairs, flat = topk_ids.numel(), topk_ids.flatten()
    require(bool((sorted_token_ids == pairs).all()), f"sorted_token_ids is filled with {pairs}")
    require(sorted_token_ids.numel() >= pairs + num_experts * (block_size - 1), "room for whole blocks of each expert")
    chip.shape("expert_ids", expert_ids, -(-sorted_token_ids.numel() // block_size))
    chip.shape("num_tokens_post_pad", num_tokens_post_pad, 1)
    require(bool(((flat >= 0) & (flat < num_experts)).all()), f"experts lie in [0, {num_experts})")
    at = 0
    for expert in range(num_experts):
        own = torch.nonzero(flat == expert).flatten()
        size = -(-len(own) // block_size) * block_size
        sorted_token_ids[at : at + len(own)] = own.int()
        expert_ids[at // block_size : (at + size) // block_size] = expert
        at += size
    num_tokens_post_pad.fill_(at)


ORDER = [
    ((lane // 16) * 4 + row) * 32 + (lane % 16) * 2 + column
    for lane in range(64)
    for column in range(2)
    for row in range(4)
]
"""Where the entries of a packed tile lie in the plain tile of 16 columns and 32 rows, column by column."""


def plain(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """`[K / 16, 16 N]` as `[K, N]`."""
    rows = packed.shape[1] // 16
    tiles = torch.empty(columns // 16, rows // 32, 512, dtype=packed.dtype)
    tiles[..., ORDER] = packed.view(columns // 16, rows // 32, 512)
    return tiles.view(columns // 16, rows // 32, 16, 32).transpose(1, 2).reshape(columns, rows)


@emulates("lightop__moe::moe_gemm_marlin_w16a16")
def moe_gemm_marlin_w16a16(
    input, b_qweight, output, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_pad, top_k, config
):
    """Row i of the pairs is input[i // top_k] times its expert's weight, times its own where there are any."""
    allowed = (torch.bfloat16, torch.float32) if chip.LIFTED else (torch.bfloat16,)
    require({input.dtype, b_qweight.dtype, output.dtype} <= set(allowed), f"bfloat16, got {input.dtype}")
    chip.contiguous(input=input, b_qweight=b_qweight, output=output)
    block, columns = config["BLOCK_SIZE_M"], input.shape[1]
    require(columns % 16 == 0 and b_qweight.shape[2] % 512 == 0, "columns in 16s, rows in 32s")
    chip.shape("b_qweight", b_qweight, None, columns // 16, None)
    chip.shape("output", output, input.shape[0] * top_k, b_qweight.shape[2] // 16)
    if topk_weights is not None:
        chip.dtype(torch.float32, topk_weights=topk_weights)
        require(topk_weights.numel() == output.shape[0], f"a weight a pair, got {topk_weights.numel()}")
    pairs = output.shape[0]
    for i, expert in enumerate(expert_ids[: int(num_tokens_post_pad) // block].tolist()):
        own = sorted_token_ids[i * block : (i + 1) * block].long()
        own = own[own < pairs]
        y = input[own // top_k].float() @ plain(b_qweight[expert], columns).float()
        y = y if topk_weights is None else y * topk_weights.flatten()[own, None]
        output[own] = y.to(output.dtype)


@emulates("lightop__moe::get_moe_cuda_marlin_config")
def get_moe_cuda_marlin_config(experts, m, n1, k1, n2, k2, topk, device_name, num_cus, compute_type):
    """As for 16 bits; the dtype is Triton's."""
    require(compute_type in ("bfloat16", "float16", "float32"), f"Triton's name of a dtype, got {compute_type!r}")
    return get_moe_cuda_marlin_config_w16a16(experts, m, n1, k1, n2, k2, topk, device_name, num_cus, None)


def plain_int8(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """`[K / 64, 64 N]` as `[K, N]`: 64 columns of a row lie together, row by row (get_w8a8_int8_marlin_weights)."""
    return packed.view(columns // 64, -1, 64).transpose(1, 2).reshape(columns, -1)


@emulates("lightop__moe::moe_gemm_marlin_w8a8")
def moe_gemm_marlin_w8a8(
    input, b_qweight, output, a_scale, b_scale, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_pad, top_k,
    config,
):  # fmt: skip
    """As for 16 bits, both sides in int8; the output is `[tokens, experts a token, N]`, as lmslim's caller gives it.
    Places that are not used hold the number of pairs, and each expert's pairs are in the order of tokens.
    """
    chip.dtype(torch.int8, input=input, b_qweight=b_qweight)
    chip.dtype(torch.float32, a_scale=a_scale, b_scale=b_scale)
    chip.half(output=output)
    chip.contiguous(input=input, b_qweight=b_qweight, output=output, a_scale=a_scale, b_scale=b_scale)
    chip.dtype(chip.INT32, sorted_token_ids=sorted_token_ids, expert_ids=expert_ids, used=num_tokens_post_pad)
    rows, columns = input.shape
    require(columns % 64 == 0, f"columns in 64s, got {columns}")
    chip.shape("b_qweight", b_qweight, None, columns // 64, None)
    experts, n = b_qweight.shape[0], b_qweight.shape[2] // 64
    chip.shape("a_scale", a_scale, rows, 1)
    chip.shape("b_scale", b_scale, experts, n, 1)
    chip.shape("output", output, None, None, n)
    pairs, block = output.shape[0] * output.shape[1], config["BLOCK_SIZE_M"]
    require(pairs == rows * top_k, f"{rows} rows for {top_k} experts each, and room for {pairs} pairs")
    if topk_weights is not None:
        chip.dtype(torch.float32, topk_weights=topk_weights)
        require(topk_weights.numel() == pairs, f"a weight a pair, got {topk_weights.numel()}")
    used, flat = int(num_tokens_post_pad), output.view(pairs, n)
    require(bool((sorted_token_ids >= 0).all() and (sorted_token_ids <= pairs).all()), f"places hold 0 to {pairs}")
    own_experts = expert_ids[: used // block].long()
    require(bool((own_experts.diff() >= 0).all()), "blocks in the order of experts")
    for expert in range(experts):
        own = sorted_token_ids[:used].view(-1, block)[own_experts == expert].flatten().long()
        own = own[own < pairs]
        require(bool((own.diff() > 0).all()), "an expert's pairs are in the order of tokens")
        sums = input[own // top_k].double() @ plain_int8(b_qweight[expert], columns).double()  # exact, as in int32
        y = sums.float() * a_scale[own // top_k] * b_scale[expert, :, 0]
        y = y if topk_weights is None else y * topk_weights.flatten()[own, None]
        flat[own] = y.to(output.dtype)


@emulates("lightop__activation::fuse_silu_and_mul")
def fuse_silu_and_mul(input, output):
    """output <- silu(first half) * second half; the input comes first here."""
    chip.half(input=input, output=output)
    chip.contiguous(input=input, output=output)
    chip.shape("output", output, input.shape[0], input.shape[1] // 2)
    a, b = input.float().chunk(2, -1)
    output.copy_((F.silu(a) * b).to(output.dtype))


@emulates("lightop__moe::moe_sum")
def moe_sum(input, output, bias, expert_mask, num_local_tokens, factor):
    """output <- factor times the sum over a token's experts."""
    for name, value in (("bias", bias), ("expert_mask", expert_mask), ("num_local_tokens", num_local_tokens)):
        chip.absent(name, value)
    chip.half(input=input, output=output)
    chip.shape("output", output, input.shape[0], input.shape[2])
    output.copy_((input.float().sum(1) * factor).to(output.dtype))
