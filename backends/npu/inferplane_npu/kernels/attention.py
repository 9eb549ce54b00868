"""Cache writes and attention over paged K and V.

On Atlas A2, A3 and the 950 npu_fused_infer_attention_score serves prompts and single tokens; on the 310P ATB's paged
attention does, over a cache in NZ. Lengths are Python integers to the first: `actual_seq_lengths` is cumulative for
ragged queries (TND), `actual_seq_lengths_kv` is not where the cache is paged.

Source: pages in Ascend/op-plugin at 517f2e7d; vllm-ascend at 182b75ea, attention_v1.py, _310p/attention.
"""

from __future__ import annotations

import functools
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from inferplane.kernels.fused.needs import declare_fused
from inferplane.plugin import Batch, Kernels, KVRequest
from inferplane_npu.graphs import attend
from inferplane_npu.kernels.when import RANK_ALTERNATIVE, OnNpu
from inferplane_npu.kvcache import BLOCK_TOKENS, ND_128, NZ_128, NpuKV

npu, atb = torch.ops.npu, torch.ops.atb
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("fused-infer",))

MASK_TOKENS = 2048
"""Side of the one mask that the causal and band modes take, whatever the lengths."""
RIGHT_DOWN_CAUSAL, BAND = 3, 4
"""Values of `sparse_mode`."""
NORM_COMPRESS = 5
"""ATB's `mask_type` for that one mask; it takes no other."""
ATB_HIDDEN = -10000.0


@functools.cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """int8 `[2048, 2048]`, 1 above the diagonal: what the causal and band modes want."""
    return torch.ones(MASK_TOKENS, MASK_TOKENS, dtype=torch.int8, device=device).triu_(1)


@functools.cache
def additive_mask(device: torch.device) -> torch.Tensor:
    """float16 `[2048, 2048]`, -10000 above the diagonal: ATB's form of the same."""
    return torch.full((MASK_TOKENS, MASK_TOKENS), ATB_HIDDEN, dtype=torch.float16, device=device).triu_(1)


def key_lens(batch: Batch) -> list[int]:
    """Lengths in tokens, not cumulative; a padded sequence attends to the first slot of block 0 and is ignored."""
    return [max(1, n) for n in batch.lens().seq_lens]


def _has_few_heads(op: Any) -> bool:
    return op.heads <= 256 and op.heads // op.kv.heads <= 64


def _has_ragged_dims(op: Any) -> bool:
    return (op.kv.dim, op.kv.v_dim) in ((128, 128), (192, 128), (192, 192))


