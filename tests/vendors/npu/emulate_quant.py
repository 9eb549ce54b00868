"""Quantized products and their packings, as their pages describe them; and the batched product with permutations.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu; the order of int4 in an int32 from its host function
(ConvertWeightToINT4PackKernelNpuOpApi.cpp): eight neighbours, the first lowest.
"""

from __future__ import annotations

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip

IMPLEMENTATIONS = emulates = Implementations()
LARGEST = 65535
FP8 = torch.float8_e4m3fn
SCALAR_TYPES = {
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    1: torch.int8,
    3: torch.int32,
    24: torch.float8_e4m3fn,
}
"""torch's numbers of dtypes, which is what an `int?` argument receives for one."""


@emulates("npu::npu_dynamic_quant")
def dynamic_quant(input, smooth_scales, group_index, dst_type, quant_mode, dst_type_max):
    """A scale a token, max |x| / limit, rounded to nearest: int8, and on the 950 FP8 (as vllm-ascend calls it there).
    What a row of zeros gives is not said: NaN here, and 99 in int8, not a zero that would hide a careless kernel.
    """
    chip.runs_on("npu_dynamic_quant", *chip.A2_A3)
    chip.unused(smooth_scales=smooth_scales, group_index=group_index, dst_type_max=dst_type_max)
    target = torch.int8 if dst_type is None else SCALAR_TYPES[int(dst_type)]
    require(target is torch.int8 or (target is FP8 and chip.ARCH == "950"), f"dst_type {target} on {chip.ARCH}")
    require(quant_mode == "pertoken", f"quant_mode {quant_mode!r} is not emulated")
    chip.dtype("input", input, *chip.HALF)
    require(input.dim() > 1, "input has more than one dimension")
    top = input.float().abs().amax(-1)
    if target is FP8:
        scale = top / torch.finfo(FP8).max
        return (input.float() / scale[..., None]).to(FP8), scale
    scale = top / 127.0
    data = (input.float() / scale[..., None]).round().nan_to_num(99.0)
    return data.clamp(-128, 127).to(torch.int8), scale


