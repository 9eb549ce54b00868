"""How kernels that call vendors' operators are declared: their rank, and conditions that several of them set.

A condition is an entry of `When.needs`, a sentence and a predicate: explain shows the sentence where the predicate on
the op is False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.plugin import PLAIN, RANK_FUSED, Kernels, When
from inferplane.renamed import old_names_of_module

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)


def declare_fused(
    kernels: Kernels,
    op: str,
    *needs: tuple[str, Callable[[Any], bool]],
    provider: str,
    dtypes: tuple[torch.dtype, ...] = HALF,
    formats: tuple[str, ...] = (PLAIN,),
    kv_layouts: tuple[str, ...] = (),
    features: tuple[str, ...] = (),
    when: Callable[..., When] = When,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that declares a function as a kernel; a module binds what its kernels share with `functools.partial`.

    Args:
        kernels: the list that it joins.
        op: the op's name.
        needs, dtypes, formats, kv_layouts, features: fields of `When`.
        provider: the kernel's provider.
        when: makes its conditions: a class, or one with further fields bound by `functools.partial`.
        options: other fields of `Kernel`; unless they say otherwise, it has `RANK_FUSED` and is capture safe.
    """
    conditions = when(dtypes, formats, kv_layouts, features=features, needs=needs)
    return kernels(op, provider, when=conditions, **{"rank": RANK_FUSED, "capture_safe": True, **options})


def is_plain_linear(linear: Any) -> bool:
    """Whether a `Linear` takes unquantized activations and gives its result in the plan's dtype."""
    return linear.activation_quant is None and linear.out_dtype is None


def takes_activations_in(op: Any, format: str, group: int = 0) -> bool:
    """Whether a kernel of `linear` that quantizes activations can compute the op: it quantizes them itself to this
    format with this group, or passes them unquantized, and its checkpoint brings no static scale.

    Whether the kernel *may* quantize them is the matter of `Kernel.extra_error`.
    """
    own, requested = op.activation_quant, op.weight.activation_quant
    static = requested is not None and requested.static
    fits = not static if own is None else own.format == format and own.group == group
    return op.out_dtype is None and fits


def _takes_int8_activations(op: Any) -> bool:
    return takes_activations_in(op, "int8")


def _has_flash_mla_head_size(op: Any) -> bool:
    """Whether flash attention takes the keys of an `mla_expanded` op, with its values padded to the keys' width."""
    width = op.dims.nope + op.dims.rope
    return op.dims.value <= width <= 256 and width % 8 == 0


def _has_flash_head_size(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim and op.kv.dim % 8 == 0 and op.kv.dim <= 256


NORM_WEIGHT = ("a weight in the plan's dtype", lambda op: op.weight.dtype is None)
"""Of `rms_norm` kernels."""
ADD_NORM_WEIGHT = (NORM_WEIGHT[0], lambda op: op.norm.weight.dtype is None)
"""Of `add_rms_norm` kernels."""

PLAIN_ACTIVATIONS = ("activations and result in the plan's dtype", is_plain_linear)
"""Of `linear` kernels that quantize only the weight."""
INT8_PER_TOKEN_LINEAR = ("activations in int8 with a scale per token, or unquantized", _takes_int8_activations)
"""Of `linear` kernels, beside `INT8_ACTIVATIONS`."""
INT8_ACTIVATIONS: dict[str, Any] = {"extra_error": 0.03, "quantizes_activations_to": "int8"}
"""Options of kernels that quantize activations: each number may be off by 1/254 of its row's largest."""
FP8_ACTIVATIONS: dict[str, Any] = {"extra_error": 0.06, "quantizes_activations_to": "fp8"}
"""As `INT8_ACTIVATIONS`: each number may be off by 1/16."""
INT8_PER_TOKEN_QUANTIZE = ("int8 with a scale per token", lambda op: op.format == "int8" and op.group == 0)
"""Of `quantize` kernels."""

FLASH_HEAD_SIZES = ("K and V of one width, a multiple of 8 up to 256", _has_flash_head_size)
"""Of `attention` kernels by flash attention 2 and libraries derived from it."""
FLASH_MLA_HEAD_SIZES = ("heads of at most 256 entries, a multiple of 8, and no wider values", _has_flash_mla_head_size)
"""Of `mla_expanded` kernels by the same libraries, with values padded to the keys' width."""
PLAIN_KV_B = ("a plain kv_b without bias", lambda op: is_plain_linear(op.kv_b) and op.kv_b.bias is None)
"""Of `mla_expanded` kernels."""

PLAIN_SOFTMAX_ROUTING = (
    "softmax scores without bias or groups",
    lambda op: op.score == "softmax" and op.bias is None and op.groups == 1,
)
"""Of `moe_route` kernels."""
ALL_EXPERTS_LOCAL = ("every expert on this rank", lambda op: not op.partial)
"""Of `moe_experts` kernels."""

__getattr__ = old_names_of_module(
    __name__,
    {
        "plain_linear": "is_plain_linear",
        "WEIGHT_ONLY": "PLAIN_ACTIVATIONS",
        "INT8_TOKENS": "INT8_PER_TOKEN_LINEAR",
        "INT8_BY_TOKEN": "INT8_PER_TOKEN_QUANTIZE",
        "FLASH_DIMS": "FLASH_HEAD_SIZES",
        "FLASH_EXPANDED": "FLASH_MLA_HEAD_SIZES",
        "SOFTMAX_ALONE": "PLAIN_SOFTMAX_ROUTING",
        "EVERY_EXPERT": "ALL_EXPERTS_LOCAL",
    },
)
