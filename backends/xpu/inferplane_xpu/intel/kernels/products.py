"""Products with quantized weights: the extension's, which go to oneDNN, and torch's own on packed weights.

Zero points of int4 must be whole numbers from -8 to 7 for the operators; others are taken off behind the product, by
the groups' sums of the activations.

Source: vllm-project/vllm-xpu-kernels at 4543b580, csrc/xpu/onednn/*.h, csrc/quantization/fp8 and their tests; torch's
aten/src/ATen/native/mkldnn/xpu/Blas.cpp; for the order of halves sglang's XPU scheme of compressed tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.heads import run_head
from inferplane.kernels.fused.needs import (
    FLOATS,
    FP8_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    declare_fused,
    takes_activations_in,
)
from inferplane.kernels.fused.packings import Int8Rows
from inferplane.plugin import Batch, Kernels, Packing, QTensor
from inferplane_xpu.intel.kernels.when import MATRIX, RANK_TORCH_PACKED

vllm, xpu, aten = torch.ops._C, torch.ops._xpu_C, torch.ops.aten
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_xpu", features=MATRIX)
INT4 = ("int4_group", "int4_group64", "int4_group32", "int4_row")
OFFSET = 8
"""What is added to an int4 so that it is stored without a sign."""
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
BLOCK = 128
TILES = 8
"""`innerKTiles`, which the device's packing does not look at."""


