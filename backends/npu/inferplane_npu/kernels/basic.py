"""Norms, rotary positions, activations and products by the vendor's fused operators.

Source of every call: the operator's page in Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu, and its schema
in torch-npu 2.13.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.fused.needs import ADD_NORM_WEIGHT, FLOATS, NORM_WEIGHT, PLAIN_ACTIVATIONS, declare_fused
from inferplane.plugin import RANK_COMPOSED, Kernels, PackedStorage, Packing
from inferplane_npu.kernels.when import RANK_ALTERNATIVE, OnNpu
from inferplane_npu.kvcache import FRACTAL_NZ

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", dtypes=FLOATS, when=OnNpu)


def _rope_table(table: torch.Tensor, spread: Any) -> torch.Tensor:
    """`[positions, 2, D / 2]` as `[2, positions, D]`, cosines and sines for every entry."""
    return torch.stack([spread(part) for part in table.unbind(1)]).contiguous()


ROPE_HALF = Packing("torch_npu.rope_half", lambda t: _rope_table(t, lambda part: torch.cat((part, part), -1)))
ROPE_INTERLEAVED = Packing(
    "torch_npu.rope_interleaved", lambda t: _rope_table(t, lambda part: part.repeat_interleave(2, -1))
)
NZ_WEIGHT = Packing(
    "torch_npu.nz",
    lambda w: npu.npu_format_cast(w, FRACTAL_NZ),
    storage=PackedStorage.refuse("copies to the host lose the format FRACTAL_NZ"),
)


def cos_sin(table: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, D]` of a packed table, contiguous, in the dtype of what is rotated."""
    cos, sin = table[:, positions].to(dtype).unbind(0)
    return cos, sin


def _entries(op: Any) -> int:
    return 2 * int(op.table.shape[-1])


def _has_plain_layer_norm(op: Any) -> bool:
    weights = [weight for weight in (op.weight, op.bias) if weight is not None]
    return op.offset == 0 and all(len(w.shape) == 1 and w.dtype is None for w in weights)


HALVES = ("halves as pairs", lambda op: not op.interleaved)
NARROW = ("heads of fewer than 896 entries", lambda op: _entries(op) < 896)


@fused("rms_norm", NORM_WEIGHT)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """npu_rms_norm; its second result is for training."""
    return npu.npu_rms_norm(x, view.weight, view.eps)[0]


@fused("add_rms_norm", ADD_NORM_WEIGHT)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_add_rms_norm, whose third result is the sum; the first layer has nothing to add."""
    norm = view.norm
    if residual is None:
        return npu.npu_rms_norm(x, norm.weight, norm.eps)[0], x
    y, _, s = npu.npu_add_rms_norm(x, residual, norm.weight, norm.eps)
    return y, s


@fused(
    "layer_norm",
    ("weights of one row in the plan's dtype, without offset", _has_plain_layer_norm),
    provider="torch",
    rank=RANK_COMPOSED,
)
def layer_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """torch's own, which torch_npu computes by one operator."""
    return F.layer_norm(x, view.weight.shape, view.weight, view.bias, view.eps)


@fused("rope", HALVES, NARROW, features=("rotary-ragged",), packs={"table": ROPE_HALF})
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """npu_rotary_mul on `[T, H, D]`; cosines and sines must have the dtype of what they rotate."""
    cos, sin = cos_sin(view.table, positions, x.dtype)
    return npu.npu_rotary_mul(x.contiguous(), cos[:, None], sin[:, None])


@fused(
    "rope",
    HALVES,
    ("heads of 128 entries", lambda op: _entries(op) == 128),
    rank=RANK_ALTERNATIVE,
    packs={"table": ROPE_HALF},
)
def rope_128(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """npu_rotary_mul on `[1, T, H, 128]`, the only form that the 310P takes."""
    cos, sin = cos_sin(view.table, positions, x.dtype)
    return npu.npu_rotary_mul(x.contiguous()[None], cos[None, :, None], sin[None, :, None])[0]


@fused(
    "rope",
    ("neighbours as pairs", lambda op: op.interleaved),
    NARROW,
    features=("rotary-ragged",),
    packs={"table": ROPE_INTERLEAVED},
)
def rope_interleaved(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """npu_rotary_mul in the mode whose results stand where their inputs stood."""
    cos, sin = cos_sin(view.table, positions, x.dtype)
    return npu.npu_rotary_mul(x.contiguous(), cos[:, None], sin[:, None], "interleave")


@fused("silu_mul", features=("fused-infer",))
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """npu_swiglu: SiLU of the first half times the second."""
    return npu.npu_swiglu(x.contiguous())


@fused(
    "linear",
    PLAIN_ACTIVATIONS,
    provider="torch",
    dtypes=(torch.float16,),
    features=("nz-plain-weights",),
    packs={"weight": NZ_WEIGHT},
)
def linear_nz(view: Any, x: torch.Tensor) -> torch.Tensor:
    """torch's own product, with the weight in the cube unit's own tiles."""
    return F.linear(x, view.weight, view.bias)