def _has_equal_dims(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim and op.kv.dim % 16 == 0 and op.kv.dim <= 512


def _has_narrow_heads(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim and op.kv.dim in (64, 128)


HEADS = ("at most 256 heads, 64 to a KV head", _has_few_heads)


@fused("kv_write", kv_layouts=(ND_128,))
def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: NpuKV) -> None:
    """npu_scatter_pa_kv_cache in its ND mode, which is not the default."""
    npu.npu_scatter_pa_kv_cache(
        k.contiguous(), v.contiguous(), kv.first, kv.second, kv.real(batch.slots), cache_mode="Norm"
    )


@fused("kv_write", provider="atb", dtypes=(torch.float16,), features=("nz-cache", "atb"), kv_layouts=(NZ_128,))
def kv_write_nz(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: NpuKV) -> None:
    """_npu_reshape_and_cache into NZ tiles."""
    atb._npu_reshape_and_cache(k.contiguous(), v.contiguous(), kv.first, kv.second, kv.real(batch.slots).int())


@fused(
    "attention",
    HEADS,
    ("heads of 128 entries, or of 192 with values of 128 or 192", _has_ragged_dims),
    ("no window", lambda op: op.kv.window is None),
    kv_layouts=(ND_128,),
    needs_host_lens=True,
)
def attention_ragged(view: Any, q: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """All sequences in one call, in the layout TND."""
    k, v = kv.flat()
    return attend(
        batch,
        q,
        k,
        v,
        atten_mask=causal_mask(q.device),
        actual_seq_lengths=list(batch.lens().query_start[1:]),
        actual_seq_lengths_kv=key_lens(batch),
        block_table=batch.block_tables,
        num_heads=view.heads,
        num_key_value_heads=view.kv.heads,
        scale=view.scale,
        input_layout="TND",
        sparse_mode=RIGHT_DOWN_CAUSAL,
        block_size=BLOCK_TOKENS,
    )


@fused(
    "attention",
    HEADS,
    ("K and V of one width, a multiple of 16 up to 512", _has_equal_dims),
    kv_layouts=(ND_128,),
    rank=RANK_ALTERNATIVE,
    capture_safe=False,
    needs_host_lens=True,
)
def attention_by_sequence(view: Any, q: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """Head sizes and windows that TND does not take, in the layout BSND: single tokens of all sequences in one call,
    longer queries sequence by sequence.
    """
    if batch.max_query_tokens == 1:
        return attend_single(view, q, batch.seq_lens, key_lens(batch), batch.block_tables, kv)
    out = torch.empty_like(q)
    for a, b, n, table in batch.rows():
        if b - a == 1:
            lens = torch.full((1,), n, dtype=torch.int32, device=q.device)
            out[a:b] = attend_single(view, q[a:b], lens, [n], table[None], kv)
        else:
            out[a:b] = _attend_several(view, q[a:b], n, table, kv)
    return out


@fused(
    "attention",
    HEADS,
    ("sinks, and no soft cap", lambda op: op.sinks is not None and op.softcap is None),
    ("heads of 64 or 128 entries", _has_narrow_heads),
    dtypes=(torch.bfloat16,),
    kv_layouts=(ND_128,),
    features=("fused-infer", "bf16", "sinks"),
    when=partial(OnNpu, extensions=("attention.sinks",)),
    capture_safe=False,
    needs_host_lens=True,
)
def attention_with_sinks(view: Any, q: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """npu_fused_infer_attention_score_v2 with a sink a head: all sequences in one call, in the layout TND, the only one
    that takes sinks. A window is its band mode.

    Its page names heads of 128 entries in TND; gpt-oss, with 64, is served so by vllm-ascend (attention_v1.py) and by
    Huawei's recipe (cann-recipes-infer, models/gpt-oss).
    """
    window = view.kv.window
    lens, table, band = key_lens(batch), batch.block_tables, {}
    if window is not None:
        lens, table = batch.once(("inferplane_npu.band", view.kv), _skip_before_window, view.kv, batch)
        band = {"pre_tokens": window - 1, "next_tokens": 0}
    k, v = kv.flat()
    return npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        atten_mask=causal_mask(q.device),
        actual_seq_qlen=list(batch.lens().query_start[1:]),
        actual_seq_kvlen=lens,
        block_table=table,
        learnable_sink=view.sinks,
        num_query_heads=view.heads,
        num_key_value_heads=view.kv.heads,
        softmax_scale=view.scale,
        input_layout="TND",
        sparse_mode=RIGHT_DOWN_CAUSAL if window is None else BAND,
        block_size=BLOCK_TOKENS,
        **band,
    )[0]


def _skip_before_window(kv: KVRequest, batch: Batch) -> tuple[list[int], torch.Tensor]:
    """Lengths and block tables without the blocks before each sequence's windows, which may hold anything."""
    lens = batch.lens()
    queries = [b - a for a, b in pairwise(lens.query_start)]
    skipped = [kv.blocks_before_window(m, n, BLOCK_TOKENS) for m, n in zip(queries, lens.seq_lens)]
    tables = batch.block_tables
    if any(skipped):
        width = torch.arange(tables.shape[1], device=tables.device)
        place = torch.tensor(skipped, device=tables.device)[:, None] + width
        tables = tables.gather(1, place.clamp(max=tables.shape[1] - 1))
    return [n - s * BLOCK_TOKENS for n, s in zip(key_lens(batch), skipped)], tables


def _attend_several(view: Any, q: torch.Tensor, seq_len: int, table: torch.Tensor, kv: NpuKV) -> torch.Tensor:
    """Attend with the last S of a sequence's tokens, `[S, H, D]`. A window of w is the token and w - 1 before it."""
    window = view.kv.window
    band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
    skipped = view.kv.blocks_before_window(q.shape[0], seq_len, BLOCK_TOKENS)
    k, v = kv.flat()
    return npu.npu_fused_infer_attention_score(
        q[None],
        k,
        v,
        atten_mask=causal_mask(q.device),
        actual_seq_lengths=[q.shape[0]],
        actual_seq_lengths_kv=[seq_len - skipped * BLOCK_TOKENS],
        block_table=table[None, skipped:].contiguous(),
        num_heads=view.heads,
        num_key_value_heads=view.kv.heads,
        scale=view.scale,
        input_layout="BSND",
        sparse_mode=RIGHT_DOWN_CAUSAL if window is None else BAND,
        block_size=BLOCK_TOKENS,
        **band,
    )[0][0]


def attend_single(
    view: Any, q: torch.Tensor, lens: torch.Tensor, host_lens: list[int], tables: torch.Tensor, kv: NpuKV
) -> torch.Tensor:
    """One query token per sequence, `[B, H, D]`. `sparse_mode` means nothing then: a window needs a whole mask."""
    mask, window = None, view.kv.window
    if window is not None:
        # The table without the blocks before the window, which may hold anything, and the lengths without their tokens.
        skipped = (lens - window).clamp(min=0) // BLOCK_TOKENS
        place = skipped[:, None] + torch.arange(min(tables.shape[1], window // BLOCK_TOKENS + 2), device=q.device)
        tables = tables.gather(1, place.clamp(max=tables.shape[1] - 1).long())
        lens = lens - skipped * BLOCK_TOKENS
        host_lens = [n - max(0, n - window) // BLOCK_TOKENS * BLOCK_TOKENS for n in host_lens]
        key = torch.arange(tables.shape[1] * BLOCK_TOKENS, device=q.device)
        mask = ((key >= lens[:, None]) | (key < lens[:, None] - window))[:, None, None]
    k, v = kv.flat()
    return npu.npu_fused_infer_attention_score(
        q[:, None],
        k,
        v,
        atten_mask=mask,
        actual_seq_lengths_kv=host_lens,
        block_table=tables,
        num_heads=view.heads,
        num_key_value_heads=view.kv.heads,
        scale=view.scale,
        input_layout="BSND",
        block_size=BLOCK_TOKENS,
        **kv.antiquant(),
    )[0][:, 0]


@fused(
    "attention",
    ("K and V of one width, a multiple of 16 up to 128", lambda op: _has_equal_dims(op) and op.kv.dim <= 128),
    ("no window", lambda op: op.kv.window is None),
    provider="atb",
    dtypes=(torch.float16,),
    features=("nz-cache", "atb"),
    kv_layouts=(NZ_128,),
    capture_safe=False,
    needs_host_lens=True,
)
def attention_nz(view: Any, q: torch.Tensor, batch: Batch, kv: NpuKV) -> torch.Tensor:
    """ATB on the 310P: paged attention for single tokens, its split-fuse form for longer queries.

    A block holds at most 128 tokens of 128 entries a head (vllm-ascend, _310p/model_runner_310p.py).
    """
    q, out, lens = q.contiguous(), torch.empty_like(q), batch.seq_lens.clamp(min=1)
    if batch.max_query_tokens == 1:
        atb._npu_paged_attention(
            q, kv.first, kv.second, view.kv.heads, view.heads, view.scale, batch.block_tables, lens, out
        )
        return out
    starts = torch.tensor(batch.lens().query_start, dtype=torch.int32)
    atb._npu_paged_attention_splitfuse_v2(
        q,
        kv.first,
        kv.second,
        batch.block_tables,
        lens,
        additive_mask(q.device),
        starts.diff(),
        view.kv.heads,
        view.heads,
        view.scale,
        mask_type=NORM_COMPRESS,
        out=out,
    )
    return out