@emulates("npu::npu_quant_matmul")
def quant_matmul(
    x1, x2, scale, offset, pertoken_scale, bias, output_dtype, x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype,
    group_sizes, y_scale,
):  # fmt: skip
    """int8 on both sides, or FP8 on the 950 (as vllm-ascend calls it). Without output_dtype the result is int8."""
    chip.runs_on("npu_quant_matmul", *chip.EVERY)
    chip.unused(offset=offset, x1_dtype=x1_dtype, x2_dtype=x2_dtype, pertoken_scale_dtype=pertoken_scale_dtype)
    chip.unused(scale_dtype=scale_dtype, group_sizes=group_sizes, y_scale=y_scale)
    fp8 = x1.dtype is FP8 and chip.ARCH == "950"
    require(x1.dtype is x2.dtype and (fp8 or x1.dtype is torch.int8), f"x1 and x2 are int8, got {x1.dtype}, {x2.dtype}")
    require(not fp8 or (pertoken_scale is not None and bias is None), "FP8 has a scale a token and no bias")
    rows, k = x1.shape
    chip.shape("x2", x2, k, None)
    n = x2.shape[1]
    require(max(k, n) <= LARGEST, f"at most 65535 columns, got {max(k, n)}")
    require(scale.dim() == 1 and scale.shape[0] in (1, n), f"scale is [1] or [{n}], got {list(scale.shape)}")
    out = torch.int8 if output_dtype is None else SCALAR_TYPES[int(output_dtype)]
    wide = chip.LIFTED and out is torch.float32
    require(wide or out in (torch.int8, torch.float16, torch.bfloat16, torch.int32), f"output_dtype {out}")
    require(chip.ARCH != "310p" or pertoken_scale is None, "pertoken_scale is not for the 310P")
    if pertoken_scale is not None:
        chip.shape("pertoken_scale", pertoken_scale, rows)
        require(pertoken_scale.dtype is torch.float32, "pertoken_scale is float32")
        require(wide or out in (torch.float16, torch.bfloat16), f"pertoken_scale gives float16 or bfloat16, not {out}")
        allowed = (torch.float32, torch.bfloat16) if out is torch.bfloat16 else (torch.float32,)
        require(scale.dtype in allowed, f"scale {scale.dtype} for a result of {out}")
    y = (x1.double() @ x2.double()).float() * scale.float()
    y = y if pertoken_scale is None else y * pertoken_scale[:, None]
    if bias is not None:
        chip.shape("bias", bias, n)
        require(bias.dtype in (torch.bfloat16, torch.float32), "a bias behind the scales is bfloat16 or float32")
        y = y + bias.float()
    return y.round().clamp(-128, 127).to(out) if out is torch.int8 else y.to(out)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 `[..., N / 8]` as int4 values `[..., N]` in int32."""
    nibbles = torch.stack([(packed >> shift) & 0xF for shift in range(0, 32, 4)], -1).flatten(-2)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


@emulates("npu::npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight, inner_k_tiles):
    """Eight values of the last dimension to an int32."""
    chip.runs_on("npu_convert_weight_to_int4pack", *chip.A2_A3)
    chip.unused(inner_k_tiles=inner_k_tiles)
    require(weight.dtype is torch.int32, f"weight is int32, got {weight.dtype}")
    require(weight.dim() == 2, f"weight has 2 dimensions, got {weight.dim()}")
    chip.contiguous(weight=weight)
    require(weight.shape[1] % 8 == 0, f"the last dimension comes in eights, got {weight.shape[1]}")
    require(bool(((weight >= -8) & (weight <= 7)).all()), "values lie in [-8, 7]")
    parts = (weight & 0xF).view(weight.shape[0], -1, 8).long() << torch.arange(0, 32, 4)
    whole = parts.sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


@emulates("npu::npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x, weight, antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias, antiquant_group_size, inner_precise,
    weight_dtype,
):  # fmt: skip
    """x ((w + offset) scale) + bias: the offset is added first."""
    chip.runs_on("npu_weight_quant_batchmatmul", *chip.EVERY)
    chip.unused(
        quant_scale=quant_scale, quant_offset=quant_offset, inner_precise=inner_precise, weight_dtype=weight_dtype
    )
    chip.dtype("x", x, *chip.HALF)
    chip.shape("x", x, None, None)
    require(weight.dtype in (torch.int8, torch.int32), f"weight is int8, or int32 with int4, got {weight.dtype}")
    require(weight.dtype is torch.int8 or chip.ARCH != "310p", "int4 weights are not for the 310P")
    w = unpack_int4(weight) if weight.dtype is torch.int32 else weight
    k, n = w.shape
    require(x.shape[1] == k, f"weight [K, N] {[k, n]} for rows of {x.shape[1]}")
    require(max(k, n) <= LARGEST, f"at most 65535 rows and columns, got {[k, n]}")
    chip.same_dtype("x and antiquant_scale", x, antiquant_scale)
    group = antiquant_group_size
    if group:
        require(32 <= group <= k - 1 and group % 32 == 0, f"groups of 32 to {k - 1} in steps of 32, got {group}")
        chip.shape("antiquant_scale", antiquant_scale, -(-k // group), n)
    else:
        flat = antiquant_scale.numel()
        require(antiquant_scale.dim() <= 2 and flat in (1, n), f"a scale a column, got {list(antiquant_scale.shape)}")

    def spread(values):
        v = values.float().reshape(-1, n) if values.numel() > 1 else values.float().reshape(1, 1)
        return v.repeat_interleave(group, 0)[:k] if group else v

    offset = 0
    if antiquant_offset is not None:
        require(antiquant_offset.shape == antiquant_scale.shape, "offset and scale have one shape")
        chip.same_dtype("antiquant_scale and antiquant_offset", antiquant_scale, antiquant_offset)
        offset = spread(antiquant_offset)
    y = x.float() @ ((w.float() + offset) * spread(antiquant_scale))
    if bias is not None:
        want = torch.float32 if x.dtype is torch.bfloat16 else x.dtype
        require(bias.dtype is want, f"bias is {want} beside x in {x.dtype}, got {bias.dtype}")
        y = y + bias.float()
    return y.to(x.dtype)


@emulates("npu::npu_transpose_batchmatmul")
def transpose_batchmatmul(input, weight, bias, scale, perm_x1, perm_x2, perm_y, batch_split_factor):
    """Heads by heads: input turned to [B, M, K] by perm_x1, times [B, K, N], the result turned to [M, B, N]."""
    chip.runs_on("npu_transpose_batchmatmul", *chip.A2_A3)
    chip.unused(bias=bias, scale=scale)
    chip.dtype("input", input, *chip.FLOATS)
    chip.same_dtype("input and weight", input, weight)
    require(batch_split_factor == 1, f"batch_split_factor {batch_split_factor} is not emulated")
    first = list(perm_x1 or [0, 1, 2])
    require(first in ([0, 1, 2], [1, 0, 2]), f"perm_x1 {first}")
    require(list(perm_x2 or [0, 1, 2]) == [0, 1, 2], f"perm_x2 {perm_x2}")
    require(perm_y is not None and list(perm_y) == [1, 0, 2], f"perm_y is [1, 0, 2], got {perm_y}")
    x = input.permute(first)
    batch, _, k = x.shape
    chip.shape("weight", weight, batch, k, None)
    n = weight.shape[2]
    require(k % 16 == 0 and n % 16 == 0, f"K and N are multiples of 16, got {k} and {n}")
    inner = k * batch if first == [1, 0, 2] else k
    require(inner < 65536 and n < 65536, f"the inner dimension is below 65536, got {inner}")
    return torch.bmm(x.float(), weight.float()).transpose(0, 1).contiguous().to(input.dtype)
