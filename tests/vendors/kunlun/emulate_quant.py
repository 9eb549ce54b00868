"""Products with quantized weights, and quantization of rows.

Meaning: the calls in baidu/vLLM-Kunlun at 09869ee7 (ops/_custom_ops.py, quantization/kernels/scale_mm.py and awq.py);
that scales are rows' maxima, and products divided by 127 twice, as its tests found on a P800
(tests/ut/ops/test_fused_moe_int8.py at f926eebd).
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.kunlun import chip

IMPLEMENTATIONS = emulates = Implementations()
LEFT = 55
"""What a row of zeros becomes is not documented: something."""


@emulates("kunlun_ops::quant2d")
def quant2d(x, y, max, force_sdnn):
    """max <- largest magnitude of each row; y <- round(x / max * 127)."""
    chip.half(x=x)
    chip.dtype(torch.int8, y=y)
    chip.dtype(torch.float32, max=max)
    chip.contiguous(x=x, y=y, max=max)
    chip.shape("x", x, None, None)
    chip.shape("y", y, *x.shape)
    chip.shape("max", max, x.shape[0], 1)
    require(force_sdnn, "the vendor's own calls have force_sdnn")
    largest = x.float().abs().amax(-1, keepdim=True)
    scaled = (x.float() / largest * 127).round().nan_to_num(LEFT)
    max.copy_(largest)
    y.copy_(scaled.to(torch.int8))


@emulates("kunlun_ops::matmul")
def matmul(x, w, out, x_trans, w_trans, alpha, beta, bias, x_max, w_max, x_pc_max, w_pc_max):
    """out <- x w^T x_pc_max w_pc_max / 127^2 + bias, both sides int8."""
    chip.absent("x_max", x_max)
    chip.absent("w_max", w_max)
    require(not x_trans and w_trans and (alpha, beta) == (1.0, 0.0), "x w^T is emulated")
    chip.dtype(torch.int8, x=x, w=w)
    chip.half(out=out)
    chip.contiguous(x=x, w=w, out=out)
    (m, k), n = x.shape, w.shape[0]
    chip.shape("w", w, n, k)
    chip.shape("out", out, m, n)
    require(x_pc_max is not None and w_pc_max is not None, "int8 needs x_pc_max and w_pc_max")
    chip.dtype(torch.float32, x_pc_max=x_pc_max, w_pc_max=w_pc_max)
    chip.shape("x_pc_max", x_pc_max, m, 1)
    chip.shape("w_pc_max", w_pc_max, n, 1)
    y = (x.double() @ w.double().t()).float() * (x_pc_max / 127) * (w_pc_max / 127).t()
    if bias is not None:
        chip.dtype(torch.float32, bias=bias)
        chip.shape("bias", bias, n)
        y = y + bias
    out.copy_(y)


def _entries(words: torch.Tensor) -> torch.Tensor:
    """`[K, N / 8]` words as `[K, N]` unsigned entries: columns 0 and 1 are the higher and the lower half of byte 0."""
    chip.dtype(chip.INT32, words=words)
    nibbles = (words.long()[..., None] >> (torch.arange(8) * 4)) & 0xF
    return nibbles[..., [1, 0, 3, 2, 5, 4, 7, 6]].flatten(1).float()


def _expand(qweight, scales, zeros, group, align_type):
    require(align_type == 0, f"align_type {align_type} is not emulated")
    chip.dtype(torch.float16, scales=scales)
    chip.contiguous(qweight=qweight, scales=scales, zeros=zeros)
    k, words = qweight.shape
    require(group > 0 and k % group == 0, f"{k} rows in groups of {group}")
    chip.shape("scales", scales, k // group, words * 8)
    chip.shape("zeros", zeros, k // group, words)
    wide = [t.float().repeat_interleave(group, 0) for t in (_entries(zeros), scales)]
    return (_entries(qweight) - wide[0]) * wide[1]


@emulates("kunlun_ops::awq_gemm")
def awq_gemm(x, w, scale, zeros, out, align_type, group_size):
    """out <- x ((w - zeros) scale), float16 in and out."""
    chip.dtype(torch.float16, x=x, out=out)
    chip.contiguous(x=x, out=out)
    weight = _expand(w, scale, zeros, group_size, align_type)
    chip.shape("x", x, None, weight.shape[0])
    chip.shape("out", out, x.shape[0], weight.shape[1])
    out.copy_(x.float() @ weight)


@emulates("kunlun_ops::awq_dequantize")
def awq_dequantize(qweight, scales, zeros, weight, group_m, quant_type, align_type):
    """weight <- (qweight - zeros) scales, float16 `[K, N]`."""
    require(quant_type == 0, f"quant_type {quant_type} is not emulated")
    chip.dtype(torch.float16, weight=weight)
    chip.contiguous(weight=weight)
    values = _expand(qweight, scales, zeros, group_m, align_type)
    chip.shape("weight", weight, *values.shape)
    weight.copy_(values)
