"""Routing as DeepSeek-V3 does it: lightop's fused gate.

Source: HYGON-AI/vllm-plugin-das, ops/fuse_moe_gate.py and its routers: sigmoid scores, renormalized; the factor is
multiplied in where the last argument says so.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import Kernels, Packing, When
from inferplane_dcu import vendor
from inferplane_dcu.kernels.when import HALF, RANK_FUSED

KERNELS = Kernels()
FLOAT32 = Packing("float32", lambda w: w.float())
LARGEST_GROUP = 32
"""Experts a group: of SGLang's kernel of this name, from which lightop's is derived."""


def _gate(op: Any) -> bool:
    return op.score == "sigmoid" and op.renormalize and op.bias is not None and op.group_score == "top2"


def _group_dims(op: Any) -> bool:
    if op.bias is None:
        return False
    experts = op.bias.shape[0]
    return experts & (experts - 1) == 0 and experts % op.groups == 0 and experts // op.groups <= LARGEST_GROUP


@KERNELS(
    "moe_route",
    "lightop",
    rank=RANK_FUSED,
    when=When(
        (torch.float32, *HALF),
        features=(vendor.GATE.feature,),
        needs=(
            ("sigmoid scores with a bias, renormalized, groups judged by two experts", _gate),
            (f"a power of two of experts, at most {LARGEST_GROUP} a group", _group_dims),
        ),
    ),
    packs={"bias": FLOAT32},
    prepare=vendor.found_once(vendor.GATE),
    capture_safe=True,
)
def moe_route(p: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_fused_gate; ids are int32."""
    weights, ids = p.prepared(
        logits.float().contiguous(), p.bias, p.groups, p.top_groups, p.top_k, 0, p.factor, p.factor != 1.0
    )
    return weights, ids
