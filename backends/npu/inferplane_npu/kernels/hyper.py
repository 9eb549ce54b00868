"""Hyper-connections by the vendor's operators, which are for the 950 and for 4, 6 or 8 streams.

The page of npu_mhc_post multiplies the streams by the mixing matrix from the left; the vendor's test of it on the 950
(test_npu_mhc_post.py) sums over the matrix's first index, as the op does, and is what is followed here.

The op `sinkhorn` alone does not say how many streams there are, so npu_mhc_sinkhorn is called within `hyper_pre`.

Source: pages of npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post in Ascend/op-plugin at 517f2e7d, and its tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import declare_fused
from inferplane.plugin import Kernels, Packing
from inferplane_npu.kernels.when import OnNpu

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(
    declare_fused,
    KERNELS,
    provider="torch_npu",
    features=("hyper-connections",),
    when=partial(OnNpu, extensions=("hyper_collapse", "sinkhorn")),
)

STREAMS = (4, 6, 8)
WIDEST = 16384
ZEROS_BELOW = Packing("torch_npu.zeros_below", lambda w: torch.cat((w, torch.zeros_like(w))))
"""Of a head's weights, whose streams nothing is added to: the operator computes factors for that too."""


def _has_known_sizes(streams: int, width: int) -> bool:
    return streams in STREAMS and width % 16 == 0 and width <= WIDEST


def _has_known_streams(op: Any) -> bool:
    """Of an op with `fn`, `[rows, streams * width]`."""
    return _has_known_sizes(op.streams, op.fn.shape[1] // op.streams)


SIZES = ("4, 6 or 8 streams, whose widths are multiples of 16 up to 16384", _has_known_streams)


@fused("hyper_collapse", SIZES)
def hyper_collapse(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_mhc_pre, without a factor of the norm."""
    y, post, logits, *_ = npu.npu_mhc_pre(x, view.fn, view.scale, view.base, norm_eps=view.norm_eps, hc_eps=view.eps)
    return y, post, logits


@fused(
    "hyper_pre",
    (SIZES[0], lambda op: _has_known_streams(op.collapse)),
    ("1 to 100 iterations", lambda op: 1 <= op.sinkhorn.iterations <= 100),
)
def hyper_pre(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_mhc_pre, then npu_mhc_sinkhorn."""
    y, post, logits = hyper_collapse(view.collapse, x)
    return y, post, npu.npu_mhc_sinkhorn(logits, eps=view.sinkhorn.eps, num_iters=view.sinkhorn.iterations)[0]


@fused("hyper_post", ("4, 6 or 8 streams", lambda op: op.streams in STREAMS))
def hyper_post(view: Any, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """npu_mhc_post."""
    return npu.npu_mhc_post(x, mix, y, post)


@fused("hyper_head", SIZES, packs=dict.fromkeys(("fn", "scale", "base"), ZEROS_BELOW))
def hyper_head(view: Any, x: torch.Tensor) -> torch.Tensor:
    """npu_mhc_pre in the form without a mixing matrix."""
    return npu.npu_mhc_pre(x, view.fn, view.scale, view.base, norm_eps=view.norm_eps, hc_eps=view.eps)[0]
