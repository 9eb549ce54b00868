"""What lies between projection and attention in one launch: norms, rotation, and the cache's write."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import asked, begin, how
from inferplane.kernels.triton.kv_write import side_by_side, store_part, stored
from inferplane.kernels.triton.quantized_results import hand
from inferplane.kernels.triton.rowwise import codes_for, encoded, raw, scale_of, store_codes
from inferplane.types import Batch, LayerKV


@triton.jit
def turned_with(entry, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of rotated entries: their pair, the entry each is turned with, and the sign of that one's share."""
    if INTERLEAVED:
        return entry // 2, entry + 1 - 2 * (entry % 2), (2 * (entry % 2) - 1).to(tl.float32)
    else:
        second = entry // HALF
        return entry % HALF, entry + HALF - 2 * HALF * second, (2 * second - 1).to(tl.float32)


@triton.jit
def rotated(own, other, angle, pair, sign, inside, HALF: tl.constexpr):
    """`own` turned by the angles of `pair`, float32; `other` are the entries it is turned with."""
    cos = tl.load(angle + pair, mask=inside, other=0.0)
    sin = tl.load(angle + HALF + pair, mask=inside, other=0.0)
    return own * cos + sign * (other * sin)


@triton.jit
def _enter(
    q, k, v, positions, table, slots, q_weight, k_weight, out, k_entries, v_entries, k_scales, v_scales,
    q_eps, k_eps, q_outer, q_inner, k_outer, k_inner, v_outer, v_inner,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    entry = tl.arange(0, BLOCK)
    if head >= HEADS + KV_HEADS:
        part = head - HEADS - KV_HEADS
        inside = entry < V_DIM
        value = tl.load(v + token * v_outer + part * v_inner + entry, mask=inside, other=0.0).to(tl.float32)
        if slot >= 0:
            store_part(value, v_entries, v_scales, slot, part, inside, entry, KV_HEADS, V_DIM, KIND, POWER_OF_TWO)
        return
    is_query = head < HEADS
    part = head - HEADS
    row = q + token * q_outer + head * q_inner
    weight, eps = q_weight, q_eps
    if not is_query:
        row = k + token * k_outer + part * k_inner
        weight, eps = k_weight, k_eps
    inside = entry < DIM
    pair, partner, sign = turned_with(entry, DIM // 2, INTERLEAVED)
    own = tl.load(row + entry, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        shrink = tl.rsqrt(tl.sum(own * own, 0) / DIM + eps)
        own = own * shrink * tl.load(weight + entry, mask=inside, other=0.0).to(tl.float32)
        other = other * shrink * tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
    value = rotated(own, other, table + tl.load(positions + token) * DIM, pair, sign, inside, DIM // 2)
    if is_query:
        tl.store(out + (token * HEADS + head) * DIM + entry, value.to(out.dtype.element_ty), mask=inside)
    elif slot >= 0:
        store_part(value, k_entries, k_scales, slot, part, inside, entry, KV_HEADS, DIM, KIND, POWER_OF_TWO)


@triton.jit
def _enter_latent(
    q, kv, positions, table, slots, q_weight, kv_weight, out, data, code_scales, entries, scales,
    q_eps, kv_eps, q_outer, kv_outer,
    QUERY: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, POWER_OF_TWO: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
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
            store_codes(y.to(tl.float32), data, code_scales, token, QUERY, BLOCK_Q, GROUP, FP8)
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
    pair, partner, sign = turned_with(tl.maximum(entry - LATENT, 0), ROPE // 2, INTERLEAVED)
    other = tl.load(kv + token * kv_outer + LATENT + partner, mask=high, other=0.0).to(tl.float32)
    angle = table + tl.load(positions + token) * ROPE
    value = tl.where(low, latent, rotated(x, other, angle, pair, sign, high, ROPE // 2))
    place = entries + slot * (PARTS * PART) + entry
    if KIND == 0:
        tl.store(place, value.to(entries.dtype.element_ty), mask=inside)
    else:
        scale = scale_of(tl.max(tl.abs(value), 1), 448.0 if KIND == 1 else 127.0, POWER_OF_TWO)
        tl.store(place, encoded(value, scale[:, None], KIND == 1), mask=inside)
        tl.store(scales + slot * PARTS + part, scale, mask=part < PARTS)


def _power(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def norm_rope_write(
    p: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """One program a token and head of q, k or v."""
    entries, scales, kind = stored(kv)
    q, k, v = side_by_side(q), side_by_side(k), side_by_side(v)
    (tokens, heads, dim), (kv_heads, v_dim) = q.shape, v.shape[1:]
    out = q.new_empty(tokens, heads, dim)
    norms = p.q_norm is not None and p.k_norm is not None
    if tokens:
        _enter[(tokens, heads + 2 * kv_heads)](
            q, k, v, batch.positions, p.rope.table, batch.slots,
            p.q_norm.weight if norms else q, p.k_norm.weight if norms else q, out,
            entries[0], entries[1], scales[0], scales[1],
            p.q_norm.eps if norms else 0.0, p.k_norm.eps if norms else 0.0,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, V_DIM=v_dim, BLOCK=_power(max(dim, v_dim)), NORMS=norms,
            INTERLEAVED=p.rope.interleaved, KIND=kind, POWER_OF_TWO=kv.power_of_two,  # type: ignore[attr-defined]
            num_warps=1, **how(asked(p)),
        )  # fmt: skip
    return out


def mla_norm_rope_write(
    p: Any, q: torch.Tensor | None, kv_a: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor | None:
    """One program a token for the latent and the rotated key, and one for the query where it is normed; it is coded
    too, where its reader would code it.
    """
    entries, scales, kind = stored(kv)
    _, parts, part = entries[0].shape
    kv_a, d, tokens = side_by_side(kv_a), p.dims, kv_a.shape[0]
    normed = q is not None and p.q_a_norm is not None
    query = side_by_side(q) if q is not None else kv_a
    width = query.shape[1]
    out = query.new_empty(tokens, width) if normed else None
    format, group, block = p.codes if normed else "", p.codes_group, max(_power(width), p.codes_group)
    data, code_scales = codes_for(query, width, group or width, format == "fp8") if format else (kv_a, kv_a)
    if tokens:
        _enter_latent[(tokens, 1 + normed)](
            query, kv_a, batch.positions, p.rope.table, batch.slots, p.q_a_norm.weight if normed else kv_a,
            p.kv_a_norm.weight, kv_a if out is None else out, raw(data), code_scales, entries[0], scales[0],
            p.q_a_norm.eps if normed else 0.0, p.kv_a_norm.eps, query.stride(0), kv_a.stride(0),
            QUERY=width, LATENT=d.latent, ROPE=d.rope, PARTS=parts, PART=part,
            BLOCK_Q=block, BLOCK_PARTS=triton.next_power_of_2(parts), BLOCK=_power(part),
            INTERLEAVED=p.rope.interleaved, KIND=kind, POWER_OF_TWO=kv.power_of_two,  # type: ignore[attr-defined]
            GROUP=(group or block) if format else 0, FP8=format == "fp8", num_warps=4, **how(asked(p)),
        )  # fmt: skip
    return out if out is None or not format else hand(out, format, group, data, code_scales)
