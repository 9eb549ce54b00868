"""Products with quantized weights, and activations in FP8.

Meaning and limits: vllm-project/vllm-xpu-kernels at 4543b580, csrc/xpu/onednn, csrc/quantization/fp8, with
tests/test_int4_gemm_onednn.py and test_fp8_gemm_onednn.py; of torch's own _weight_int4pack_mm_xpu and
_weight_int8pack_mm_xpu in aten/src/ATen/native/mkldnn/xpu/Blas.cpp.
"""

from __future__ import annotations

import torch

from tests.vendors.calls import Open
from tests.vendors.emulator import Implementations, require
from tests.vendors.intel import chip

IMPLEMENTATIONS = emulates = Implementations()
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
SMALLEST_SCALE = 1 / (FP8_MAX * 512)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Eight numbers from 0 to 15 of each int32 along a new last dimension, the lowest bits first."""
    return (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return y
    chip.half(bias=bias)
    chip.shape("bias", bias, y.shape[-1])
    chip.contiguous(bias=bias)
    return y + bias.float()


@emulates("_xpu_C::int4_gemm_w4a16")
def int4_gemm_w4a16(A, B, bias, B_scale, B_zp, group_size, g_idx):
    """Words `[K / 8, N]` along K, K the fastest; zero points are one int8, or words `[groups, N / 8]` along N."""
    chip.absent(g_idx=g_idx)
    chip.half(A=A, B_scale=B_scale)
    chip.dtype(chip.INT32, B=B)
    chip.contiguous(B_scale=B_scale)
    require(B.stride(-2) == 1, "int4 weight must be in NT format")
    k, n = A.shape[1], B.shape[1]
    chip.shape("B", B, k // 8, n)
    require(k % group_size == 0, f"whole groups of {group_size} in {k}")
    chip.shape("B_scale", B_scale, k // group_size, n)
    if B_zp.dim() == 1:
        require(B_zp.dtype is torch.int8 and B_zp.numel() == 1, "one zero point for all is one int8")
        zero = B_zp.float()
    else:
        chip.dtype(chip.INT32, B_zp=B_zp)
        chip.contiguous(B_zp=B_zp)
        chip.shape("B_zp", B_zp, k // group_size, n // 8)
        zero = _nibbles(B_zp).flatten(1).repeat_interleave(group_size, 0).float()
    values = _nibbles(B).transpose(1, 2).reshape(k, n).float()
    weight = (values - zero) * B_scale.float().repeat_interleave(group_size, 0)
    return _plus(A.float() @ weight, bias).to(A.dtype)


def _scales(A_scale, B_scale, m, k, n) -> tuple[torch.Tensor | float, torch.Tensor]:
    """Of activations and weight, repeated to their entries: two columns of scales of A mean blocks."""
    for name, scale in (("A_scale_", A_scale), ("B_scale_", B_scale)):
        if scale is not None:
            chip.dtype(torch.float32, **{name: scale})
            chip.contiguous(**{name: scale})
    blocks = B_scale.dim() == 2 and (B_scale.shape[0] > 1 if A_scale is None else A_scale.shape[1] > 1)
    if not blocks:
        require(B_scale.numel() in (1, n), f"one scale or {n} of the weight, got {list(B_scale.shape)}")
        require(A_scale is None or A_scale.numel() in (1, m), "one scale or one a token of the activations")
        return (1.0 if A_scale is None else A_scale.flatten()[:, None]), B_scale.flatten()
    groups = B_scale.shape[0]
    require(k % groups == 0 and n % B_scale.shape[1] == 0, f"whole blocks of {k} x {n}, got {list(B_scale.shape)}")
    # Weight only, one size serves both dimensions.
    rows, columns = k // groups, (k // groups if A_scale is None else n // B_scale.shape[1])
    require(B_scale.shape[1] * columns == n, f"blocks of {rows} x {columns} in {k} x {n}")
    weight = B_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    if A_scale is None:
        return 1.0, weight
    require(A_scale.shape == (m, groups), f"activations have {groups} scales a token, got {list(A_scale.shape)}")
    return A_scale.repeat_interleave(rows, 1), weight


@emulates("_xpu_C::fp8_gemm_w8a16")
def fp8_gemm_w8a16(A, B, B_scale_, bias_):
    """A in 16 bits, B `[K, N]` in FP8."""
    chip.half(A=A)
    chip.dtype(FP8, B=B)
    chip.shape("B", B, A.shape[1], None)
    require(B_scale_ is not None, "a weight without scales is not emulated")
    _, weight = _scales(None, B_scale_, *A.shape, B.shape[1])
    return _plus(A.float() @ (B.float() * weight), bias_).to(A.dtype)


@emulates("_xpu_C::fp8_gemm")
def fp8_gemm(A, B, out_dtype, A_scale_, B_scale_, bias_):
    """Both in FP8."""
    chip.dtype(FP8, A=A, B=B)
    allowed = chip.FLOATS if chip.LIFTED else chip.HALF
    require(out_dtype in allowed, f"output must be float16 or bfloat16, got {out_dtype}")
    chip.shape("B", B, A.shape[1], None)
    require(A_scale_ is not None and B_scale_ is not None, "absent scales are not emulated")
    act, weight = _scales(A_scale_, B_scale_, *A.shape, B.shape[1])
    return _plus((A.float() * act) @ (B.float() * weight), bias_).to(out_dtype)


@emulates("_C::dynamic_per_token_scaled_fp8_quant")
def dynamic_per_token_scaled_fp8_quant(result, input, scale, scale_ub):
    """A scale a token: its largest magnitude over 448, and not below a smallest."""
    chip.absent(scale_ub=scale_ub)
    chip.floats(input=input)
    chip.dtype(FP8, result=result)
    chip.dtype(torch.float32, scale=scale)
    chip.contiguous(result=result, input=input)
    chip.shape("scale", scale, input.shape[0], 1)
    scale.copy_((input.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE))
    result.copy_((input.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8))


@emulates("_C::per_token_group_fp8_quant")
def per_token_group_fp8_quant(
    input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0, dummy_is_scale_transposed,
    dummy_is_tma_aligned,
):  # fmt: skip
    """A scale a group of columns; the last two arguments do nothing."""
    require(not scale_ue8m0, "scales that are powers of two are not emulated")
    chip.floats(input=input)
    chip.dtype(FP8, output_q=output_q)
    chip.dtype(torch.float32, output_s=output_s)
    chip.contiguous(input=input, output_q=output_q, output_s=output_s)
    require(input.shape[1] % group_size == 0, f"whole groups of {group_size} in {input.shape[1]}")
    chip.shape("output_s", output_s, input.shape[0], input.shape[1] // group_size)
    tiles = input.float().unflatten(-1, (-1, group_size))
    output_s.copy_(tiles.abs().amax(-1).clamp_min(eps) / fp8_max)
    output_q.copy_((tiles / output_s[..., None]).clamp(fp8_min, fp8_max).flatten(-2).to(FP8))


@emulates("aten::_convert_weight_to_int4pack")
def _convert_weight_to_int4pack(self, innerKTiles):
    """Bytes of two columns to words of eight, in their order. Torch's own shape function tells of another device's."""
    chip.dtype(torch.uint8, self=self)
    chip.contiguous(self=self)
    require(self.dim() == 2 and self.shape[1] % 4 == 0, f"rows of whole words, got {list(self.shape)}")
    return self.view(torch.int32).as_subclass(Open)


@emulates("aten::_weight_int4pack_mm_with_scales_and_zeros")
def _weight_int4pack_mm_with_scales_and_zeros(self, mat2, qGroupSize, qScale, qZeros):
    """Words `[N, K / 8]`, scales and int8 zero points `[groups, N]`."""
    require(self.dim() == 2 and self.is_contiguous(), "A is contiguous and has two dimensions")
    chip.floats(self=self, qScale=qScale)
    chip.dtype(chip.INT32, mat2=mat2)
    chip.dtype(torch.int8, qZeros=qZeros)
    require(qGroupSize > 1 and qGroupSize % 32 == 0, f"groups in 32s, got {qGroupSize}")
    n, k = mat2.shape[0], self.shape[1]
    chip.shape("mat2", mat2, n, k // 8)
    chip.shape("qScale", qScale, k // qGroupSize, n)
    chip.shape("qZeros", qZeros, k // qGroupSize, n)
    values = _nibbles(mat2.as_subclass(torch.Tensor)).flatten(1).float()
    zero, scale = (t.float().t().repeat_interleave(qGroupSize, 1) for t in (qZeros, qScale))
    return (self.float() @ ((values - zero) * scale).t()).to(self.dtype)


@emulates("aten::_weight_int8pack_mm")
def _weight_int8pack_mm(self, mat2, scales):
    """int8 rows `[N, K]`, a scale a row."""
    require(self.dim() == 2 and self.stride(1) == 1, "A has two dimensions, the last contiguous")
    chip.floats(self=self)
    chip.dtype(torch.int8, mat2=mat2)
    chip.contiguous(mat2=mat2)
    chip.shape("mat2", mat2, None, self.shape[1])
    chip.shape("scales", scales, mat2.shape[0])
    return (self.float() @ (mat2.float() * scales.float()[:, None]).t()).to(self.dtype)
