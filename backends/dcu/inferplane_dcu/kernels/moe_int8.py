"""Experts in int8 by int8: lightop's product over weights in Marlin's order of 64 columns.

Three orders of int8 weights are published for products of this name. This one is what vllm-plugin-das gives lightop 0.6
where experts are not spread by DeepEP, and what the shapes in lmslim's caller fit. Pairs are put in order here: the
plugin does not leave that to lightop either, whose own order is another than the product reads.

Source: HYGON-AI/vllm-plugin-das at 125b32fb, compressed_tensors_moe_marlin.py (get_w8a8_int8_marlin_weights) and
lightop_marlin_moe_compat.py; fuse_moe_int8_marlin.py of lmslim (the calls, their shapes and scales).
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.composed.moe import multiply_experts
from inferplane.kernels.fused.needs import ALL_EXPERTS_LOCAL, INT8_ACTIVATIONS
from inferplane.plugin import Kernels, Packing, QTensor
from inferplane_dcu import vendor
from inferplane_dcu.kernels.when import declare

KERNELS = Kernels()
COLUMNS = 64
"""Columns of a weight that lie together, row by row."""


class Int8Marlin:
    """Experts' int8 rows in Marlin's order, `data` `[E, K / 64, 64 N]`, and `scale` `[E, N, 1]`.

    Args:
        weight: a stack `[E, N, K]` without zero points, which no checkpoint of 8 bits has.
    """

    def __init__(self, weight: QTensor) -> None:
        self.shape = weight.data.shape
        experts, rows, columns = self.shape
        tiles = weight.data.view(experts, rows, columns // COLUMNS, COLUMNS)
        self.data = tiles.transpose(1, 2).reshape(experts, columns // COLUMNS, rows * COLUMNS)
        self.scale = weight.scale.contiguous()

    def dequantize(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """An expert's plain rows `[N, K]`."""
        _, rows, columns = self.shape
        plain = self.data[expert].view(columns // COLUMNS, rows, COLUMNS).transpose(0, 1).reshape(rows, columns)
        return (plain.float() * self.scale[expert]).to(dtype)


class _PlainExperts:
    """A stack of which an index gives an expert's rows, dequantized when it is read."""

    def __init__(self, stack: Int8Marlin, dtype: torch.dtype) -> None:
        self.stack, self.dtype, self.shape = stack, dtype, stack.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.stack.dequantize(expert, self.dtype)


INT8_MARLIN = Packing("lightop.marlin_w8a8", Int8Marlin)


class Int8ExpertCalls:
    """What a layer of experts holds on to: the functions, and the configurations that lightop has for a step's size."""

    def __init__(self) -> None:
        self.config, self.quantize, self.product, self.act, self.sum = (f.find() for f in vendor.INT8_EXPERTS)
        self.device = vendor.table_device()
        self._known: dict[tuple[int, int], tuple[dict[str, int], dict[str, int]] | None] = {}

    def configurations(self, view: Any, x: torch.Tensor, k: int) -> tuple[dict[str, int], dict[str, int]] | None:
        """Of both products for as many tokens; None where lightop has none."""
        key = x.shape[0], k
        if key not in self._known:
            experts, both, width = view.gate_up.shape
            first, second, status = self.config(
                experts, x.shape[0], both, width, width, both // 2, k, *self.device, vendor.triton_dtype(x.dtype)
            )
            self._known[key] = (first, second) if first and second and status else None
        return self._known[key]


def _has_whole_tiles(op: Any) -> bool:
    _, both, width = op.gate_up.shape
    return (both // 2) % COLUMNS == 0 and width % COLUMNS == 0


@declare(
    KERNELS,
    "moe_experts",
    *vendor.INT8_EXPERTS,
    provider="lightop",
    dtypes=(torch.bfloat16,),
    features=("int8-dot",),
    formats=("int8_row",),
    needs=(ALL_EXPERTS_LOCAL, (f"widths in {COLUMNS}s, inside too", _has_whole_tiles)),
    packs={"gate_up": INT8_MARLIN, "down": INT8_MARLIN},
    prepare=lambda op, ctx: Int8ExpertCalls(),
    **INT8_ACTIVATIONS,
)
def moe_experts_w8a8(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Both sides of both products in int8, where lightop has a configuration for as many tokens; else expert by expert,
    with torch's products on one expert's dequantized rows at a time (which cannot be recorded).
    """
    calls: Int8ExpertCalls = view.prepared
    tokens, k = ids.shape
    found = calls.configurations(view, x, k)
    if found is None:
        gate_up, down = (_PlainExperts(stack, x.dtype) for stack in (view.gate_up, view.down))
        return multiply_experts(gate_up, down, x, weights, ids.long())
    first, second = found
    experts, both, width = view.gate_up.shape
    aligned = align_pairs(ids, experts, first["BLOCK_SIZE_M"])
    h, act, y = (x.new_empty(s) for s in ((tokens, k, both), (tokens * k, both // 2), (tokens, k, width)))
    rows, scales = calls.quantize(x.contiguous())
    calls.product(rows, view.gate_up.data, h, scales, view.gate_up.scale, None, *aligned, k, first)
    calls.act(h.view(-1, both), act)
    rows, scales = calls.quantize(act)
    calls.product(rows, view.down.data, y, scales, view.down.scale, weights.float().contiguous(), *aligned, 1, second)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    calls.sum(input=y, output=out, bias=None, expert_mask=None, num_local_tokens=None, factor=1.0)
    return out


def align_pairs(ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put pairs of token and expert in order of experts, each expert's in whole blocks, in the order of tokens.

    Args:
        ids: the experts of each token, `[T, k]`.
        experts: number of experts.
        block: pairs per block.

    Returns:
        All int32: numbers of pairs `[blocks * block]`, with `T k` in places that stay empty; each block's expert
        `[blocks]`; how many places are used, `[1]`. Nothing waits for the device.
    """
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.long, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    boundaries = (torch.div(counts + block - 1, block, rounding_mode="floor") * block).cumsum(0)
    owners = flat[order]
    behind = torch.arange(flat.numel(), device=ids.device) - (counts.cumsum(0) - counts)[owners]
    first = torch.cat((boundaries.new_zeros(1), boundaries[:-1]))
    blocks = -(-(flat.numel() + experts * (block - 1)) // block)
    pairs = torch.full((blocks * block,), flat.numel(), dtype=torch.int32, device=ids.device)
    pairs[first[owners] + behind] = order.int()
    starts = torch.arange(blocks, device=ids.device) * block
    of_block = torch.searchsorted(boundaries, starts, right=True).clamp_max(experts - 1)
    return pairs, of_block.int(), boundaries[-1:].int()
