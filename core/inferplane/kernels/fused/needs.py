"""Where vendors' operators rank, and what several of them ask of an op, in words and as predicates."""

from __future__ import annotations

from typing import Any

import torch

RANK_FUSED = 70
"""A fused operator of a vendor's: below the band of kernels that somebody has measured, because we have not."""

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)


def is_plain_linear(linear: Any) -> bool:
    """Whether a `Linear` leaves activations as they are and gives its result in the plan's dtype."""
    return linear.act is None and linear.out_dtype is None


def _int8_tokens(op: Any) -> bool:
    return op.act is not None and op.act.format == "int8" and op.act.group == 0 and op.out_dtype is None


def _flash_expanded(op: Any) -> bool:
    width = op.dims.nope + op.dims.rope
    return op.dims.value <= width <= 256 and width % 8 == 0


def _flash_dims(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim and op.kv.dim % 8 == 0 and op.kv.dim <= 256


NORM_WEIGHT = ("a weight in the plan's dtype", lambda op: op.weight.dtype is None)
"""Of `rms_norm`."""
ADD_NORM_WEIGHT = (NORM_WEIGHT[0], lambda op: op.norm.weight.dtype is None)
"""Of `add_rms_norm`."""

PLAIN_ACTIVATIONS = ("activations and result in the plan's dtype", is_plain_linear)
"""Of `linear`, whose weight alone is quantized."""
INT8_PER_TOKEN_LINEAR = ("activations in int8, a scale a token", _int8_tokens)
"""Of `linear`."""
INT8_PER_TOKEN_QUANTIZE = ("int8 with a scale a token", lambda op: op.format == "int8" and op.group == 0)
"""Of `quantize`."""

FLASH_HEAD_SIZES = ("K and V of one width, in eights up to 256", _flash_dims)
"""Of `attention`: what flash attention 2 and what is derived from it know."""
FLASH_MLA_HEAD_SIZES = ("heads of at most 256 entries, in eights, and no wider values", _flash_expanded)
"""Of `mla_expanded`, for the same functions, with values padded to the keys' width."""
PLAIN_KV_B = ("a plain kv_b without bias", lambda op: is_plain_linear(op.kv_b) and op.kv_b.bias is None)
"""Of `mla_expanded`."""

PLAIN_SOFTMAX_ROUTING = (
    "softmax scores without bias or groups",
    lambda op: op.score == "softmax" and op.bias is None and op.groups == 1,
)
"""Of `moe_route`."""
ALL_EXPERTS_LOCAL = ("every expert on this rank", lambda op: not op.partial)
"""Of `moe_experts`."""
