"""Sparse attention in larger parts: an indexer over int8 keys, and the whole block behind one prologue.

The vendor's indexer over int8 keys wants int8 queries too, and one factor a head in float16: a head's weight times its
query's scale. The factors of a token are divided by the largest of them, which changes no choice, so that none leaves
the range of float16; the scales that the operator multiplies them with are 1.

An indexer's products may have weights in int8, which are expanded within them also where activations in int8 are
requested: that is the more precise.

Source: pages of npu_quant_lightning_indexer, npu_rotate_quant and npu_mla_prolog_v3 in Ascend/op-plugin at 517f2e7d;
vllm-ascend at 182b75ea, sfa_v1.py, which rotates queries and keys by the same matrix before it quantizes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.fused.needs import PLAIN_KV_B, declare_fused, is_plain_linear
from inferplane.plugin import PLAIN, Batch, Context, IndexedCache, Kernels, PackedStorage, Packing
from inferplane_npu.kernels.basic import ROPE_HALF, cos_sin
from inferplane_npu.kernels.mla import ABSORBED
from inferplane_npu.kernels.quant import INT8_OR_PLAIN, multiply_quantized
from inferplane_npu.kernels.sparse import (
    INDEX,
    TOP,
    attend_chosen,
    complete,
    count_keys,
    has_index_dims,
    lengths_of,
    list_first,
    put,
    put_quantized,
    sees_at_most,
    select_positions,
)
from inferplane_npu.kernels.when import RANK_ALTERNATIVE, OnNpu
from inferplane_npu.kvcache import FRACTAL_NZ, LATENT, LATENT_ND_128
from inferplane_npu.sparse_caches import INDEX_DIM, INDEX_INT8_128, INDEX_ND_128, NpuIndexKV, NpuInt8IndexKV

npu = torch.ops.npu
KERNELS = Kernels()
PARTS = ("layer_norm", "partial_rope")
"""What an indexer consists of, besides."""
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=partial(OnNpu, extensions=PARTS))
Quantize = Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`(view, rows [R, 128])` -> the rows, rotated where the op does so, in int8, and their scales float32 `[R]`."""


def _is_plain_indexer(op: Any) -> bool:
    weights = op.weights_proj
    return (
        all(is_plain_linear(product) and product.bias is None for product in (op.wq_b, op.wk))
        and weights.activation_quant is None
        and weights.weight.format == PLAIN
        and weights.bias is None
        and op.k_norm.offset == 0
        and op.k_norm.weight.dtype is None
    )


def _has_whole_rotation(op: Any) -> bool:
    return op.spread is not None and op.spread.block == INDEX_DIM


INT8_PRODUCTS: dict[str, Any] = {
    "formats": (PLAIN, "int8_row"),
    "packs": dict.fromkeys(("wq_b.weight", "wk.weight"), INT8_OR_PLAIN),
}
"""Options of indexers whose products may have weights in int8."""
PLAIN_INDEXER = ("plain products without biases", _is_plain_indexer)
FEW = ("at most 2048 chosen tokens", lambda op: 1 <= op.dims.top <= 2048)
ROTATED = ("keys rotated as a whole", _has_whole_rotation)
ROTATED_OR_PLAIN = (
    "keys rotated as a whole or not at all",
    lambda op: op.spread is None or _has_whole_rotation(op),
)


