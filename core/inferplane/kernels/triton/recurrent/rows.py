"""What recurrent layers do row by row, in float32 whatever comes in: norms with a gate, gates of the delta rule."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.activations import activate
from inferplane.kernels.triton.recurrent.sequences import softplus
from inferplane.kernels.triton.rowwise import row_layout, warps_for


@triton.jit
def _gated_norm(
    x, gate, weight, out, eps, heads, x_outer, x_inner, gate_outer, gate_inner,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program `(row, group)` norms WIDTH entries, times silu of their gates before or after it."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    inside, column = within < WIDTH, group * WIDTH + within
    token, head = row // heads, row % heads
    h = tl.load(x + token * x_outer + head * x_inner + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_outer + head * gate_inner + column, mask=inside, other=0.0).to(tl.float32)
    factor = activate(z, 1)
    if GATE_FIRST:
        h *= factor
    h *= tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        h *= factor
    tl.store(out + row * (WIDTH * GROUPS) + column, h.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _delta_rule_gates(
    a, b, a_log, dt_bias, decay, beta, a_outer, b_outer, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program `token`: both gates of all heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = head < HEADS
    step = tl.load(a + token * a_outer + head, mask=inside, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32))
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    share = tl.load(b + token * b_outer + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(decay + token * HEADS + head, -rate * step, mask=inside)
    tl.store(beta + token * HEADS + head, 1.0 / (1.0 + tl.exp(-share)), mask=inside)


def gated_rms_norm(view: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The op `gated_rms_norm`, one program per row and group."""
    width = x.shape[-1] // view.groups
    x, heads, outer, inner = row_layout(x)
    gate, _, gate_outer, gate_inner = row_layout(gate)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = max(16, triton.next_power_of_2(width))
    rows = x.numel() // x.shape[-1]
    if rows:
        _gated_norm[(rows, view.groups)](
            x, gate, view.weight, out, view.eps, heads, outer, inner, gate_outer, gate_inner,
            WIDTH=width, GROUPS=view.groups, GATE_FIRST=view.gate_first, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out


def delta_rule_gates(view: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `delta_rule_gates`, one program per token: decay and beta, float32 `[T, H]`."""
    a, b = (t if t.stride(-1) == 1 else t.contiguous() for t in (a, b))
    tokens, heads = a.shape
    decay, beta = (torch.empty(tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    if tokens:
        _delta_rule_gates[(tokens,)](
            a, b, view.a_log, view.dt_bias, decay, beta, a.stride(0), b.stride(0),
            HEADS=heads, BLOCK=triton.next_power_of_2(heads), num_warps=1,
        )  # fmt: skip
    return decay, beta
