"""Sparse attention: index keys, the choice of tokens, and attention to the chosen ones alone.

Lengths, block tables and chosen positions are tensors to these operators, so a captured step needs no new arguments.

What the pages leave open, and what is made of it:

- Of equal scores no page says which position wins. The kernels take the lower one for granted, as the op wants it: the
  vendor's own test of npu_quant_lightning_indexer sorts stably. Where it is otherwise on a device, the sample
  "v32_ties" of `index_select` fails, and those of `lightning_indexer`, most of whose keys are zero.
- What a row holds behind the positions that a query sees is not said either. So a query that sees at most K tokens has
  all of them in ascending order by torch, whatever the operator gives, and -1 behind; a longer one sees more than K.
- Attention stops at the first -1 of a row (the vendor's test, test_npu_sparse_flash_attention.py).

Source: pages of npu_lightning_indexer, npu_sparse_flash_attention, npu_kv_quant_sparse_flash_attention,
npu_scatter_nd_update_ and npu_dynamic_quant in Ascend/op-plugin at 517f2e7d; vllm-ascend at 182b75ea, sfa_v1.py and
device_op.py, which attend to prompts by the same operator as to single tokens, and write index keys so on all series.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.kernels.fused.needs import PLAIN_KV_B, declare_fused
from inferplane.plugin import Batch, Kernels
from inferplane_npu.graphs import recorder_of
from inferplane_npu.kernels.attention import RIGHT_DOWN_CAUSAL
from inferplane_npu.kernels.mla import ABSORBED, fold_heads, unfold_heads
from inferplane_npu.kernels.when import RANK_ALTERNATIVE, OnNpu
from inferplane_npu.kvcache import LATENT_ND_128, ROTARY, NpuKV, even_first
from inferplane_npu.sparse_caches import (
    INDEX_DIM,
    INDEX_INT8_128,
    INDEX_ND_128,
    LATENT_TILES_128,
    TILE,
    NpuIndexKV,
    NpuInt8IndexKV,
    NpuTiledLatentKV,
)

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("sparse-attention",))

MLA_ABSORB = 2
"""The only `attention_mode`: keys and values are one latent, beside which keys have a rotated part."""
TILED, COMBINED = 2, 1
"""Values of the quantization modes and of `quant_scale_repo_mode`: a scale a tile, stored in the row."""
INDEX_HEADS = (8, 16, 24, 32, 64)
"""Of a query: the 950's list, which A2 and A3 take too."""


def has_index_dims(op: Any) -> bool:
    """Whether the vendor's indexers know the sizes of an op with `dims`, but for the number of chosen tokens."""
    return op.dims.dim == INDEX_DIM and op.dims.heads in INDEX_HEADS


def _has_known_top(op: Any) -> bool:
    return 1 <= op.dims.top <= 2048 or op.dims.top in range(3072, 8193, 1024)


INDEX = ("index keys of 128 entries, and 8, 16, 24, 32 or 64 heads", has_index_dims)
TOP = ("at most 2048 chosen tokens, or 3072 to 8192 in steps of 1024", _has_known_top)
KEYS = ("index keys of 128 entries", lambda op: op.kv.dim == INDEX_DIM)


def lengths_of(batch: Batch) -> dict[str, Any]:
    """What all these operators are called with: where queries end, how they and the cache lie, and the mask."""
    return {
        "actual_seq_lengths_query": batch.query_start[1:],
        "block_table": batch.block_tables,
        "layout_query": "TND",
        "sparse_mode": RIGHT_DOWN_CAUSAL,
    }


def count_keys(batch: Batch) -> torch.Tensor:
    """int32 `[B]` lengths; a padded sequence has one token, the first slot of block 0, and its result is ignored."""
    return batch.once("inferplane_npu.count_keys", lambda: batch.seq_lens.clamp(min=1))