@functools.cache
def hadamard(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix `[128, 128]` with rows of length 1. In bfloat16 its entries are off by one factor, 1.0001."""
    matrix = torch.ones(1, 1)
    while len(matrix) < INDEX_DIM:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / INDEX_DIM**0.5).to(dtype).to(device)


def _rotate_and_quantize(view: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return npu.npu_rotate_quant(rows, hadamard(rows.dtype, rows.device))


def _quantize(view: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return npu.npu_dynamic_quant(rows if view.spread is None else rows @ hadamard(rows.dtype, rows.device))


@fused(
    "lightning_indexer",
    INDEX,
    FEW,
    PLAIN_INDEXER,
    ROTATED,
    features=("sparse-attention-int8", "rotate-quant-int8"),
    kv_layouts=(INDEX_INT8_128,),
    **INT8_PRODUCTS,
)
def lightning_indexer_rotated_int8(
    view: Any, x: torch.Tensor, c: torch.Tensor, batch: Batch, kv: NpuInt8IndexKV
) -> torch.Tensor:
    """Products, rotation, npu_rotate_quant of queries and keys, the write, npu_quant_lightning_indexer."""
    return _choose_int8(view, x, c, batch, kv, _rotate_and_quantize)


@fused(
    "lightning_indexer",
    INDEX,
    FEW,
    PLAIN_INDEXER,
    ROTATED_OR_PLAIN,
    features=("sparse-attention-int8",),
    kv_layouts=(INDEX_INT8_128,),
    rank=RANK_ALTERNATIVE,
    **INT8_PRODUCTS,
)
def lightning_indexer_int8(
    view: Any, x: torch.Tensor, c: torch.Tensor, batch: Batch, kv: NpuInt8IndexKV
) -> torch.Tensor:
    """The same with a product by the rotation's matrix and npu_dynamic_quant."""
    return _choose_int8(view, x, c, batch, kv, _quantize)


def _choose_int8(
    view: Any, x: torch.Tensor, c: torch.Tensor, batch: Batch, kv: NpuInt8IndexKV, quantize: Quantize
) -> torch.Tensor:
    top, (q, k) = view.dims.top, _project(view, x, c, batch)
    put_quantized(batch, kv, *quantize(view, k))
    if sees_at_most(batch, top):
        return list_first(batch, top)
    entries, scales = quantize(view, q.flatten(0, 1))
    factors = _weights_of(view, x) * scales.view(q.shape[:2])
    factors = factors / factors.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    found = npu.npu_quant_lightning_indexer(
        entries.view(q.shape),
        kv.keys,
        factors.half(),
        torch.ones_like(factors, dtype=torch.float16),
        kv.scales,
        0,
        0,
        actual_seq_lengths_key=count_keys(batch),
        layout_key="PA_BSND",
        sparse_count=top,
        **lengths_of(batch),
    )
    return complete(found, batch, top)


def _project(view: Any, x: torch.Tensor, c: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries `[T, J, 128]` and keys `[T, 128]` of an indexer, from its block's input and low-rank query."""
    d, norm = view.dims, view.k_norm
    q = _multiply(view.wq_b, c).view(-1, d.heads, d.dim)
    k = F.layer_norm(_multiply(view.wk, x), (d.dim,), norm.weight, norm.bias, norm.eps)
    rope = getattr(view.rope, "rope", view.rope)  # within a partial rotation
    cos, sin = batch.once(f"inferplane_npu.index_rope.{rope.table.data_ptr()}", _rope_rows, rope, batch, x.dtype)
    both = torch.cat((q, k[:, None]), 1)
    rotated, rest = both.split((d.rope, d.dim - d.rope), -1)
    mode = "interleave" if rope.interleaved else "half"
    both = torch.cat((npu.npu_rotary_mul(rotated.contiguous(), cos, sin, mode), rest), -1)
    return both[:, :-1].contiguous(), both[:, -1].contiguous()


def _multiply(product: Any, x: torch.Tensor) -> torch.Tensor:
    is_plain = isinstance(product.weight, torch.Tensor)
    return F.linear(x, product.weight) if is_plain else multiply_quantized(product, x)


def _rope_rows(rope: Any, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[T, 1, P]` for every rotated entry."""
    rows = rope.table[batch.positions].to(dtype)
    rows = rows.repeat_interleave(2, -1) if rope.interleaved else torch.cat((rows, rows), -1)
    cos, sin = rows[:, :, None].unbind(1)
    return cos, sin


def _weights_of(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights of the heads, float32 `[T, J]`."""
    weight = view.weights_proj.weight
    return F.linear(x.to(weight.dtype), weight).float() * view.dims.scale


def _choose(
    view: Any, x: torch.Tensor, c: torch.Tensor, batch: Batch, kv: NpuIndexKV, weights_dtype: torch.dtype
) -> torch.Tensor:
    """The op `lightning_indexer` over keys in the plan's dtype."""
    q, k = _project(view, x, c, batch)
    put(kv.keys, kv.real(batch.slots), k)
    return select_positions(view, q, _weights_of(view, x).to(weights_dtype), batch, kv)


HIDDEN_SIZES = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
RANKS = (1536, 2048)
"""What npu_mla_prolog_v3 knows of hidden sizes and of a query's low rank."""
NZ_COLUMNS = Packing(
    "torch_npu.nz_columns",
    lambda w: npu.npu_format_cast(w.t().contiguous(), FRACTAL_NZ),
    storage=PackedStorage.refuse("copies to the host lose the format FRACTAL_NZ"),
)


def _split_heads(nope: int, value: int) -> Packing:
    """A packing of `kv_b` for heads of these sizes: its rows for keys `[H, nope, 512]`, and those for values as columns
    `[H, 512, value]`, as two tensors: the prologue takes no views."""

    def split(kv_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv_b.view(-1, nope + value, LATENT).split((nope, value), 1)
        return keys.contiguous(), values.transpose(1, 2).contiguous()

    return Packing(f"torch_npu.kv_b_{nope}_{value}", split)


def _has_plain_prologue(op: Any) -> bool:
    products = (op.q_a, op.q_b, op.kv_a)
    norms = (op.enter.q_a_norm, op.enter.kv_a_norm)
    return (
        all(is_plain_linear(product) and product.bias is None for product in products)
        and is_plain_linear(op.o)
        and PLAIN_KV_B[1](op.expanded)
        and op.enter.output_quant is None
        and all(norm is not None and norm.weight.dtype is None for norm in norms)
    )


def _has_prologue_sizes(op: Any) -> bool:
    rank, hidden = op.q_a.weight.shape
    return ABSORBED[1](op.absorbed) and hidden in HIDDEN_SIZES and rank in RANKS


def _has_known_indexer(op: Any) -> bool:
    i = op.indexer
    return i is None or (has_index_dims(i) and TOP[1](i) and _is_plain_indexer(i) and i.spread is None)


def _weights_dtype(op: Any, ctx: Context) -> torch.dtype:
    """Of an indexer's weights on this series."""
    return ctx.dtype if ctx.features.lacking(("float32-index-weights",)) else torch.float32


def _declare_block(nope: int, value: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a kernel of the block for heads of these sizes."""
    heads = _split_heads(nope, value)
    return fused(
        "sparse_mla_block",
        (f"heads of {nope} + 64 with values of {value}", lambda op: (op.dims.nope, op.dims.value) == (nope, value)),
        ("one rank", lambda op: op.reduce is None),
        ("neighbours as pairs", lambda op: op.rope.interleaved),
        ("plain products without biases, and norms in the plan's dtype", _has_plain_prologue),
        ("latents of 512 + 64, and a hidden size and a rank of queries that the prologue knows", _has_prologue_sizes),
        ("no indexer, or a plain one over unrotated keys of 128", _has_known_indexer),
        dtypes=(torch.bfloat16,),
        features=("bf16", "sparse-attention", "mla-prolog"),
        kv_layouts=(LATENT_ND_128, INDEX_ND_128),
        packs={
            **dict.fromkeys(("q_a.weight", "q_b.weight", "kv_a.weight"), NZ_COLUMNS),
            **dict.fromkeys(("absorbed.kv_b", "expanded.kv_b.weight"), heads),
            **dict.fromkeys(("rope.table", "enter.rope.table"), ROPE_HALF),
        },
        prepare=_weights_dtype,
    )


@_declare_block(128, 128)
def sparse_mla_block_128(view: Any, x: torch.Tensor, batch: Batch, kv: IndexedCache) -> torch.Tensor:
    """npu_mla_prolog_v3 (products, norms, rotation, both writes, folded queries), the indexer, and
    npu_sparse_flash_attention, for heads of DeepSeek-V3.2's sizes."""
    return _run_block(view, x, batch, kv)


@_declare_block(192, 256)
def sparse_mla_block_192(view: Any, x: torch.Tensor, batch: Batch, kv: IndexedCache) -> torch.Tensor:
    """The same for heads of GLM-5's sizes."""
    return _run_block(view, x, batch, kv)


def _run_block(view: Any, x: torch.Tensor, batch: Batch, kv: IndexedCache) -> torch.Tensor:
    keys, values = view.absorbed.kv_b
    latents: Any = kv.kv
    q_norm, kv_norm = view.enter.q_a_norm, view.enter.kv_a_norm
    cos, sin = cos_sin(view.rope.table, batch.positions, x.dtype)
    q, q_rope, _, c, _ = npu.npu_mla_prolog_v3(
        x.contiguous(),
        view.q_a.weight,
        view.q_b.weight,
        keys,
        view.kv_a.weight,
        q_norm.weight,
        kv_norm.weight,
        sin.contiguous(),
        cos.contiguous(),
        latents.first,
        latents.second,
        cache_index=latents.real(batch.slots),
        rmsnorm_epsilon_cq=q_norm.eps,
        rmsnorm_epsilon_ckv=kv_norm.eps,
        cache_mode="PA_BSND",
        query_norm_flag=True,
    )
    if view.indexer is not None:
        index_keys: Any = kv.index_keys
        kv.selection.positions = _choose(view.indexer, x, c, batch, index_keys, view.prepared)
    chosen: Any = kv.selection.positions
    mid = attend_chosen(q, q_rope, chosen, view.absorbed.scale, batch, latents)
    y = npu.npu_transpose_batchmatmul(mid.transpose(0, 1).contiguous(), values, perm_y=[1, 0, 2])
    return F.linear(y.flatten(1), view.o.weight, view.o.bias)
