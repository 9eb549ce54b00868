"""Latent attention at the sizes that the vendor's operators know: 512 + 64 entries a token.

Queries are rotated, and keys stored, with even entries first: scores do not depend on an order that both share.

Source: pages of npu_kv_rmsnorm_rope_cache, npu_interleave_rope, npu_transpose_batchmatmul and
npu_fused_infer_attention_score in Ascend/op-plugin at 517f2e7d; the docstring of torch_npu.atb's
npu_multi_head_latent_attention; vllm-ascend at 182b75ea, mla_v1.py.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.fused.latents import split_kv_b
from inferplane.kernels.fused.needs import PLAIN_KV_B, declare_fused, is_plain_linear
from inferplane.plugin import Batch, Kernels
from inferplane_npu.graphs import attend
from inferplane_npu.kernels.attention import RIGHT_DOWN_CAUSAL, causal_mask, key_lens
from inferplane_npu.kernels.basic import ROPE_HALF, cos_sin
from inferplane_npu.kernels.when import RANK_ALTERNATIVE, OnNpu
from inferplane_npu.kvcache import BLOCK_TOKENS, LATENT, LATENT_ND_128, LATENT_NZ_128, NZ, ROTARY, NpuKV, even_first

npu, atb = torch.ops.npu, torch.ops.atb
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("fused-infer",))
BOTH = (LATENT_ND_128, LATENT_NZ_128)


def _has_supported_latents(op: Any) -> bool:
    return (op.dims.latent, op.dims.rope) == (LATENT, ROTARY)


def _has_absorbed_dims(op: Any) -> bool:
    d = op.dims
    return (
        _has_supported_latents(op)
        and d.heads in (1, 2, 4, 8, 16, 32, 64, 128)
        and d.nope % 16 == 0
        and d.value % 16 == 0
    )


def _has_expanded_dims(op: Any) -> bool:
    return _has_supported_latents(op) and op.dims.nope == 128 and op.dims.value == 128 and op.dims.heads <= 256


def _has_plain_block(op: Any) -> bool:
    products = [product for product in (op.q_a, op.q_b, op.kv_a, op.o) if product is not None]
    return all(map(is_plain_linear, products)) and PLAIN_KV_B[1](op.expanded)


ABSORBED = ("latents of 512 + 64, a power of two of heads up to 128, head sizes that 16 divides", _has_absorbed_dims)
EXPANDED = ("latents of 512 + 64 and heads of 128 + 64 with values of 128", _has_expanded_dims)


@fused("mla_kv_write", kv_layouts=BOTH)
def mla_kv_write(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: NpuKV) -> None:
    """npu_scatter_pa_kv_cache: the latent goes where a key would, the rotated key where a value would."""
    npu.npu_scatter_pa_kv_cache(
        latent[:, None].contiguous(),
        even_first(k_rope)[:, None].contiguous(),
        kv.first,
        kv.second,
        kv.real(batch.slots),
        cache_mode="PA_NZ" if kv.nz else "Norm",
    )


@fused("mla_absorbed", ABSORBED, kv_layouts=BOTH, needs_host_lens=True)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """Fold kv_b into the query, attend to the latents, unfold: three calls."""
    return _attend_absorbed(view, q_nope, even_first(q_rope), batch, kv)


def fold_heads(view: Any, q_nope: torch.Tensor) -> torch.Tensor:
    """`[T, H, N]` times each head's `[N, 512]`: `[T, H, 512]`. The weight is a view: kv_b is stored once."""
    return npu.npu_transpose_batchmatmul(q_nope, split_kv_b(view)[0], perm_x1=[1, 0, 2], perm_y=[1, 0, 2])


def unfold_heads(view: Any, heads_first: torch.Tensor) -> torch.Tensor:
    """`[H, T, 512]` times each head's `[512, V]`: `[T, H, V]`."""
    w_v = split_kv_b(view)[1].transpose(1, 2)
    return npu.npu_transpose_batchmatmul(heads_first, w_v, perm_y=[1, 0, 2])


def _attend_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    # The result comes heads first: the product that unfolds it may not transpose 128 heads of 512 entries itself.
    if kv.nz:
        latent, rotated = (t.view(t.shape[0], 1, -1, BLOCK_TOKENS, NZ) for t in (kv.first, kv.second))
    else:
        latent, rotated = kv.flat()
    mid = attend(
        batch,
        fold_heads(view, q_nope).contiguous(),
        latent,
        latent,
        heads_first=True,
        query_rope=q_rope.contiguous(),
        key_rope=rotated,
        atten_mask=causal_mask(q_nope.device),
        actual_seq_lengths=list(batch.lens().query_start[1:]),
        actual_seq_lengths_kv=key_lens(batch),
        block_table=batch.block_tables,
        num_heads=view.dims.heads,
        num_key_value_heads=1,
        scale=view.scale,
        input_layout="TND_NTD",
        sparse_mode=RIGHT_DOWN_CAUSAL,
        block_size=BLOCK_TOKENS,
    )
    return unfold_heads(view, mid)


