"""Norms, rotary positions, activation, W8A8 products: lightop, and lmslim before its functions moved there.

Sources: HYGON-AI/vllm-plugin-das (ops/rms_norm.py, ops/silu_and_mul.py, quantization/int8_runtime.py and its accuracy
tests), and rtp-llm's port for rotary_embedding_fuse.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused import vllm_calls
from inferplane.kernels.fused.needs import (
    ADD_NORM_WEIGHT,
    INT8_ACTIVATIONS,
    INT8_PER_TOKEN_LINEAR,
    NORM_WEIGHT,
)
from inferplane.kernels.fused.operands import rotate_last_head_as_key
from inferplane.kernels.fused.packings import Int8Rows, RopeTable
from inferplane.plugin import Kernels, Packing
from inferplane_dcu import vendor
from inferplane_dcu.kernels.when import declare

KERNELS = Kernels()
fused = partial(declare, KERNELS, provider="lightop")
LAYOUT = "NT"
"""Both factors of the product row by row: `[M, K]` and `[N, K]`."""


TABLE = Packing("lightop.rope_table", RopeTable)
INT8_ROWS = Packing("lightop.int8_rows", Int8Rows)


@fused("rms_norm", vendor.RMS_NORM, needs=(NORM_WEIGHT,))
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """rmsnorm_forward_autograd, of contiguous rows; the last argument says that nothing is trained."""
    rows = x.contiguous()
    return view.prepared(rows.view(-1, rows.shape[-1]), view.weight, view.eps, False).view(x.shape)


@fused("add_rms_norm", vendor.ADD_RMS_NORM, vendor.RMS_NORM, needs=(ADD_NORM_WEIGHT,))
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """fused_add_rms_norm, whose first argument becomes the norm and second the sum; the first layer has no sum."""
    add_norm, norm = view.prepared
    if residual is None:
        return norm(x.contiguous(), view.norm.weight, view.norm.eps, False), x
    return vllm_calls.add_rms_norm(add_norm, view.norm, x, residual)


@fused("rope", vendor.ROPE, packs={"table": TABLE})
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """rotary_embedding_fuse, in place, of queries and keys at once: the last head goes as the key."""
    dim, table, neox = x.shape[-1], view.table.to_dtype(x.dtype), not view.interleaved
    return rotate_last_head_as_key(x, lambda rest, last: view.prepared(positions, rest, last, dim, table, neox))


@fused("silu_mul", vendor.SILU_MUL)
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """silu_and_mul_opt: SiLU of the first half times the second."""
    return vllm_calls.silu_mul(view.prepared, x)


@fused(
    "linear",
    vendor.QUANTIZE,
    vendor.W8A8,
    features=("int8-dot",),
    formats=("int8_row",),
    needs=(INT8_PER_TOKEN_LINEAR,),
    packs={"weight": INT8_ROWS},
    **INT8_ACTIVATIONS,
)
def linear_w8a8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Both sides in int8 by hipBLASLt, which answers with a status; what is added is added behind it.

    Raises:
        RuntimeError: the library has no kernel for these sizes and says so.
    """
    quantize, product = view.prepared
    w: Int8Rows = view.weight
    data, scale = quantize(x.contiguous())
    tokens, columns = data.shape
    rows = w.data.shape[0]
    status, y = product(data, w.data, scale, w.scale[:, None], tokens, rows, columns, LAYOUT, x.dtype)
    if status is not True:
        raise RuntimeError(
            f"hipblaslt_w8a8_gemm did not multiply {tokens} x {columns} by {columns} x {rows} (status {status!r}); "
            "pin linear to torch"
        )
    y = w.subtract_zero_points(y, data, scale)
    return y if view.bias is None else y + view.bias
