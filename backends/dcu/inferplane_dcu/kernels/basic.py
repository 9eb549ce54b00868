"""Norms, rotary positions, activation, W8A8 products: lightop, and lmslim before its functions moved there.

Sources: HYGON-AI/vllm-plugin-das (ops/rms_norm.py, ops/silu_and_mul.py, quantization/int8_runtime.py and its accuracy
tests), and rtp-llm's port for rotary_embedding_fuse.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import Kernels, Packing, QTensor
from inferplane_dcu import vendor
from inferplane_dcu.kernels.when import RANK_FUSED, with_

KERNELS = Kernels()
LAYOUT = "NT"
"""Both factors of the product row by row: `[M, K]` and `[N, K]`."""


class Table:
    """Cosines and sines `[positions, D]`, kept in each dtype that is asked for: the functions want the queries' own."""

    def __init__(self, table: torch.Tensor) -> None:
        self.whole = table.flatten(1).contiguous()
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The table in a dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.whole.to(dtype)
        return self._cast[dtype]


class Rows:
    """int8 rows `[N, K]`, their scales `[N, 1]`, and what a zero point takes off a row's product for each unit of the
    inputs' sum, `[N]` or None: the product knows no zero points.
    """

    def __init__(self, weight: QTensor) -> None:
        self.data, self.scale = weight.data.contiguous(), weight.scale.contiguous()
        self.shift = None if weight.zero is None else (weight.scale * weight.zero)[:, 0]


TABLE = Packing("lightop.rope_table", Table)
INT8_ROWS = Packing("lightop.int8_rows", Rows)


def plan_dtype(weight: Any) -> bool:
    """Whether a norm's weight has the activations' dtype."""
    return weight.dtype is None


@KERNELS(
    "rms_norm",
    "lightop",
    rank=RANK_FUSED,
    when=with_(vendor.RMS_NORM, needs=(("a weight in the plan's dtype", lambda op: plan_dtype(op.weight)),)),
    prepare=vendor.found_once(vendor.RMS_NORM),
    capture_safe=True,
)
def rms_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    """rmsnorm_forward_autograd, of contiguous rows; the last argument says that nothing is trained."""
    rows = x.contiguous()
    return p.prepared(rows.view(-1, rows.shape[-1]), p.weight, p.eps, False).view(x.shape)


@KERNELS(
    "add_rms_norm",
    "lightop",
    rank=RANK_FUSED,
    when=with_(
        vendor.ADD_RMS_NORM,
        vendor.RMS_NORM,
        needs=(("a weight in the plan's dtype", lambda op: plan_dtype(op.norm.weight)),),
    ),
    prepare=vendor.found_once(vendor.ADD_RMS_NORM, vendor.RMS_NORM),
    capture_safe=True,
)
def add_rms_norm(p: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_add_rms_norm, whose first argument becomes the norm and second the sum; the first layer has no sum."""
    add_norm, norm = p.prepared
    if residual is None:
        return norm(x.contiguous(), p.norm.weight, p.norm.eps, False), x
    y, total = x.clone(memory_format=torch.contiguous_format), residual.clone(memory_format=torch.contiguous_format)
    add_norm(y, total, p.norm.weight, p.norm.eps)
    return y, total


@KERNELS(
    "rope",
    "lightop",
    rank=RANK_FUSED,
    when=with_(vendor.ROPE),
    packs={"table": TABLE},
    prepare=vendor.found_once(vendor.ROPE),
    capture_safe=True,
)
def rope(p: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """rotary_embedding_fuse, in place, of queries and keys at once: the last head goes as the key."""
    tokens, heads, dim = x.shape
    last = x[:, -1].clone(memory_format=torch.contiguous_format)
    rest = x[:, : max(1, heads - 1)].clone(memory_format=torch.contiguous_format)
    p.prepared(positions, rest.view(tokens, -1), last, dim, p.table.in_dtype(x.dtype), not p.interleaved)
    return torch.cat((rest, last[:, None]), 1) if heads > 1 else rest


@KERNELS(
    "silu_mul",
    "lightop",
    rank=RANK_FUSED,
    when=with_(vendor.SILU_MUL),
    prepare=vendor.found_once(vendor.SILU_MUL),
    capture_safe=True,
)
def silu_mul(p: Any, x: torch.Tensor) -> torch.Tensor:
    """silu_and_mul_opt: SiLU of the first half times the second."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    p.prepared(out, x.contiguous())
    return out


def _int8_tokens(op: Any) -> bool:
    return op.act is not None and op.act.format == "int8" and op.act.group == 0 and op.out_dtype is None


@KERNELS(
    "linear",
    "lightop",
    rank=RANK_FUSED,
    when=with_(
        vendor.QUANTIZE,
        vendor.W8A8,
        features=("int8-dot",),
        formats=("int8_row",),
        needs=(("activations in int8, a scale a token", _int8_tokens),),
    ),
    packs={"weight": INT8_ROWS},
    prepare=vendor.found_once(vendor.QUANTIZE, vendor.W8A8),
    capture_safe=True,
)
def linear_w8a8(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Both sides in int8 by hipBLASLt, which answers with a status; what is added is added behind it.

    Raises:
        RuntimeError: the library has no kernel for these sizes and says so.
    """
    quantize, product = p.prepared
    w: Rows = p.weight
    data, scale = quantize(x.contiguous())
    tokens, columns = data.shape
    rows = w.data.shape[0]
    status, y = product(data, w.data, scale, w.scale, tokens, rows, columns, LAYOUT, x.dtype)
    if status is not True:
        raise RuntimeError(
            f"hipblaslt_w8a8_gemm did not multiply {tokens} x {columns} by {columns} x {rows} (status {status!r}); "
            "pin linear to torch"
        )
    if w.shift is not None:
        y = (y.float() - data.float().sum(-1, keepdim=True) * scale * w.shift).to(x.dtype)
    return y if p.bias is None else y + p.bias


@KERNELS(
    "quantize",
    "lightop",
    rank=RANK_FUSED,
    when=with_(
        vendor.QUANTIZE, needs=(("int8 with a scale a token", lambda op: op.format == "int8" and op.group == 0),)
    ),
    prepare=vendor.found_once(vendor.QUANTIZE),
    capture_safe=True,
)
def quantize(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """per_token_quant_int8; a token of zeros has a tiny scale there, and 1 here."""
    data, scale = p.prepared(x.contiguous())
    return data, torch.where((data == 0).all(-1, keepdim=True), 1.0, scale)