def _pack_words(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight numbers from 0 to 15 along the last dimension to an int32, the first in the lowest bits."""
    words = nibbles[..., 0::8].int().contiguous()
    for i in range(1, 8):
        words |= nibbles[..., i::8].int() << (4 * i)
    return words


class Int4:
    """An int4 weight `[N, K]` for the products.

    Args:
        data: as the operator reads it. zero: zero points as it reads them.
        scale: `[G, N]`. group: columns that share a scale.
        shift: `[G, N]`, what each group's sum of activations takes off, or None.
    """

    def __init__(
        self, data: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, group: int, shift: torch.Tensor | None
    ) -> None:
        self.data, self.zero, self.scale, self.group, self.shift = data, zero, scale, group, shift
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def scale_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Scales in the activations' dtype; cast once."""
        if dtype not in self._cast:
            self._cast[dtype] = self.scale.to(dtype)
        return self._cast[dtype]

    def subtract_zero_points(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product without what zero points take off that the operator could not store."""
        if self.shift is None:
            return y
        sums = x.float().unflatten(-1, (-1, self.group)).sum(-1)
        return (y.float() - sums @ self.shift).to(y.dtype)


def _zero_points(q: QTensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Zero points `[G, N]` from 0 to 15, or None for none; what is to be taken off instead, or None."""
    if q.zero is None:
        return None, None
    zero = q.zero.float().t()
    if bool(((zero == zero.round()) & (zero >= -OFFSET) & (zero < OFFSET)).all()):
        return (zero + OFFSET).to(torch.int8), None
    return None, (q.scale.t() * zero).contiguous()


def _onednn(q: QTensor) -> Int4:
    """Words of eight columns, `[K / 8, N]` with K the fastest; zero points in words of eight rows, or one 8 for all."""
    zero, shift = _zero_points(q)
    one = torch.tensor([OFFSET], dtype=torch.int8, device=q.data.device)
    words = _pack_words(q.data + OFFSET).t()
    return Int4(words, one if zero is None else _pack_words(zero), q.scale.t().contiguous(), q.block[1], shift)


def _torch_xpu(q: QTensor) -> Int4:
    """Bytes of two columns, the even one low, which torch packs for the device; zero points a group."""
    zero, shift = _zero_points(q)
    unsigned = (q.data + OFFSET).to(torch.uint8)
    data = aten._convert_weight_to_int4pack(unsigned[:, 0::2] | (unsigned[:, 1::2] << 4), TILES)
    scale = q.scale.t().contiguous()
    zero = torch.full_like(scale, OFFSET, dtype=torch.int8) if zero is None else zero.contiguous()
    return Int4(data, zero, scale, q.block[1], shift)


class Fp8:
    """An FP8 weight as a transposed view `[K, N]`; float32 scales `[N]`, or `[K / 128, N / 128]`."""

    def __init__(self, weight: QTensor) -> None:
        self.data = weight.data.contiguous().t()
        by_row = weight.scale.shape[1] == 1 and weight.block[0] == 1
        self.scale = weight.scale[:, 0].contiguous() if by_row else weight.scale.t().contiguous()


ONEDNN = Packing("vllm_xpu.int4", _onednn, dense=True)
TORCH_XPU = Packing("torch_xpu.int4pack", _torch_xpu, dense=True)
INT8_ROWS = Packing("torch_xpu.int8_rows", Int8Rows)
FP8_WEIGHT = Packing("vllm_xpu.fp8", Fp8)


def _has_whole_words(op: Any) -> bool:
    return op.weight.shape[0] % 8 == 0 and op.weight.shape[1] % 128 == 0


def _has_whole_blocks(op: Any) -> bool:
    n, k = op.weight.shape
    return op.weight.format == "fp8_row" or (n % BLOCK == 0 and k % BLOCK == 0 and k > BLOCK)


def _takes_fp8_activations(op: Any) -> bool:
    group = 0 if op.weight.format == "fp8_row" else BLOCK
    return takes_activations_in(op, "fp8", group) and op.weight.shape[1] % 8 == 0


WHOLE_WORDS = ("rows in eights and columns in groups of 128", _has_whole_words)
WHOLE_BLOCKS = ("a scale a row, or whole blocks of 128 and more than one of them along a row", _has_whole_blocks)


@fused("linear", PLAIN_ACTIVATIONS, WHOLE_WORDS, formats=INT4, packs={"weight": ONEDNN})
def linear_int4(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_xpu_C::int4_gemm_w4a16."""
    w: Int4 = view.weight
    y = xpu.int4_gemm_w4a16(x.contiguous(), w.data, view.bias, w.scale_in(x.dtype), w.zero, w.group, None)
    return w.subtract_zero_points(y, x)


@fused(
    "linear",
    PLAIN_ACTIVATIONS,
    WHOLE_WORDS,
    provider="torch_xpu",
    features=("int4-product",),
    formats=INT4,
    rank=RANK_TORCH_PACKED,
    packs={"weight": TORCH_XPU},
)
def linear_int4pack(view: Any, x: torch.Tensor) -> torch.Tensor:
    """torch's _weight_int4pack_mm_with_scales_and_zeros."""
    w: Int4 = view.weight
    y = aten._weight_int4pack_mm_with_scales_and_zeros(x.contiguous(), w.data, w.group, w.scale_in(x.dtype), w.zero)
    y = w.subtract_zero_points(y, x)
    return y if view.bias is None else y + view.bias


@fused(
    "linear",
    PLAIN_ACTIVATIONS,
    provider="torch_xpu",
    dtypes=FLOATS,
    features=("int8-product",),
    formats=("int8_row",),
    rank=RANK_TORCH_PACKED,
    packs={"weight": INT8_ROWS},
)
def linear_int8pack(view: Any, x: torch.Tensor) -> torch.Tensor:
    """torch's _weight_int8pack_mm: weights in int8, a scale a row."""
    w: Int8Rows = view.weight
    y = aten._weight_int8pack_mm(x.contiguous(), w.data, w.scale.to(x.dtype))
    y = w.subtract_zero_points(y, x)
    return y if view.bias is None else y + view.bias


@fused("linear", PLAIN_ACTIVATIONS, WHOLE_BLOCKS, formats=("fp8_row", "fp8_block"), packs={"weight": FP8_WEIGHT})
def linear_fp8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_xpu_C::fp8_gemm_w8a16: weights in FP8, activations as they are. One block along a row would read as rows."""
    w: Fp8 = view.weight
    y: torch.Tensor = xpu.fp8_gemm_w8a16(x.contiguous(), w.data, w.scale, view.bias)
    return y


@fused(
    "linear",
    ("activations in FP8 by rows or by 128 as the weight is, or unquantized", _takes_fp8_activations),
    WHOLE_BLOCKS,
    formats=("fp8_row", "fp8_block"),
    packs={"weight": FP8_WEIGHT},
    **FP8_ACTIVATIONS,
)
def linear_fp8_act(view: Any, x: torch.Tensor) -> torch.Tensor:
    """_xpu_C::fp8_gemm on activations that the extension quantizes, by rows or by groups of 128."""
    w: Fp8 = view.weight
    x = x.contiguous()
    data = torch.empty_like(x, dtype=FP8)
    if w.scale.ndim == 1:
        scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
        vllm.dynamic_per_token_scaled_fp8_quant(data, x, scale, None)
    else:
        scale = x.new_empty(x.shape[0], x.shape[1] // BLOCK, dtype=torch.float32)
        vllm.per_token_group_fp8_quant(x, data, scale, BLOCK, 1e-10, -FP8_MAX, FP8_MAX, False, False, False)
    y: torch.Tensor = xpu.fp8_gemm(data, w.data, x.dtype, scale, w.scale, view.bias)
    return y


@fused("lm_head", WHOLE_WORDS, formats=INT4, packs={"weight": ONEDNN})
def lm_head_int4(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_int4`."""
    return run_head(linear_int4, view, x, batch)


@fused(
    "lm_head",
    WHOLE_WORDS,
    provider="torch_xpu",
    features=("int4-product",),
    formats=INT4,
    rank=RANK_TORCH_PACKED,
    packs={"weight": TORCH_XPU},
)
def lm_head_int4pack(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_int4pack`."""
    return run_head(linear_int4pack, view, x, batch)


@fused(
    "lm_head",
    provider="torch_xpu",
    dtypes=FLOATS,
    features=("int8-product",),
    formats=("int8_row",),
    rank=RANK_TORCH_PACKED,
    packs={"weight": INT8_ROWS},
)
def lm_head_int8pack(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `linear_int8pack`."""
    return run_head(linear_int8pack, view, x, batch)