@fused(
    "mla_absorbed",
    ABSORBED,
    provider="atb",
    features=("fused-infer", "atb"),
    kv_layouts=(LATENT_ND_128,),
    rank=RANK_ALTERNATIVE,
    capture_safe=False,
    needs_host_lens=True,
)
def mla_absorbed_atb(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """ATB's latent attention, which has no mask: each token is a sequence of its own that ends with it."""
    lens, tables = batch.lens(), batch.block_tables
    seq_lens = key_lens(batch)
    if batch.max_query_tokens > 1:
        counts = [b - a for a, b in pairwise(lens.query_start)]
        seq_lens = [n - count + 1 + i for n, count in zip(seq_lens, counts) for i in range(count)]
        tables = tables.repeat_interleave(torch.tensor(counts, device=tables.device), 0)
    mid = atb.npu_multi_head_latent_attention(
        fold_heads(view, q_nope).contiguous(),
        even_first(q_rope).contiguous(),
        kv.first,
        kv.second,
        tables,
        [max(1, n) for n in seq_lens],
        view.dims.heads,
        view.scale,
        1,
    )
    return unfold_heads(view, mid.transpose(0, 1).contiguous())


@fused("mla_expanded", EXPANDED, PLAIN_KV_B, kv_layouts=(LATENT_ND_128,), capture_safe=False, needs_host_lens=True)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """Gather the latents, expand them, attend to dense keys and values."""
    return _attend_expanded(view, q_nope, even_first(q_rope), batch, kv)


def _attend_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    d, lens = view.dims, batch.lens()
    cumulative_lens = list(accumulate(lens.seq_lens))
    latent = q_nope.new_empty(cumulative_lens[-1], 1, LATENT)
    rotated = q_nope.new_empty(cumulative_lens[-1], 1, ROTARY)
    npu.npu_gather_pa_kv_cache(kv.first, kv.second, batch.block_tables, batch.seq_lens, latent, rotated)
    both = F.linear(latent[:, 0], view.kv_b.weight).view(-1, d.heads, d.nope + d.value)
    k, v = both.split((d.nope, d.value), -1)
    return npu.npu_fused_infer_attention_score(
        q_nope.contiguous(),
        k.contiguous(),
        v.contiguous(),
        query_rope=q_rope.contiguous(),
        key_rope=rotated.expand(-1, d.heads, -1).contiguous(),
        atten_mask=causal_mask(q_nope.device),
        actual_seq_lengths=list(lens.query_start[1:]),
        actual_seq_lengths_kv=cumulative_lens,
        num_heads=d.heads,
        num_key_value_heads=d.heads,
        scale=view.scale,
        input_layout="TND",
        sparse_mode=RIGHT_DOWN_CAUSAL,
    )[0]


@fused(
    "mla_block",
    ("one rank", lambda op: op.reduce is None),
    ("neighbours as pairs", lambda op: op.rope.interleaved),
    ("plain products", _has_plain_block),
    ("a norm in the plan's dtype", lambda op: op.enter.kv_a_norm.weight.dtype is None),
    (ABSORBED[0], lambda op: _has_absorbed_dims(op.absorbed)),
    (EXPANDED[0], lambda op: _has_expanded_dims(op.expanded)),
    kv_layouts=(LATENT_ND_128,),
    packs={"rope.table": ROPE_HALF, "enter.rope.table": ROPE_HALF},
    needs_host_lens=True,
)
def mla_block(view: Any, x: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """The block, with norm, rotation and write of the latent in one call (npu_kv_rmsnorm_rope_cache)."""
    d, tokens = view.dims, x.shape[0]
    c = x
    if view.q_a is not None:
        c = npu.npu_rms_norm(
            F.linear(x, view.q_a.weight, view.q_a.bias), view.enter.q_a_norm.weight, view.enter.q_a_norm.eps
        )[0]
    q = F.linear(c, view.q_b.weight, view.q_b.bias).view(tokens, d.heads, -1)
    q_nope, q_rope = q.split((d.nope, d.rope), -1)
    cos, sin = cos_sin(view.rope.table, batch.positions, x.dtype)
    q_rope = npu.npu_interleave_rope(
        q_rope[:, :, None].contiguous(), cos[:, None, None].contiguous(), sin[:, None, None].contiguous()
    )[:, :, 0]
    # All tokens as one sequence: as many of one token each would need as many blocks as tokens.
    one = (1, 1, tokens, -1)
    npu.npu_kv_rmsnorm_rope_cache(
        F.linear(x, view.kv_a.weight, view.kv_a.bias).view(one),
        view.enter.kv_a_norm.weight,
        cos.view(one),
        sin.view(one),
        kv.real(batch.slots),
        kv.second,
        kv.first,
        epsilon=view.enter.kv_a_norm.eps,
        cache_mode="PA",
    )
    few, many = batch.split()
    parts, n = [], 0 if few is None else few.tokens
    if few is not None:
        parts.append(_attend_absorbed(view.absorbed, q_nope[:n], q_rope[:n], few, kv))
    if many is not None:
        parts.append(_attend_expanded(view.expanded, q_nope[n:], q_rope[n:], many, kv))
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return F.linear(y.flatten(1), view.o.weight, view.o.bias)
