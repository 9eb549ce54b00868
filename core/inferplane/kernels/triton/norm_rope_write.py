"""What lies between projection and attention in one launch: norms, rotary positions, and the write into the cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import pad_width
from inferplane.kernels.triton.dependent_launch import is_dependent, launch_options, wait_then_allow_next
from inferplane.kernels.triton.kv_write import cache_tensors, store_entries, with_contiguous_rows
from inferplane.kernels.triton.quantized_results import QuantizedActivation, keep_quantized
from inferplane.kernels.triton.rowwise import (
    allocate_quantized,
    as_bits,
    largest_magnitude,
    quant_scale,
    quantize_entries,
    store_quantized_row,
)
from inferplane.types import Batch, LayerKV


@triton.jit
def rotation_partner(entry, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each entry of a head that is rotated: the number of its pair, the number of the other entry of that pair, and
    the sign (1 or -1, float32) with which the other entry counts. INTERLEAVED: pairs are neighbours, else HALF entries
    apart.
    """
    if INTERLEAVED:
        return entry // 2, entry + 1 - 2 * (entry % 2), (2 * (entry % 2) - 1).to(tl.float32)
    else:
        second = entry // HALF
        return entry % HALF, entry + HALF - 2 * HALF * second, (2 * second - 1).to(tl.float32)


@triton.jit
def rotate(own, other, angle, pair, sign, inside, HALF: tl.constexpr):
    """Entries `own` rotated by the angles of their `pair`, float32; `other` are the other entries of the pairs."""
    cos = tl.load(angle + pair, mask=inside, other=0.0)
    sin = tl.load(angle + HALF + pair, mask=inside, other=0.0)
    return own * cos + sign * (other * sin)


