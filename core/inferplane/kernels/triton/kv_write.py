"""Rotary positions, and writing K, V and latents into core's paged storage, which quantizes them if it is quantized."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import is_dependent, launch_options, wait_then_allow_next
from inferplane.kernels.triton.rowwise import largest_magnitude, quant_scale, quantize_entries
from inferplane.types import Batch, LayerKV


@triton.jit
def _rope(
    x, positions, table, out, heads, x_outer, x_inner,
    HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, AHEAD: tl.constexpr, REST: tl.constexpr = 0,
    BLOCK_REST: tl.constexpr = 1,
):  # fmt: skip
    """Program `(token, head)` stores one head, rotated by the angles of the token's position, in `out`. Of its last
    REST entries, which are not rotated, it stores a copy.
    """
    wait_then_allow_next(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    angle = table + tl.load(positions + token) * (2 * HALF) + pair
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + HALF, mask=inside, other=0.0)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else HALF)
    source = x + token * x_outer + head * x_inner
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * (2 * HALF + REST)
    tl.store(target + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + second, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        unrotated = rest < 2 * HALF + REST
        tl.store(target + rest, tl.load(source + rest, mask=unrotated, other=0.0), mask=unrotated)


@triton.jit
def store_entries(
    value, entries, scales, slot, part, inside, within,
    PARTS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Store one part of one token in the cache: DIM entries that share a scale, and the scale if the cache is
    quantized.

    `value` is float32, and the entries that are `inside` count; the others must be 0. `within` are their numbers in the
    part, `part` is the part's number of PARTS per slot. KIND 0: stored plain; 1: in FP8; 2: in int8. POWER_OF_TWO:
    scales are rounded up to powers of two.
    """
    place = entries + (slot * PARTS + part) * DIM + within
    if KIND == 0:
        tl.store(place, value.to(entries.dtype.element_ty), mask=inside)
    else:
        scale = quant_scale(largest_magnitude(value, 0), 448.0 if KIND == 1 else 127.0, POWER_OF_TWO)
        tl.store(place, quantize_entries(value, scale, KIND == 1), mask=inside)
        tl.store(scales + slot * PARTS + part, scale)


@triton.jit
def _write(
    k, v, slots, k_entries, v_entries, k_scales, v_scales, k_outer, k_inner, v_outer, v_inner,
    PARTS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Program `(token, part)` writes head number `part` of K, and of V if V_DIM is not 0, to the token's slot; slot -1
    is padding, for which nothing is written.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    within = tl.arange(0, BLOCK)
    inside = within < DIM
    value = tl.load(k + token * k_outer + part * k_inner + within, mask=inside, other=0.0).to(tl.float32)
    store_entries(value, k_entries, k_scales, slot, part, inside, within, PARTS, DIM, KIND, POWER_OF_TWO)
    if V_DIM > 0:
        inside = within < V_DIM
        value = tl.load(v + token * v_outer + part * v_inner + within, mask=inside, other=0.0).to(tl.float32)
        store_entries(value, v_entries, v_scales, slot, part, inside, within, PARTS, V_DIM, KIND, POWER_OF_TWO)


@triton.jit
def _write_latent(
    latent, k_rope, slots, entries, scales, latent_outer, rope_outer,
    LATENT: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Program `(token, part)` writes the part's DIM entries, of the latent with the rotated key behind it, to the
    token's slot; slot -1 is padding, for which nothing is written.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    within = tl.arange(0, BLOCK)
    inside = within < DIM
    entry = part * DIM + within
    low = inside & (entry < LATENT)
    high = inside & (entry >= LATENT)
    value = tl.load(latent + token * latent_outer + entry, mask=low, other=0.0).to(tl.float32)
    value += tl.load(k_rope + token * rope_outer + entry - LATENT, mask=high, other=0.0).to(tl.float32)
    store_entries(value, entries, scales, slot, part, inside, within, PARTS, DIM, KIND, POWER_OF_TWO)


KINDS = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""KIND of a cache by the dtype of its entries; 0, plain, for any other."""


def cache_tensors(kv: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """What kernels need of a paged storage: its entries (FP8 as bits), their scales (the entries again where there are
    none, which are not read then), and its KIND.
    """
    entries = [e.view(torch.uint8) if e.dtype == torch.float8_e4m3fn else e for e in kv.entries]
    return entries, kv.scales or entries, KINDS.get(kv.entries[0].dtype, 0)


def with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` itself, or a contiguous copy if its last dimension is not contiguous, as kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The op `rope` by one launch, a program per token and head."""
    return _rotate_heads(x, positions, view.table, view.interleaved, x.shape[2], is_dependent(view))


def partial_rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The op `partial_rope` by one launch, a program per token and head."""
    return _rotate_heads(x, positions, view.rope.table, view.rope.interleaved, view.size, is_dependent(view))


def _rotate_heads(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool, size: int, ahead: bool
) -> torch.Tensor:
    """`x` `[T, H, D]` with the first `size` entries of each head rotated, contiguous."""
    x = with_contiguous_rows(x)
    tokens, heads, dim = x.shape
    out = x.new_empty(tokens, heads, dim)
    rest = {"REST": dim - size, "BLOCK_REST": triton.next_power_of_2(dim - size)} if size < dim else {}
    if tokens:
        _rope[(tokens, heads)](
            x, positions, table, out, heads, x.stride(0), x.stride(1),
            HALF=size // 2, BLOCK=max(16, triton.next_power_of_2(size // 2)), INTERLEAVED=interleaved, num_warps=1,
            **rest, **launch_options(ahead),
        )  # fmt: skip
    return out


def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `kv_write` into core's paged storage, quantized or not, by one launch: a program per token and head."""
    write_entries(k, v, batch, kv)


def index_key_write(view: Any, k: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `index_key_write` into core's paged storage, quantized or not, by one launch: a program per token."""
    write_entries(k, None, batch, kv)


def write_entries(k: torch.Tensor, v: torch.Tensor | None, batch: Batch, kv: LayerKV) -> None:
    """Store heads `k` `[T, H, D]`, and `v` `[T, H, V]` if there are any, in the slots of a step, with a scale for each
    head if the cache is quantized.
    """
    entries, scales, kind = cache_tensors(kv)
    k = with_contiguous_rows(k)
    v = k if v is None else with_contiguous_rows(v)
    tokens, heads, dim = k.shape
    v_dim = 0 if v is k else v.shape[2]
    if tokens:
        _write[(tokens, heads)](
            k, v, batch.slots, entries[0], entries[-1], scales[0], scales[-1],
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            PARTS=heads, DIM=dim, V_DIM=v_dim, BLOCK=max(16, triton.next_power_of_2(max(dim, v_dim))),
            KIND=kind, POWER_OF_TWO=kv.power_of_two, num_warps=1,  # type: ignore[attr-defined]
        )  # fmt: skip


def mla_kv_write(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `mla_kv_write` into core's paged storage, which may be quantized, by one launch: a program per token and
    run of entries that share a scale.
    """
    entries, scales, kind = cache_tensors(kv)
    latent, k_rope = with_contiguous_rows(latent), with_contiguous_rows(k_rope)
    _, parts, dim = entries[0].shape
    if latent.shape[0]:
        _write_latent[(latent.shape[0], parts)](
            latent, k_rope, batch.slots, entries[0], scales[0], latent.stride(0), k_rope.stride(0),
            LATENT=latent.shape[1], PARTS=parts, DIM=dim, BLOCK=max(16, triton.next_power_of_2(dim)),
            KIND=kind, POWER_OF_TWO=kv.power_of_two, num_warps=1,  # type: ignore[attr-defined]
        )  # fmt: skip
