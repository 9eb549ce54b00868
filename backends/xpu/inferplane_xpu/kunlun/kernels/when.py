"""Where the vendor's kernels rank, and what they share."""

from __future__ import annotations

import torch

from inferplane.plugin import Packing

RANK_FUSED = 70
"""A fused operator of the vendor's: below the band of kernels that somebody has measured, because we have not."""
RANK_IN_PARTS = 11
"""torch's own operator, called so that it is right on this card."""

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)

KUNLUN, SPEEDGATE, GROUP_TOPK = ("kunlun-ops",), ("xspeedgate-ops",), ("group-topk",)
"""Features: functions of kunlun_ops, operators of xspeedgate_ops, and a function that came with a later kunlun_ops."""

FLOAT32 = Packing("float32", lambda w: w.float())
"""Norms' weights and experts' biases: the vendor's operators take them in float32, whatever the activations are in."""