@triton.jit
def _norm_rope_write(
    q, k, v, positions, table, slots, q_weight, k_weight, out, k_entries, v_entries, k_scales, v_scales,
    q_eps, k_eps, q_outer, q_inner, k_outer, k_inner, v_outer, v_inner,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr, Q_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(token, head)`: heads count through q, then k, then v. A head of q is normed with NORMS, rotated, and
    stored in `out`; one of k the same, and written into the cache; one of v only written. KIND as in `store_entries`.
    Q_OFFSET and K_OFFSET are added to the norms' weights.
    """
    wait_then_allow_next(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    entry = tl.arange(0, BLOCK)
    if head >= HEADS + KV_HEADS:
        part = head - HEADS - KV_HEADS
        inside = entry < V_DIM
        value = tl.load(v + token * v_outer + part * v_inner + entry, mask=inside, other=0.0).to(tl.float32)
        if slot >= 0:
            store_entries(value, v_entries, v_scales, slot, part, inside, entry, KV_HEADS, V_DIM, KIND, POWER_OF_TWO)
        return
    is_query = head < HEADS
    part = head - HEADS
    row = q + token * q_outer + head * q_inner
    weight, eps = q_weight, q_eps
    if not is_query:
        row = k + token * k_outer + part * k_inner
        weight, eps = k_weight, k_eps
    inside = entry < DIM
    pair, partner, sign = rotation_partner(entry, DIM // 2, INTERLEAVED)
    own = tl.load(row + entry, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        shrink = tl.rsqrt(tl.sum(own * own, 0) / DIM + eps)
        own_factor = tl.load(weight + entry, mask=inside, other=0.0).to(tl.float32)
        other_factor = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
        if Q_OFFSET != 0 or K_OFFSET != 0:
            offset = tl.where(is_query, Q_OFFSET, K_OFFSET)
            own_factor, other_factor = own_factor + offset, other_factor + offset
        own = own * shrink * own_factor
        other = other * shrink * other_factor
    value = rotate(own, other, table + tl.load(positions + token) * DIM, pair, sign, inside, DIM // 2)
    if is_query:
        tl.store(out + (token * HEADS + head) * DIM + entry, value.to(out.dtype.element_ty), mask=inside)
    elif slot >= 0:
        store_entries(value, k_entries, k_scales, slot, part, inside, entry, KV_HEADS, DIM, KIND, POWER_OF_TWO)


@triton.jit
def _mla_norm_rope_write(
    q, kv, positions, table, slots, q_weight, kv_weight, out, values, query_scales, entries, scales,
    q_eps, kv_eps, q_outer, kv_outer,
    QUERY: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(token, 0)` norms the latent, rotates the key beside it, and writes both into the cache as PARTS runs of
    PART entries with a scale each. Program `(token, 1)` norms the query; GROUP > 0: and quantizes it.
    """
    wait_then_allow_next(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 1:
        column = tl.arange(0, BLOCK_Q)
        real = column < QUERY
        x = tl.load(q + token * q_outer + column, mask=real, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / QUERY + q_eps)
        y = x * tl.load(q_weight + column, mask=real, other=0.0).to(tl.float32)
        y = y.to(out.dtype.element_ty)
        tl.store(out + token * QUERY + column, y, mask=real)
        if GROUP > 0:
            store_quantized_row(y.to(tl.float32), values, query_scales, token, QUERY, BLOCK_Q, GROUP, FP8)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    part, within = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK)
    entry = part[:, None] * PART + within[None, :]
    inside = (part < PARTS)[:, None] & (within < PART)[None, :]
    low = inside & (entry < LATENT)
    high = inside & (entry >= LATENT)
    x = tl.load(kv + token * kv_outer + entry, mask=inside, other=0.0).to(tl.float32)
    latent = tl.where(low, x, 0.0)
    shrink = tl.rsqrt(tl.sum(tl.sum(latent * latent, 1), 0) / LATENT + kv_eps)
    latent = latent * shrink * tl.load(kv_weight + entry, mask=low, other=0.0).to(tl.float32)
    pair, partner, sign = rotation_partner(tl.maximum(entry - LATENT, 0), ROPE // 2, INTERLEAVED)
    other = tl.load(kv + token * kv_outer + LATENT + partner, mask=high, other=0.0).to(tl.float32)
    angle = table + tl.load(positions + token) * ROPE
    value = tl.where(low, latent, rotate(x, other, angle, pair, sign, high, ROPE // 2))
    place = entries + slot * (PARTS * PART) + entry
    if KIND == 0:
        tl.store(place, value.to(entries.dtype.element_ty), mask=inside)
    else:
        scale = quant_scale(largest_magnitude(value, 1), 448.0 if KIND == 1 else 127.0, POWER_OF_TWO)
        tl.store(place, quantize_entries(value, scale[:, None], KIND == 1), mask=inside)
        tl.store(scales + slot * PARTS + part, scale, mask=part < PARTS)


def norm_rope_write(
    view: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `norm_rope_write` by one launch: norms q and k where the op has norms, rotates both, writes k and v into
    the cache, and returns q. One program per token and head of q, k or v.
    """
    entries, scales, kind = cache_tensors(kv)
    q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    (tokens, heads, dim), (kv_heads, v_dim) = q.shape, v.shape[1:]
    out = q.new_empty(tokens, heads, dim)
    norms = view.q_norm is not None and view.k_norm is not None
    if tokens:
        _norm_rope_write[(tokens, heads + 2 * kv_heads)](
            q, k, v, batch.positions, view.rope.table, batch.slots,
            view.q_norm.weight if norms else q, view.k_norm.weight if norms else q, out,
            entries[0], entries[1], scales[0], scales[1],
            view.q_norm.eps if norms else 0.0, view.k_norm.eps if norms else 0.0,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, V_DIM=v_dim, BLOCK=pad_width(max(dim, v_dim)), NORMS=norms,
            Q_OFFSET=view.q_norm.offset if norms else 0.0, K_OFFSET=view.k_norm.offset if norms else 0.0,
            INTERLEAVED=view.rope.interleaved, KIND=kind, POWER_OF_TWO=kv.power_of_two,  # type: ignore[attr-defined]
            num_warps=1, **launch_options(is_dependent(view)),
        )  # fmt: skip
    return out


def mla_norm_rope_write(
    view: Any, q: torch.Tensor | None, kv_a: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor | None:
    """The op `mla_norm_rope_write` by one launch: norms the latent, rotates the key beside it, writes both into the
    cache, and returns the normed query; None where the op norms none. One program per token for latent and key, and one
    for the query.

    Where the reader wants the normed query quantized, its quantized form is made in the same pass and kept for the
    reader (`keep_quantized`).
    """
    entries, scales, kind = cache_tensors(kv)
    _, parts, part = entries[0].shape
    kv_a, d, tokens = with_contiguous_rows(kv_a), view.dims, kv_a.shape[0]
    normed = q is not None and view.q_a_norm is not None
    query = with_contiguous_rows(q) if q is not None else kv_a
    width = query.shape[1]
    out = query.new_empty(tokens, width) if normed else None
    quant = view.output_quant if normed else None
    format, group = ("", 0) if quant is None else (quant.format, quant.group)
    block = max(pad_width(width), group)
    values, query_scales = allocate_quantized(query, width, group or width, format == "fp8") if format else (kv_a, kv_a)
    if tokens:
        _mla_norm_rope_write[(tokens, 1 + normed)](
            query, kv_a, batch.positions, view.rope.table, batch.slots, view.q_a_norm.weight if normed else kv_a,
            view.kv_a_norm.weight, kv_a if out is None else out, as_bits(values), query_scales, entries[0], scales[0],
            view.q_a_norm.eps if normed else 0.0, view.kv_a_norm.eps, query.stride(0), kv_a.stride(0),
            QUERY=width, LATENT=d.latent, ROPE=d.rope, PARTS=parts, PART=part,
            BLOCK_Q=block, BLOCK_PARTS=triton.next_power_of_2(parts), BLOCK=pad_width(part),
            INTERLEAVED=view.rope.interleaved, KIND=kind, POWER_OF_TWO=kv.power_of_two,  # type: ignore[attr-defined]
            GROUP=(group or block) if format else 0, FP8=format == "fp8", num_warps=4,
            **launch_options(is_dependent(view)),
        )  # fmt: skip
    if out is not None and format:
        keep_quantized(out, QuantizedActivation(format, group, values, query_scales))
    return out
