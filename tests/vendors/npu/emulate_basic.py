"""Norms, rotary positions, activations and formats, as their pages describe them.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip

IMPLEMENTATIONS = emulates = Implementations()
ACL_ND, ACL_NZ = 2, 29


def norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@emulates("npu::npu_rms_norm")
def rms_norm(input, gamma, epsilon):
    """gamma is the input's last dimension; float32 gamma beside 16-bit input on A2 and A3 only."""
    chip.runs_on("npu_rms_norm", *chip.EVERY)
    chip.dtype("input", input, *chip.FLOATS)
    require(2 <= input.dim() <= 8, f"input has 2 to 8 dimensions, got {input.dim()}")
    chip.shape("gamma", gamma, input.shape[-1])
    wide = chip.ARCH != "310p" and gamma.dtype is torch.float32
    require(gamma.dtype == input.dtype or wide, f"gamma {gamma.dtype} beside input {input.dtype}")
    if chip.ARCH == "310p":
        require(input.shape[-1] * input.element_size() >= 32, "the last dimension has at least 32 bytes on the 310P")
    return norm(input, gamma, epsilon)


@emulates("npu::npu_add_rms_norm")
def add_rms_norm(x1, x2, gamma, epsilon):
    """Results: the norm, rstd, and the sum."""
    chip.runs_on("npu_add_rms_norm", *chip.EVERY)
    chip.dtype("x1", x1, *chip.FLOATS)
    chip.same_dtype("x1, x2 and gamma", x1, x2, gamma)
    require(x1.shape == x2.shape, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} have one shape")
    chip.shape("gamma", gamma, x1.shape[-1])
    s = x1.float() + x2.float()
    y, rstd = norm(s, gamma, epsilon)
    return y.to(x1.dtype), rstd, s.to(x1.dtype)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@emulates("npu::npu_rotary_mul")
def rotary_mul(input, r1, r2, rotary_mode, rotate):
    """x cos + rotate(x) sin; cosines and sines are as wide as x."""
    chip.runs_on("npu_rotary_mul", *chip.EVERY)
    chip.unused(rotate=rotate)
    chip.dtype("input", input, *chip.FLOATS)
    chip.same_dtype("input, r1 and r2", input, r1, r2)
    require(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    require(input.dim() in (3, 4), f"input has 3 or 4 dimensions, got {input.dim()}")
    dim, heads = input.shape[-1], input.shape[-2]
    require(dim % 2 == 0 and dim < 896, f"the last dimension is even and below 896, got {dim}")
    if chip.ARCH == "310p":  # which knows the compiled form only
        require(rotary_mode == "half", "the 310P takes halves only")
        require(input.dim() == 4 and dim == 128, f"the 310P takes 4 dimensions, the last of 128, got {[*input.shape]}")
    require(heads < 1000 and (input.dim() == 3 or input.shape[0] < 1000), "fewer than 1000 heads and sequences")
    for name, r in (("r1", r1), ("r2", r2)):
        fits = r.dim() == input.dim() and all(a in (1, b) for a, b in zip(r.shape[:-1], input.shape))
        require(fits and r.shape[-1] == input.shape[-1], f"{name} {list(r.shape)} beside input {list(input.shape)}")
        require(rotary_mode == "half" or r.shape[-2] == 1, f"{name} is for one head in mode interleave")
    x, cos, sin = input.float(), r1.float(), r2.float()
    turned = _rotate_half(x) if rotary_mode == "half" else torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    return (x * cos + turned * sin).to(input.dtype)


def even_first(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def deinterleave(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """reshape(D / 2, 2), transpose, then rotation in halves; float32."""
    q = even_first(x.float())
    return q * cos.float() + _rotate_half(q) * sin.float()


@emulates("npu::npu_interleave_rope")
def interleave_rope(x, cos, sin):
    """[B, N, S, 64]; cosines and sines for one head."""
    chip.runs_on("npu_interleave_rope", *chip.A2_A3)
    chip.dtype("x", x, *chip.HALF)
    chip.same_dtype("x, cos and sin", x, cos, sin)
    chip.contiguous(x=x, cos=cos, sin=sin)
    chip.shape("x", x, None, None, None, 64)
    for name, r in (("cos", cos), ("sin", sin)):
        chip.shape(name, r, x.shape[0], 1, None, 64)
        require(r.shape[2] in (1, x.shape[2]), f"{name} has 1 or {x.shape[2]} positions, got {r.shape[2]}")
    return deinterleave(x, cos, sin).to(x.dtype)


@emulates("npu::npu_swiglu")
def swiglu(input, dim):
    """swish(first half) * second half."""
    chip.runs_on("npu_swiglu", *chip.A2_A3)
    chip.dtype("input", input, *chip.FLOATS)
    chip.contiguous(input=input)
    require(input.shape[dim] % 2 == 0, f"dimension {dim} is even, got {input.shape[dim]}")
    require(input.numel() > 0, "an empty tensor is not taken")
    a, b = input.float().chunk(2, dim)
    return (F.silu(a) * b).to(input.dtype)


@emulates("npu::npu_format_cast")
def format_cast(input, acl_format, customize_dtype, input_dtype):
    """Another order in memory, the same numbers: shape and strides as the user sees them stay."""
    chip.runs_on("npu_format_cast", *chip.EVERY)
    chip.unused(customize_dtype=customize_dtype, input_dtype=input_dtype)
    require(acl_format in (ACL_ND, ACL_NZ), f"acl_format {acl_format}: 2 is ND, 29 is NZ")
    require(input.dim() >= 2, f"a matrix, got {input.dim()} dimensions")
    out = input.clone()
    if acl_format == ACL_NZ:
        chip.put_in_nz(out)
    return out


@emulates("npu::npu_clipped_swiglu")
def clipped_swiglu(x, group_index, dim, alpha, limit, bias, interleaved):
    """Of A, clamped from above, and B, clamped on both sides: `A sigmoid(alpha A) (B + bias)`."""
    chip.runs_on("npu_clipped_swiglu", "910b", "910_93")
    chip.unused(group_index=group_index)
    chip.dtype("x", x, *chip.FLOATS)
    chip.contiguous(x=x)
    require(x.dim() > 1 and dim in (-1, x.dim() - 1), f"the last of several dimensions is emulated, got {dim}")
    require(x.shape[-1] % 2 == 0, f"an even last dimension, got {list(x.shape)}")
    h = x.float()
    a, b = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)
