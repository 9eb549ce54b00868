"""Which of the vendor's operators are there: libraries are imported here, once the card is open, and names looked up.

Names come and go between releases of kunlun_ops, so that a library without one of those that the kernels call is not
used at all, and says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from inferplane.plugin import Feature, is_installed

KUNLUN_OPS = (
    "rmsnorm", "add_rmsnorm", "rotary_embedding", "swiglu", "reshape_and_cache_flash", "speculative_attention",
    "prefill_attention", "concat_and_cache_mla", "paged_attention", "moe_softmax_topk_norm", "moe_softmax_topk",
    "moe_sigmoid_group_topk_norm", "gen_block_statistic", "moe_pre_sorted", "moe_fc", "moe_post", "quant2d", "matmul",
    "awq_gemm", "awq_dequantize",
)  # fmt: skip
"""Functions of kunlun_ops 0.1.58."""
GROUP_TOPK = "moe_group_topk"
"""A later release's."""
XSPEEDGATE_OPS = ("moe_pre_small",)
"""Operators that importing xspeedgate_ops registers."""
COMPANION = "cocopod"
"""What the vendor's code imports before kunlun_ops."""


def assume_features() -> dict[str, Feature]:
    """Features of libraries that are taken to be installed."""
    words = "assumed: the vendor's {} is installed"
    names = {"kunlun-ops": "kunlun_ops", "xspeedgate-ops": "xspeedgate_ops", "group-topk": "kunlun_ops"}
    return {feature: Feature(True, words.format(library)) for feature, library in names.items()}


def find_features() -> dict[str, Feature]:
    """Features of this machine's libraries; imports them."""
    if is_installed(COMPANION):
        _import(COMPANION)
    ops = _import("kunlun_ops") or _has("kunlun_ops", import_module("kunlun_ops"), KUNLUN_OPS)
    newer = ops if not ops.present else _has("kunlun_ops", import_module("kunlun_ops"), (GROUP_TOPK,))
    speedgate = _import("xspeedgate_ops") or _has("xspeedgate_ops", torch.ops.xspeedgate_ops, XSPEEDGATE_OPS)
    return {"kunlun-ops": ops, "xspeedgate-ops": speedgate, "group-topk": newer}


def _import(module: str) -> Feature | None:
    """Import a library. None when that worked, else what is wrong."""
    if not is_installed(module):
        return Feature(False, f"{module} is not installed; it comes from the vendor")
    try:
        import_module(module)
    except Exception as error:  # closed libraries fail in their own ways
        return Feature(False, f"{module} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}")
    return None


def _has(library: str, holder: object, names: Sequence[str]) -> Feature:
    missing = [name for name in names if not hasattr(holder, name)]
    if missing:
        return Feature(False, f"{library} here has no {', '.join(missing)}")
    return Feature(True, f"{library} is imported")
