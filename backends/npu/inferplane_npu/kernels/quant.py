"""Products with quantized weights, some of which quantize activations.

Weight-only: `y = x ((w + offset) scale)`, so an offset is a zero point with the other sign. W8A8: both sides in int8.

Source: pages of npu_weight_quant_batchmatmul, npu_convert_weight_to_int4pack, npu_dynamic_quant, npu_quant_matmul and
npu_format_cast in Ascend/op-plugin at 517f2e7d; experts in int4 and products in FP8 as in vllm-ascend at 182b75ea,
quantization/methods/w4a16.py, w8a8_dynamic.py and w8a8fp8_dynamic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.kernels.fused.heads import run_head
from inferplane.kernels.fused.needs import (
    FP8_ACTIVATIONS,
    INT8_ACTIVATIONS,
    INT8_PER_TOKEN_LINEAR,
    PLAIN_ACTIVATIONS,
    declare_fused,
    takes_activations_in,
)
from inferplane.kernels.fused.packings import INT4_GROUPS
from inferplane.plugin import Batch, Kernels, Packing, QTensor
from inferplane_npu.kernels.when import OnNpu
from inferplane_npu.kvcache import FRACTAL_NZ

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("fused-infer",))
INT4_FORMATS = (*INT4_GROUPS, "int4_row")
LARGEST = 65535
"""Of a dimension of a quantized product."""
HEAD_ROWS = 32768
"""Of a part of an output head: vocabularies have more than `LARGEST`."""


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


def _int8_or_plain(weight: Any) -> Any:
    """For operators around a product that is taken with either."""
    return _int8(weight) if isinstance(weight, QTensor) else weight


def _int8_nz(q: QTensor) -> Packed:
    """For W8A8 the page recommends NZ, cast without a transposition."""
    return _pack(q, npu.npu_format_cast(q.data.transpose(-1, -2).contiguous(), FRACTAL_NZ))


def _int4(q: QTensor) -> Packed:
    """Eight columns to an int32; experts are packed as one long matrix."""
    columns = q.data.transpose(-1, -2).to(torch.int32).contiguous()
    data = npu.npu_convert_weight_to_int4pack(columns.flatten(0, -2))
    return _pack(q, data.view(*columns.shape[:-1], columns.shape[-1] // 8))


INT8 = Packing("torch_npu.int8", _int8)
INT8_OR_PLAIN = Packing("torch_npu.int8_or_plain", _int8_or_plain)
INT8_NZ = Packing("torch_npu.int8_nz", _int8_nz)
INT4 = Packing("torch_npu.int4pack", _int4, dense=True)
FP8 = Packing("torch_npu.fp8", lambda q: _pack(q, q.data.transpose(-1, -2).contiguous()))
INT8_EXPERTS, INT4_EXPERTS = INT8, INT4
FP8_EXPERTS = Packing("torch_npu.fp8_experts", lambda q: _pack(q, q.data.transpose(-1, -2)))
"""A transposed view, as the page's examples pass it."""


def _in_parts(pack: Callable[[QTensor], Packed]) -> Callable[[QTensor], list[Packed]]:
    """A packing of a weight with any number of rows: by parts, none of which has too many."""

    def parts(q: QTensor) -> list[Packed]:
        rows = q.shape[0]
        return [pack(q.shard(0, first, min(first + HEAD_ROWS, rows))) for first in range(0, rows, HEAD_ROWS)]

    return parts


HEAD_INT8 = Packing("torch_npu.int8_parts", _in_parts(_int8))
HEAD_INT4 = Packing("torch_npu.int4_parts", _in_parts(_int4), dense=True)


def _has_supported_size(op: Any) -> bool:
    return max(op.weight.shape) <= LARGEST


FITS = ("at most 65535 rows and columns", _has_supported_size)
NEEDS = (PLAIN_ACTIVATIONS, FITS)


def multiply_quantized(view: Any, x: torch.Tensor) -> torch.Tensor:
    """`x` times the packed weight of a view with `weight` and `bias`, which is expanded within the product."""
    w: Packed = view.weight
    # bfloat16 wants its bias in float32, float16 in float16.
    bias = None if view.bias is None else view.bias.to(torch.float32 if x.dtype is torch.bfloat16 else x.dtype)
    return npu.npu_weight_quant_batchmatmul(
        x, w.data, w.scale_in(x.dtype), w.offset_in(x.dtype), None, None, bias, w.group
    )


@fused("linear", *NEEDS, features=(), formats=("int8_row",), packs={"weight": INT8})
def linear_w8a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights in int8, expanded within the product."""
    return multiply_quantized(view, x)


@fused(
    "linear",
    *NEEDS,
    ("rows in eights", lambda op: op.weight.shape[0] % 8 == 0),
    formats=INT4_FORMATS,
    packs={"weight": INT4},
)
def linear_w4a16(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights in int4, eight to an int32, expanded within the product."""
    return multiply_quantized(view, x)


def _multiply_parts(view: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([multiply_quantized(SimpleNamespace(weight=part, bias=None), x) for part in view.weight], -1)


def _has_supported_width(op: Any) -> bool:
    return bool(op.weight.shape[1] <= LARGEST)


WIDTH = ("at most 65535 columns", _has_supported_width)


@fused("lm_head", WIDTH, features=(), formats=("int8_row",), packs={"weight": HEAD_INT8})
def lm_head_w8a16(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_w8a16`, part by part."""
    return run_head(_multiply_parts, view, x, batch)


@fused(
    "lm_head",
    WIDTH,
    ("rows in eights", lambda op: op.weight.shape[0] % 8 == 0),
    formats=INT4_FORMATS,
    packs={"weight": HEAD_INT4},
)
def lm_head_w4a16(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_w4a16`, part by part."""
    return run_head(_multiply_parts, view, x, batch)


@fused(
    "linear",
    INT8_PER_TOKEN_LINEAR,
    FITS,
    features=("fused-infer", "int8-dot"),
    formats=("int8_row",),
    packs={"weight": INT8_NZ},
    **INT8_ACTIVATIONS,
)
def linear_w8a8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Both sides in int8. Without `output_dtype` the result would be int8 as well."""
    data, scale = npu.npu_dynamic_quant(x)
    bias = None if view.bias is None else view.bias.float()
    return npu.npu_quant_matmul(
        data, view.weight.data, view.weight.scale, pertoken_scale=scale, bias=bias, output_dtype=x.dtype
    )


def _takes_fp8_tokens(op: Any) -> bool:
    return takes_activations_in(op, "fp8")


@fused(
    "linear",
    ("activations in FP8 with a scale a token, or unquantized", _takes_fp8_tokens),
    FITS,
    features=("fused-infer", "fp8"),
    formats=("fp8_row",),
    packs={"weight": FP8},
    **FP8_ACTIVATIONS,
)
def linear_fp8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Both sides in FP8. The bias is added behind: vllm-ascend says that the product is wrong with one. What a token of
    zeros is quantized to is not documented, so its row is set.
    """
    data, scale = npu.npu_dynamic_quant(x, dst_type=torch.float8_e4m3fn)
    y = npu.npu_quant_matmul(data, view.weight.data, view.weight.scale, pertoken_scale=scale, output_dtype=x.dtype)
    y = y.masked_fill((scale == 0)[:, None], 0.0)
    return y if view.bias is None else y + view.bias
