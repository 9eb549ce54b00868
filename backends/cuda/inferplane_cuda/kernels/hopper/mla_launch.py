"""From op calls to launches: queries folded into the latent space, descriptors, workspace, results unfolded."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.hopper import mla, mla_fp8, mla_fp8_mma
from inferplane_cuda.kernels.hopper.gluon_compat import TensorDescriptor
from inferplane_cuda.kernels.hopper.work_split import OVERHEAD, ROWS

FP8_MAX = 448.0
LOG2_E = 1.4426950408889634
WIDTH = mla.LATENT + mla.ROPE


def programs(device: torch.device) -> int:
    """One program a multiprocessor; the count of an H200 where there is none to ask."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def box(tensor: torch.Tensor, rows: int, columns: int, bits: int = 16) -> Any:
    """A descriptor by which TMA copies boxes of `tensor` `[N, width]` into swizzled shared memory."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128 if columns * bits >= 1024 else columns * bits // 8,
                                  element_bitwidth=bits, rank=2)  # fmt: skip
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


class Workspace:
    """Unfinished results of shared units: as many as programs can leave, whatever the step; and by the first program of
    a shared unit, how many have left theirs, 0 between steps. Made once a device.
    """

    _made: dict[torch.device, Workspace] = {}

    def __init__(self, device: torch.device) -> None:
        self.programs = programs(device)
        self.parts = torch.empty(2 * self.programs * ROWS, mla.LATENT, device=device)
        self.masses = torch.empty(2 * self.programs * ROWS, device=device)
        self.arrived = torch.zeros(self.programs, device=device, dtype=torch.int32)

    @classmethod
    def of(cls, device: torch.device) -> Workspace:
        """The one of a device; steps run one after another, so one is enough."""
        if device not in cls._made:
            cls._made[device] = cls(device)
        return cls._made[device]


def folded(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in the latent space, `[T H, R + P]`, and `W_v` `[H, V, R]`."""
    d = p.dims
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = q_nope.new_empty(q_nope.shape[0], d.heads, WIDTH)
    torch.bmm(q_nope.transpose(0, 1), w_k, out=q[..., : d.latent].transpose(0, 1))
    q[..., d.latent :].copy_(q_rope)
    return q.view(-1, WIDTH), w_v


def unfolded(p: Any, mid: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """Results `[T, H, R]` times each head's `W_v`: `[T, H, V]`."""
    out = mid.new_empty(mid.shape[0], p.dims.heads, p.dims.value)
    torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2), out=out.transpose(0, 1))
    return out


def attend(q: torch.Tensor, heads: int, scale: float, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Attention of folded queries `q` `[T H, R + P]` to the latents of a bfloat16, FP8 or int8 cache: `[T, H, R]`."""
    mid = q.new_empty(q.shape[0] // heads, heads, mla.LATENT)
    space = Workspace.of(q.device)
    tiles = triton.cdiv(batch.max_query_tokens * heads, ROWS)
    units = len(batch.seq_lens) * tiles
    queries = box(q, ROWS, mla.LATENT), box(q, ROWS, mla.ROPE)
    step = batch.block_tables, batch.query_start, batch.seq_lens, mid, space.parts, space.masses, space.arrived
    sizes = scale * LOG2_E, batch.block_tables.stride(0), units, tiles
    options = {
        "HEADS": heads, "STAGES": 2, "BLOCK_UNITS": max(256, triton.next_power_of_2(units)), "OVER": OVERHEAD,
        "num_warps": 8,
    }  # fmt: skip
    entries = kv.entries[0].view(-1, WIDTH)  # type: ignore[attr-defined]
    if entries.dtype == torch.bfloat16:
        latents = box(entries, 64, mla.LATENT), box(entries, 64, mla.ROPE)
        mla.mla_decode[(space.programs,)](*queries, *latents, *step, *sizes, **options)
    else:
        bits = entries.view(torch.uint8)
        latents = box(bits, 64, mla.LATENT, 8), box(bits, 64, mla.ROPE, 8)
        scales = kv.scales[0]  # type: ignore[attr-defined]
        fp8 = entries.dtype == torch.float8_e4m3fn
        mla_fp8.mla_decode_fp8[(space.programs,)](*queries, *latents, scales, *step, *sizes, FP8=fp8, **options)
    return mid


def attend_fp8(q: torch.Tensor, heads: int, scale: float, batch: Batch, kv: Any) -> torch.Tensor:
    """As `attend`, with FP8 products over latents that have one scale a token; queries are quantized row by row."""
    mid = q.new_empty(q.shape[0] // heads, heads, mla.LATENT)
    space = Workspace.of(q.device)
    tiles = triton.cdiv(batch.max_query_tokens * heads, ROWS)
    units = len(batch.seq_lens) * tiles
    latent = q[:, : mla.LATENT].float()
    q_scales = (latent.abs().amax(1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (latent / q_scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    mla_fp8_mma.mla_decode_fp8_mma[(space.programs,)](
        box(codes, ROWS, mla.LATENT, 8), box(q, ROWS, mla.ROPE), box(kv.codes.view(torch.uint8), 64, mla.LATENT, 8),
        box(kv.ropes, 64, mla.ROPE), q_scales, kv.scales, batch.block_tables, batch.query_start, batch.seq_lens, mid,
        space.parts, space.masses, space.arrived, scale * LOG2_E, batch.block_tables.stride(0), units, tiles,
        HEADS=heads, STAGES=2, BLOCK_UNITS=max(256, triton.next_power_of_2(units)), OVER=OVERHEAD, num_warps=8,
    )  # fmt: skip
    return mid


def mla_absorbed_fp8(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latent attention of few query tokens with FP8 products; see `inferplane_cuda.kernels.hopper.mla_fp8_mma`."""
    q, w_v = folded(p, q_nope, q_rope)
    return unfolded(p, attend_fp8(q, p.dims.heads, p.scale, batch, kv), w_v)


def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latent attention of few query tokens; see `inferplane_cuda.kernels.hopper.mla` and `mla_fp8`."""
    q, w_v = folded(p, q_nope, q_rope)
    return unfolded(p, attend(q, p.dims.heads, p.scale, batch, kv), w_v)
