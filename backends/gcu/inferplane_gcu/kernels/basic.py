"""Norms, rotary positions, activation and weight-only products: vLLM's operators as vllm-gcu registers them.

They write into tensors that they are given, some into their inputs, which are copied here: an op leaves its inputs as
they are.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, csrc/torch_bindings.cpp and vllm_gcu/kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import Kernels, Packing, QTensor, When
from inferplane_gcu.kernels.when import HALF, OPERATORS, RANK_FUSED

vllm = torch.ops._C
KERNELS = Kernels()
WHOLE_ROW = -1
"""Value of `group_size`: a scale a row."""


class Table:
    """Cosines and sines `[positions, D]`, kept in each dtype that is asked for: the operator wants the queries' own."""

    def __init__(self, table: torch.Tensor) -> None:
        self.whole = table.flatten(1).contiguous()
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The table in a dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.whole.to(dtype)
        return self._cast[dtype]


class Rows:
    """int8 rows `[N, K]`, their scales `[N]`, and what a zero point takes off a row's product for each unit of the
    inputs' sum, or None: the operator knows no zero points.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.scale = weight.data.contiguous(), weight.scale[:, 0].contiguous()
        self.shift = None if weight.zero is None else self.scale * weight.zero[:, 0]


TABLE = Packing("vllm_gcu.rope_table", Table)
INT8_ROWS = Packing("vllm_gcu.int8_rows", Rows)


def _plan_dtype(weight: Any) -> bool:
    return weight.dtype is None


@KERNELS(
    "rms_norm",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(HALF, features=OPERATORS, needs=(("a weight in the plan's dtype", lambda op: _plan_dtype(op.weight)),)),
    capture_safe=True,
)
def rms_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::rms_norm, which takes contiguous rows."""
    x = x.contiguous()
    out = torch.empty_like(x)
    vllm.rms_norm(out, x, p.weight, p.eps)
    return out


@KERNELS(
    "add_rms_norm",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(
        HALF, features=OPERATORS, needs=(("a weight in the plan's dtype", lambda op: _plan_dtype(op.norm.weight)),)
    ),
    capture_safe=True,
)
def add_rms_norm(p: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """_C::fused_add_rms_norm, whose first argument becomes the norm and second the sum; the first layer has no sum."""
    if residual is None:
        return rms_norm(p.norm, x), x
    y, total = x.clone(memory_format=torch.contiguous_format), residual.clone(memory_format=torch.contiguous_format)
    vllm.fused_add_rms_norm(y, total, p.norm.weight, p.norm.eps)
    return y, total


@KERNELS(
    "rope", "vllm_gcu", rank=RANK_FUSED, when=When(HALF, features=OPERATORS), packs={"table": TABLE}, capture_safe=True
)
def rope(p: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """_C::rotary_embedding, in place, of queries and keys at once: the last head goes as the key."""
    tokens, heads, dim = x.shape
    table, neox = p.table.in_dtype(x.dtype), not p.interleaved
    last = x[:, -1].clone(memory_format=torch.contiguous_format)
    rest = x[:, : max(1, heads - 1)].clone(memory_format=torch.contiguous_format)
    vllm.rotary_embedding(positions, rest.view(tokens, -1), last, dim, table, neox)
    return torch.cat((rest, last[:, None]), 1) if heads > 1 else rest


@KERNELS("silu_mul", "vllm_gcu", rank=RANK_FUSED, when=When(HALF, features=OPERATORS), capture_safe=True)
def silu_mul(p: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::silu_and_mul: SiLU of the first half times the second."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    vllm.silu_and_mul(out, x.contiguous())
    return out


def _weight_only(op: Any) -> bool:
    return op.act is None and op.out_dtype is None


@KERNELS(
    "linear",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(
        HALF,
        formats=("int8_row",),
        features=OPERATORS,
        needs=(("activations and result in the plan's dtype", _weight_only),),
    ),
    packs={"weight": INT8_ROWS},
    capture_safe=True,
)
def linear_w8a16(p: Any, x: torch.Tensor) -> torch.Tensor:
    """_C::weight_only_quant: weights in int8, expanded within the product; scales have the activations' dtype."""
    w: Rows = p.weight
    out = x.new_empty(x.shape[0], w.data.shape[0])
    vllm.weight_only_quant(out, x.contiguous(), w.data, p.bias, w.scale.to(x.dtype), WHOLE_ROW)
    return out if w.shift is None else (out.float() - x.float().sum(-1, keepdim=True) * w.shift).to(x.dtype)
