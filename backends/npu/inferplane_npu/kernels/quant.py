"""Products with quantized weights, and dynamic quantization of activations.

Weight-only: `y = x ((w + offset) scale)`, so an offset is a zero point with the other sign. W8A8: both sides in int8.

Source: pages of npu_weight_quant_batchmatmul, npu_convert_weight_to_int4pack, npu_dynamic_quant, npu_quant_matmul and
npu_format_cast in Ascend/op-plugin at 517f2e7d; experts in int4 and products in FP8 as in vllm-ascend at 182b75ea,
quantization/methods/w4a16.py, w8a8_dynamic.py and w8a8fp8_dynamic.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import (
    INT8_PER_TOKEN_LINEAR,
    INT8_PER_TOKEN_QUANTIZE,
    PLAIN_ACTIVATIONS,
    declare_fused,
)
from inferplane.kernels.fused.packings import INT4_GROUPS
from inferplane.plugin import Kernels, Packing, QTensor
from inferplane_npu.kernels.when import OnNpu
from inferplane_npu.kvcache import FRACTAL_NZ

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("fused-infer",))
INT4_FORMATS = (*INT4_GROUPS, "int4_row")
LARGEST = 65535
"""Of a dimension of a quantized product."""


class Packed:
    """A quantized weight as the vendor's products read it.

    Args:
        data: int8 `[..., K, N]`, or int32 `[..., K, N / 8]` with eight int4 each.
        scale: float32 `[..., N]`, or `[..., G, N]` with a scale a group of rows.
        zero: zero points as `scale`, or None.
        group: rows of K that share a scale; 0: all.
    """

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int) -> None:
        self.data, self.scale, self.zero, self.group = data, scale, zero, group
        self._cast: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def scale_in(self, dtype: torch.dtype) -> torch.Tensor:
        """The scales in the activations' dtype, which is what weight-only products want; cast once."""
        return self._in("scale", self.scale, dtype)

    def offset_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to the integers: the zero points with the other sign."""
        return None if self.zero is None else self._in("offset", -self.zero, dtype)

    def _in(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if (name, dtype) not in self._cast:
            self._cast[name, dtype] = values.to(dtype)
        return self._cast[name, dtype]


def _columns(scale: torch.Tensor | None) -> torch.Tensor | None:
    """`[..., N, G]` as `[..., G, N]`, or as `[..., N]` when there is one group."""
    if scale is None:
        return None
    return scale[..., 0].contiguous() if scale.shape[-1] == 1 else scale.transpose(-1, -2).contiguous()


def _pack(q: QTensor, data: torch.Tensor) -> Packed:
    scale = _columns(q.scale)
    assert scale is not None
    return Packed(data, scale, _columns(q.zero), q.block[1] if q.scale.shape[-1] > 1 else 0)


def _int8(q: QTensor) -> Packed:
    """A transposed view: the page recommends it for one scale a row of outputs."""
    return _pack(q, q.data.transpose(-1, -2))


def _int8_nz(q: QTensor) -> Packed:
    """For W8A8 the page recommends NZ, cast without a transposition."""
    return _pack(q, npu.npu_format_cast(q.data.transpose(-1, -2).contiguous(), FRACTAL_NZ))


def _int4(q: QTensor) -> Packed:
    """Eight columns to an int32; experts are packed as one long matrix."""
    columns = q.data.transpose(-1, -2).to(torch.int32).contiguous()
    data = npu.npu_convert_weight_to_int4pack(columns.flatten(0, -2))
    return _pack(q, data.view(*columns.shape[:-1], columns.shape[-1] // 8))


INT8 = Packing("torch_npu.int8", _int8)
INT8_NZ = Packing("torch_npu.int8_nz", _int8_nz)
INT4 = Packing("torch_npu.int4pack", _int4)
FP8 = Packing("torch_npu.fp8", lambda q: _pack(q, q.data.transpose(-1, -2).contiguous()))
INT8_EXPERTS, INT4_EXPERTS = INT8, INT4


def _has_supported_size(op: Any) -> bool:
    return max(op.weight.shape) <= LARGEST


FITS = ("at most 65535 rows and columns", _has_supported_size)
NEEDS = (PLAIN_ACTIVATIONS, FITS)


def _multiply(view: Any, x: torch.Tensor) -> torch.Tensor:
    w: Packed = view.weight
    # bfloat16 wants its bias in float32, float16 in float16.
    bias = None if view.bias is None else view.bias.to(torch.float32 if x.dtype is torch.bfloat16 else x.dtype)
    return npu.npu_weight_quant_batchmatmul(
        x, w.data, w.scale_in(x.dtype), w.offset_in(x.dtype), None, None, bias, w.group
    )


@fused("linear", *NEEDS, features=(), formats=("int8_row",), packs={"weight": INT8})
def linear_w8a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights in int8, expanded within the product."""
    return _multiply(view, x)


@fused(
    "linear",
    *NEEDS,
    ("rows in eights", lambda op: op.weight.shape[0] % 8 == 0),
    formats=INT4_FORMATS,
    packs={"weight": INT4},
)
def linear_w4a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights in int4, eight to an int32, expanded within the product."""
    return _multiply(view, x)


@fused(
    "linear",
    INT8_PER_TOKEN_LINEAR,
    FITS,
    features=("fused-infer", "int8-dot"),
    formats=("int8_row",),
    packs={"weight": INT8_NZ},
)
def linear_w8a8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Both sides in int8. Without `output_dtype` the result would be int8 as well."""
    data, scale = npu.npu_dynamic_quant(x)
    bias = None if view.bias is None else view.bias.float()
    return npu.npu_quant_matmul(
        data, view.weight.data, view.weight.scale, pertoken_scale=scale, bias=bias, output_dtype=x.dtype
    )


def _has_fp8_tokens(op: Any) -> bool:
    quant = op.activation_quant
    return quant is not None and quant.format == "fp8" and quant.group == 0 and op.out_dtype is None


@fused(
    "linear",
    ("activations in FP8, a scale a token", _has_fp8_tokens),
    FITS,
    features=("fused-infer", "fp8"),
    formats=("fp8_row",),
    packs={"weight": FP8},
)
def linear_fp8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Both sides in FP8. The bias is added behind: vllm-ascend says that the product is wrong with one. What a token of
    zeros is quantized to is not documented, so its row is set.
    """
    data, scale = npu.npu_dynamic_quant(x, dst_type=torch.float8_e4m3fn)
    y = npu.npu_quant_matmul(data, view.weight.data, view.weight.scale, pertoken_scale=scale, output_dtype=x.dtype)
    y = y.masked_fill((scale == 0)[:, None], 0.0)
    return y if view.bias is None else y + view.bias


@fused("quantize", INT8_PER_TOKEN_QUANTIZE)
def quantize(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_dynamic_quant; a token of zeros has scale 0 there, and 1 here."""
    data, scale = npu.npu_dynamic_quant(x)
    zeros = scale == 0
    return data.masked_fill(zeros[..., None], 0), scale.masked_fill(zeros, 1.0)[..., None]
