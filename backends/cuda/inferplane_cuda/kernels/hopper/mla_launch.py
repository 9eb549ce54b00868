"""Calls of `mla_absorbed` as launches: fold queries, make descriptors and a workspace, launch, unfold results."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.hopper import mla, mla_fp8, mla_fp8_mma
from inferplane_cuda.kernels.hopper.gluon_compat import TensorDescriptor
from inferplane_cuda.kernels.hopper.work_split import ROWS, UNIT_OVERHEAD

FP8_MAX = 448.0
LOG2_E = 1.4426950408889634
WIDTH = mla.LATENT + mla.ROPE


def count_programs(device: torch.device) -> int:
    """Programs to launch: one per multiprocessor; as many as an H200 has where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def tma_descriptor(tensor: torch.Tensor, rows: int, columns: int, bits: int = 16) -> Any:
    """A TMA descriptor: copies boxes of `rows` x `columns` of `tensor` `[N, width]` to swizzled shared memory."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128 if columns * bits >= 1024 else columns * bits // 8,
                                  element_bitwidth=bits, rank=2)  # fmt: skip
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


class Workspace:
    """Memory for unfinished results of shared units, two per program whatever the step, and counters: of each unit, by
    its first program, how many programs have stored their part; 0 between steps. Allocated once per device.
    """

    _made: dict[torch.device, Workspace] = {}

    def __init__(self, device: torch.device) -> None:
        self.programs = count_programs(device)
        self.parts = torch.empty(2 * self.programs * ROWS, mla.LATENT, device=device)
        self.masses = torch.empty(2 * self.programs * ROWS, device=device)
        self.arrived = torch.zeros(self.programs, device=device, dtype=torch.int32)

    @classmethod
    def of(cls, device: torch.device) -> Workspace:
        """The one of a device; steps run one after another, so one is enough."""
        if device not in cls._made:
            cls._made[device] = cls(device)
        return cls._made[device]


def fold_query(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold `kv_b` into queries: latent queries `[T H, R + P]`, and `W_v` `[H, V, R]`."""
    d = view.dims
    w_k, w_v = view.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = q_nope.new_empty(q_nope.shape[0], d.heads, WIDTH)
    torch.bmm(q_nope.transpose(0, 1), w_k, out=q[..., : d.latent].transpose(0, 1))
    q[..., d.latent :].copy_(q_rope)
    return q.view(-1, WIDTH), w_v


def unfold_result(view: Any, mid: torch.Tensor, w_v: torch.Tensor) -> torch.Tensor:
    """Results `[T, H, R]` times each head's `W_v`: `[T, H, V]`."""
    out = mid.new_empty(mid.shape[0], view.dims.heads, view.dims.value)
    torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2), out=out.transpose(0, 1))
    return out


def launch_mla(q: torch.Tensor, heads: int, scale: float, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Attention of folded queries `q` `[T H, R + P]` to the latents of a bfloat16, FP8 or int8 cache: `[T, H, R]`."""
    mid = q.new_empty(q.shape[0] // heads, heads, mla.LATENT)
    space = Workspace.of(q.device)
    tiles = triton.cdiv(batch.max_query_tokens * heads, ROWS)
    units = len(batch.seq_lens) * tiles
    queries = tma_descriptor(q, ROWS, mla.LATENT), tma_descriptor(q, ROWS, mla.ROPE)
    step = batch.block_tables, batch.query_start, batch.seq_lens, mid, space.parts, space.masses, space.arrived
    sizes = scale * LOG2_E, batch.block_tables.stride(0), units, tiles
    options = {
        "HEADS": heads, "STAGES": 2, "BLOCK_UNITS": max(256, triton.next_power_of_2(units)), "OVERHEAD": UNIT_OVERHEAD,
        "num_warps": 8,
    }  # fmt: skip
    entries = kv.entries[0].view(-1, WIDTH)  # type: ignore[attr-defined]
    if entries.dtype == torch.bfloat16:
        latents = tma_descriptor(entries, 64, mla.LATENT), tma_descriptor(entries, 64, mla.ROPE)
        mla.mla_decode[(space.programs,)](*queries, *latents, *step, *sizes, **options)
    else:
        bits = entries.view(torch.uint8)
        latents = tma_descriptor(bits, 64, mla.LATENT, 8), tma_descriptor(bits, 64, mla.ROPE, 8)
        scales = kv.scales[0]  # type: ignore[attr-defined]
        fp8 = entries.dtype == torch.float8_e4m3fn
        mla_fp8.mla_decode_fp8[(space.programs,)](*queries, *latents, scales, *step, *sizes, FP8=fp8, **options)
    return mid


def launch_mla_fp8(q: torch.Tensor, heads: int, scale: float, batch: Batch, kv: Any) -> torch.Tensor:
    """`launch_mla` with FP8 products over latents that have one scale per token; queries are quantized row by row."""
    mid = q.new_empty(q.shape[0] // heads, heads, mla.LATENT)
    space = Workspace.of(q.device)
    tiles = triton.cdiv(batch.max_query_tokens * heads, ROWS)
    units = len(batch.seq_lens) * tiles
    latent = q[:, : mla.LATENT].float()
    q_scales = (latent.abs().amax(1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    quantized = (latent / q_scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    mla_fp8_mma.mla_decode_fp8_mma[(space.programs,)](
        tma_descriptor(quantized, ROWS, mla.LATENT, 8), tma_descriptor(q, ROWS, mla.ROPE),
        tma_descriptor(kv.latents.view(torch.uint8), 64, mla.LATENT, 8),
        tma_descriptor(kv.ropes, 64, mla.ROPE), q_scales, kv.scales, batch.block_tables,
        batch.query_start, batch.seq_lens, mid, space.parts, space.masses, space.arrived, scale * LOG2_E,
        batch.block_tables.stride(0), units, tiles,
        HEADS=heads, STAGES=2, BLOCK_UNITS=max(256, triton.next_power_of_2(units)), OVERHEAD=UNIT_OVERHEAD, num_warps=8,
    )  # fmt: skip
    return mid


def mla_absorbed_fp8(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latent attention of few query tokens with FP8 products; see `inferplane_cuda.kernels.hopper.mla_fp8_mma`."""
    q, w_v = fold_query(view, q_nope, q_rope)
    return unfold_result(view, launch_mla_fp8(q, view.dims.heads, view.scale, batch, kv), w_v)


def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Latent attention of few query tokens; see `inferplane_cuda.kernels.hopper.mla` and `mla_fp8`."""
    q, w_v = fold_query(view, q_nope, q_rope)
    return unfold_result(view, launch_mla(q, view.dims.heads, view.scale, batch, kv), w_v)