def put(tensor: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows `[T, W]` into slots of a tensor whose blocks have 128 rows."""
    npu.npu_scatter_nd_update_(tensor.view(-1, rows.shape[1]), slots[:, None], rows)


@fused("index_key_write", KEYS, kv_layouts=(INDEX_ND_128,))
def index_key_write(view: Any, k: torch.Tensor, batch: Batch, kv: NpuIndexKV) -> None:
    """npu_scatter_nd_update_ over slots: the vendor's paged writes want values beside keys."""
    put(kv.keys, kv.real(batch.slots), k[:, 0])


@fused("index_key_write", KEYS, kv_layouts=(INDEX_INT8_128,))
def index_key_write_int8(view: Any, k: torch.Tensor, batch: Batch, kv: NpuInt8IndexKV) -> None:
    """npu_dynamic_quant of each key, and the same write of entries and scales."""
    put_quantized(batch, kv, *npu.npu_dynamic_quant(k[:, 0]))


def put_quantized(batch: Batch, kv: NpuInt8IndexKV, entries: torch.Tensor, scales: torch.Tensor) -> None:
    """Store keys in int8 `[T, 128]` and their scales float32 `[T]`."""
    slots = kv.real(batch.slots)
    put(kv.keys, slots, entries)
    put(kv.scales, slots, scales[:, None].half())


@fused("index_select", INDEX, TOP, features=("sparse-attention", "float32-index-weights"), kv_layouts=(INDEX_ND_128,))
def index_select(view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: NpuIndexKV) -> torch.Tensor:
    """npu_lightning_indexer, with the heads' weights in float32."""
    return select_positions(view, q, w, batch, kv)


@fused("index_select", INDEX, TOP, rank=RANK_ALTERNATIVE, kv_layouts=(INDEX_ND_128,))
def index_select_half(view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: NpuIndexKV) -> torch.Tensor:
    """The same with the weights in the queries' dtype, which is all that the 950 takes."""
    return select_positions(view, q, w.to(q.dtype), batch, kv)


def select_positions(view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: NpuIndexKV) -> torch.Tensor:
    """The op `index_select` of a view with `dims`; weights in float32 or in the queries' dtype."""
    top = view.dims.top
    if sees_at_most(batch, top):
        return list_first(batch, top)
    found = npu.npu_lightning_indexer(
        q.contiguous(),
        kv.keys,
        w.contiguous(),
        actual_seq_lengths_key=count_keys(batch),
        layout_key="PA_BSND",
        sparse_count=top,
        **lengths_of(batch),
    )[0]
    return complete(found, batch, top)


def sees_at_most(batch: Batch, top: int) -> bool:
    """Whether the host knows that no sequence has more tokens, so that nothing need be scored; not under capture, for a
    replay has other lengths.
    """
    lens = batch.host_lens
    return lens is not None and recorder_of(batch) is None and max(lens.seq_lens) <= top


def list_first(batch: Batch, top: int) -> torch.Tensor:
    """int32 `[T, top]`: the positions up to each token's own, then -1. Of a token at a later one than `top` it has the
    first ones.
    """

    def make() -> torch.Tensor:
        order = torch.arange(top, dtype=torch.int32, device=batch.positions.device)
        return torch.where(order <= batch.positions[:, None], order, -1).int()

    return batch.once(f"inferplane_npu.list_first.{top}", make)


def complete(found: torch.Tensor, batch: Batch, top: int) -> torch.Tensor:
    """What an indexer found, `[T, 1, top]`, with all positions for the queries that see no more than `top`."""
    short = (batch.positions < top)[:, None]
    return torch.where(short, list_first(batch, top), found[:, 0])


@fused("sparse_mla_absorbed", ABSORBED, kv_layouts=(LATENT_ND_128,))
def sparse_mla_absorbed(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: NpuKV
) -> torch.Tensor:
    """Fold kv_b into the query, npu_sparse_flash_attention, unfold."""
    return _attend_folded(view, q_nope, q_rope, chosen, batch, kv)


@fused("sparse_mla_expanded", ABSORBED, PLAIN_KV_B, kv_layouts=(LATENT_ND_128,))
def sparse_mla_expanded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: NpuKV
) -> torch.Tensor:
    """The same for prompts: no operator reads chosen tokens of expanded keys."""
    return _attend_folded(absorb(view), q_nope, q_rope, chosen, batch, kv)


def absorb(view: Any) -> Any:
    """The view of an expanded op as one of the absorbed op, whose `kv_b` is the same weight."""
    return view.once(
        "inferplane_npu.absorb", lambda: SimpleNamespace(dims=view.dims, scale=view.scale, kv_b=view.kv_b.weight)
    )


def _attend_folded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: NpuKV
) -> torch.Tensor:
    mid = attend_chosen(fold_heads(view, q_nope), even_first(q_rope), chosen, view.scale, batch, kv)
    return unfold_heads(view, mid.transpose(0, 1).contiguous())


def attend_chosen(
    q: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, scale: float, batch: Batch, kv: NpuKV
) -> torch.Tensor:
    """`[T, H, 512]` of folded queries `[T, H, 512]`, whose rotated parts `[T, H, 64]` have even entries first."""
    return npu.npu_sparse_flash_attention(
        q.contiguous(),
        kv.first,
        kv.first,
        chosen[:, None].contiguous(),
        scale,
        actual_seq_lengths_kv=count_keys(batch),
        query_rope=q_rope.contiguous(),
        key_rope=kv.second,
        layout_kv="PA_BSND",
        attention_mode=MLA_ABSORB,
        **lengths_of(batch),
    )[0]


@fused(
    "sparse_mla_absorbed",
    ABSORBED,
    features=("sparse-attention", "sparse-attention-int8"),
    kv_layouts=(LATENT_TILES_128,),
)
def sparse_mla_absorbed_int8(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: NpuTiledLatentKV
) -> torch.Tensor:
    """As `sparse_mla_absorbed`, by npu_kv_quant_sparse_flash_attention over latents in int8."""
    return _attend_tiles(view, q_nope, q_rope, chosen, batch, kv)


@fused(
    "sparse_mla_expanded",
    ABSORBED,
    PLAIN_KV_B,
    features=("sparse-attention", "sparse-attention-int8"),
    kv_layouts=(LATENT_TILES_128,),
)
def sparse_mla_expanded_int8(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: NpuTiledLatentKV
) -> torch.Tensor:
    """The same for prompts."""
    return _attend_tiles(absorb(view), q_nope, q_rope, chosen, batch, kv)


def _attend_tiles(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: NpuTiledLatentKV
) -> torch.Tensor:
    mid = npu.npu_kv_quant_sparse_flash_attention(
        torch.cat((fold_heads(view, q_nope), even_first(q_rope)), -1),
        kv.rows,
        kv.rows,
        chosen[:, None].contiguous(),
        view.scale,
        TILED,
        TILED,
        actual_seq_lengths_kv=count_keys(batch),
        layout_kv="PA_BSND",
        attention_mode=MLA_ABSORB,
        quant_scale_repo_mode=COMBINED,
        tile_size=TILE,
        rope_head_dim=ROTARY,
        **lengths_of(batch),
    )
    return unfold_heads(view, mid.transpose(0, 1).contiguous())
