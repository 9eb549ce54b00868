"""Mixture of experts: lightop's gate for DeepSeek-V3's routing, and its products over experts in Marlin's order.

Source: HYGON-AI/vllm-plugin-das, its routers (sigmoid scores, renormalized; the factor is multiplied in where the last
argument says so) and lightop_w16a16.py (the order of weights, the calls, bfloat16 only).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.composed.moe import multiply_experts
from inferplane.kernels.fused.needs import ALL_EXPERTS_LOCAL, FLOATS
from inferplane.kernels.fused.packings import FLOAT32
from inferplane.plugin import Kernels, Packing
from inferplane_dcu import vendor
from inferplane_dcu.kernels.when import declare

KERNELS = Kernels()
fused = partial(declare, KERNELS, provider="lightop")
LARGEST_GROUP = 32
"""Experts a group: of SGLang's kernel of this name, from which lightop's is derived."""
TILE = (16, 32)
"""Columns and rows of a weight that lie together."""


def _gate(op: Any) -> bool:
    return op.score == "sigmoid" and op.renormalize and op.bias is not None and op.group_score == "top2"


def _has_group_dims(op: Any) -> bool:
    if op.bias is None:
        return False
    experts = op.bias.shape[0]
    return experts & (experts - 1) == 0 and experts % op.groups == 0 and experts // op.groups <= LARGEST_GROUP


@fused(
    "moe_route",
    vendor.GATE,
    dtypes=FLOATS,
    needs=(
        ("sigmoid scores with a bias, renormalized, groups judged by two experts", _gate),
        (f"a power of two of experts, at most {LARGEST_GROUP} a group", _has_group_dims),
    ),
    packs={"bias": FLOAT32},
)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_fused_gate; ids are int32."""
    weights, ids = view.prepared(
        logits.float().contiguous(),
        view.bias,
        view.groups,
        view.top_groups,
        view.top_k,
        0,
        view.factor,
        view.factor != 1.0,
    )
    return weights, ids


class Marlin:
    """Experts' weights in Marlin's order, `data` `[E, K / 16, 16 N]`: by tiles of 16 columns and 32 rows, in each the
    eight entries of a lane side by side, two rows of four columns. An index gives an expert's plain `[N, K]`.

    Args:
        weight: `[E, N, K]`.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = weight.shape
        experts, rows, columns = weight.shape
        self.data = weight.new_empty(experts, columns // TILE[0], rows * TILE[0])
        for packed, plain in zip(self.data, weight):
            lanes = plain.t().reshape(columns // TILE[0], 4, 4, rows // TILE[1], 16, 2)
            packed.copy_(lanes.permute(0, 3, 1, 4, 5, 2).reshape(packed.shape))

    def __getitem__(self, expert: int) -> torch.Tensor:
        _, rows, columns = self.shape
        lanes = self.data[expert].view(columns // TILE[0], rows // TILE[1], 4, 16, 2, 4)
        return lanes.permute(0, 2, 5, 1, 3, 4).reshape(columns, rows).t()


MARLIN = Packing("lightop.marlin_w16a16", Marlin)


class LightopExperts:
    """What a layer of experts holds on to: the functions, and the configurations that lightop has for a step's size."""

    def __init__(self) -> None:
        self.config, self.align, self.product, self.act, self.sum = (f.find() for f in vendor.EXPERTS)
        self.device = vendor.device()
        self._known: dict[tuple[int, int], tuple[dict[str, int], dict[str, int]] | None] = {}

    def configurations(self, view: Any, x: torch.Tensor, k: int) -> tuple[dict[str, int], dict[str, int]] | None:
        """Of both products for as many tokens; None where lightop has none."""
        key = x.shape[0], k
        if key not in self._known:
            experts, both, width = view.gate_up.shape
            first, second, status = self.config(
                experts, x.shape[0], both, width, width, both // 2, k, *self.device, x.dtype
            )
            self._known[key] = (first, second) if status else None
        return self._known[key]


def _has_tiled_sizes(op: Any) -> bool:
    _, both, width = op.gate_up.shape
    return both % TILE[1] == 0 and width % TILE[1] == 0


@fused(
    "moe_experts",
    *vendor.EXPERTS,
    dtypes=(torch.bfloat16,),
    needs=(ALL_EXPERTS_LOCAL, ("widths in 32s, and in 16s inside", _has_tiled_sizes)),
    packs={"gate_up": MARLIN, "down": MARLIN},
    prepare=lambda op, ctx: LightopExperts(),
)
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Five calls where lightop has a configuration for as many tokens; else expert by expert, with torch's products on
    weights that are put back into rows one expert at a time (which cannot be recorded).
    """
    calls: LightopExperts = view.prepared
    tokens, k = ids.shape
    found = calls.configurations(view, x, k)
    if found is None:
        return multiply_experts(view.gate_up, view.down, x, weights, ids.long())
    first, second = found
    experts, both, width = view.gate_up.shape
    aligned = _align_pairs(calls, ids.int().contiguous(), experts, first["BLOCK_SIZE_M"])
    h, act, y = (x.new_empty(tokens * k, n) for n in (both, both // 2, width))
    calls.product(x.contiguous(), view.gate_up.data, h, None, *aligned, k, first)
    calls.act(h, act)
    calls.product(act, view.down.data, y, weights.float().contiguous(), *aligned, 1, second)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    calls.sum(
        input=y.view(tokens, k, width), output=out, bias=None, expert_mask=None, num_local_tokens=None, factor=1.0
    )
    return out


def _align_pairs(
    calls: LightopExperts, ids: torch.Tensor, experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs by expert in whole blocks, each block's expert, and how many entries are used; all int32."""
    blocks = -(-(ids.numel() + experts * (block - 1)) // block)
    pairs = ids.new_full((blocks * block,), ids.numel())
    owners, used = ids.new_empty(blocks), ids.new_empty(1)
    calls.align(ids, experts, block, pairs, owners, used, None, None, None, is_ep=False, is_fuse_fill=False)
    return pairs, owners, used
