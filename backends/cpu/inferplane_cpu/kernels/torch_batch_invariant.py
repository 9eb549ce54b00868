"""Batch-invariant kernels of torch's own operators, for `deterministic=True` where no native kernel is bound.

Every product has one shape whatever the step: tiles of 16 rows, the last one padded, and attention one query at a time.
They are slower than kernels whose products take their shape from the step, so they rank below those.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, Kernels, LayerKV, When

KERNELS = Kernels()
RANK = 5
TILE_ROWS = 16


def _has_plain_activations(op: Any) -> bool:
    return op.activation_quant is None and op.out_dtype in (None, torch.float32)


def _has_no_kv_b_bias(op: Any) -> bool:
    return getattr(op.kv_b, "bias", None) is None


ANY = When(dtypes=(torch.float32, torch.bfloat16, torch.float16))
CHUNKS = When(ANY.dtypes, extensions=("attention.chunk",))
LINEAR = When(ANY.dtypes, needs=(("plain activations, and a result as usual or in float32", _has_plain_activations),))
LATENT = When(ANY.dtypes, needs=(("kv_b without bias", _has_no_kv_b_bias),))


def multiply_in_tiles(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x weight^T + bias` in tiles of equal shape."""
    rows = x.shape[0]
    pad_rows = F.pad(x, (0, 0, 0, -rows % TILE_ROWS))
    return torch.cat([F.linear(tile.contiguous(), weight, bias) for tile in pad_rows.split(TILE_ROWS)])[:rows]


@KERNELS("linear", "torch_batch_invariant", when=LINEAR, rank=RANK, batch_invariant=True)
def linear(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Tiles of 16 rows; in float32 throughout where the result is."""
    if view.out_dtype is torch.float32:
        bias = None if view.bias is None else view.bias.float()
        return multiply_in_tiles(x.float(), view.weight.float(), bias)
    return multiply_in_tiles(x, view.weight, view.bias)


@KERNELS("lm_head", "torch_batch_invariant", when=ANY, rank=RANK, batch_invariant=True)
def lm_head(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The rows that want logits, in tiles of 16."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return multiply_in_tiles(rows, view.weight).float()


@KERNELS("moe_experts", "torch_batch_invariant", when=ANY, rank=RANK, batch_invariant=True)
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Expert after expert, so that a token's sum has its experts' order; tiles of 16 rows."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for e in ids.unique().tolist():
        if e < 0:  # on another rank
            continue
        token, j = torch.where(ids == e)
        gate, up = multiply_in_tiles(x[token], view.gate_up[e]).float().chunk(2, -1)
        y = multiply_in_tiles((F.silu(gate) * up).to(x.dtype), view.down[e])
        out.index_add_(0, token, y.float() * weights[token, j, None])
    return out.to(x.dtype)


def _query_by_query(batch: Batch, kv: LayerKV, chunk: int | None = None) -> Any:
    """The row, the keys that it sees and the sequence's entries, one query token after the other."""
    window = kv.request.window
    for a, b, n, table in batch.rows():
        entries = kv.read(table, n)
        for row in range(a, b):
            seen = n - (b - 1 - row)
            first = 0 if window is None else max(0, seen - window)
            yield row, slice(first if chunk is None else max(first, (seen - 1) // chunk * chunk), seen), entries


@KERNELS("attention", "torch_batch_invariant", when=CHUNKS, rank=RANK, batch_invariant=True, needs_host_lens=True)
def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """One query token at a time, over the keys it sees."""
    h, g = view.heads, view.kv.heads
    out = q.new_empty(q.shape[0], h, view.kv.v_dim)
    for row, seen, entries in _query_by_query(batch, kv, view.chunk):
        k, v = (t[seen].to(q.dtype).transpose(0, 1).contiguous()[None] for t in entries)
        queries = q[row].reshape(1, g, h // g, -1)
        out[row] = F.scaled_dot_product_attention(queries, k, v, scale=view.scale).reshape(h, -1)
    return out


def _attend_absorbed(
    view: Any, kv_b: torch.Tensor, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    d = view.dims
    w_k, w_v = kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    out = q_nope.new_empty(q_nope.shape[0], d.heads, d.value)
    for row, seen, (entries,) in _query_by_query(batch, kv):
        q = torch.cat((torch.bmm(q_nope[row][:, None], w_k)[:, 0], q_rope[row]), -1)
        c = entries[seen].to(q.dtype).contiguous()[None, None]
        mid = F.scaled_dot_product_attention(q[None, None], c, c, scale=view.scale)[0, 0, :, : d.latent]
        out[row] = torch.bmm(mid[:, None], w_v.transpose(1, 2))[:, 0]
    return out


@KERNELS("mla_absorbed", "torch_batch_invariant", when=ANY, rank=RANK, batch_invariant=True, needs_host_lens=True)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """One query token at a time, `kv_b` folded into it."""
    return _attend_absorbed(view, view.kv_b, q_nope, q_rope, batch, kv)


@KERNELS("mla_expanded", "torch_batch_invariant", when=LATENT, rank=RANK, batch_invariant=True, needs_host_lens=True)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """As for few query tokens, so that a chunk's size does not choose the arithmetic."""
    return _attend_absorbed(view, view.kv_b.weight, q_nope, q_rope, batch, kv)
