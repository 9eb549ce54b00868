"""The blocks around attention of one KV head: low-rank queries, the shared entry, a grouped output; with compressed
entries and an indexer, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.attention import each_range
from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.collective import AllReduce
from inferplane.ops.compressed.attention import CompressedAttention, SharedKVAttention
from inferplane.ops.compressed.compressor import Compressor, CompressorDims, make_compressor
from inferplane.ops.compressed.draw import draw_caches
from inferplane.ops.compressed.indexer import CompressedIndexer, make_compressed_indexer
from inferplane.ops.compressed.output import GroupedLinear
from inferplane.ops.compressed.rotation import SharedKVNormRopeWrite, TailRope, make_enter
from inferplane.ops.draw import Draw, Sequences, step_inputs
from inferplane.ops.linear import Linear
from inferplane.ops.op import BLOCK, Cost, Op, Sample, Workload, placeholder
from inferplane.ops.sparse.indexer import IndexDims, write_few_keys
from inferplane.types import Batch, CompressedCache, KVRequest, LayerKV, StepKind
from inferplane.types.kv import make_compressed_cache


class SharedKVBlock(Op, name="shared_kv_block", extension=True):
    """An attention block of one KV head whose entries are keys and values, all within a window.

    `c = q_a_norm(q_a(x)); q = enter(q_b(c), kv(x))` norms and rotates both and writes the entries; `y = attend(q)`;
    `y = o_b(o_a(unrotate(y)))`. Sequences with few query tokens attend by `few`, the others by `many`.

    Args of the call:
        x: `[T, D]`. batch: the step. cache: the layer's entries, changed.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `q_b` linear to `heads` H of the entry's size; `kv` linear to one entry; `unrotate` rotates the output by
    the opposite of the query's position; `o_a` and `o_b` the output's projection.

    Source: DeepSeek-V4 (2026), section 2.3; transformers' modeling_deepseek_v4.
    """

    tolerance = BLOCK
    has_shared_kv = True

    q_a: Linear
    q_a_norm: RMSNorm
    q_b: Linear
    kv: Linear
    enter: SharedKVNormRopeWrite
    few: SharedKVAttention
    many: SharedKVAttention
    unrotate: TailRope
    o_a: GroupedLinear
    o_b: Linear
    heads: int
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor, batch: Batch, cache: LayerKV) -> torch.Tensor:
        q = self.q_b(self.q_a_norm(self.q_a(x))).view(x.shape[0], self.heads, -1)
        q = self.enter(q, self.kv(x), batch, cache)
        y = each_range(batch, (q,), self.few, self.many, cache)
        y = self.o_b(self.o_a(self.unrotate(y, batch.positions).flatten(1)))
        return y if self.reduce is None else self.reduce(y)

    def cost(self, load: Workload) -> Cost:
        """The sum over the children; `few` and `many` share the sequences and cost the same, so one of them counts."""
        return sum((child.cost(load) for path, child in self.children() if path != "few"), Cost())

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, prefill and a mixture."""
        request = KVRequest("shared_kv", 1, 48, window=20, rope=16)

        def sample(label: str, sequences: Sequences, kind: StepKind) -> Sample:
            inputs = step_inputs(request, sequences, lambda d, t: (d.normal(t, 64),))
            return Sample(label, SharedKVBlock(**make_block_fields(request)), inputs, kind)

        return [
            sample("decode", [(1, 30), (3, 20), (1, 0)], "decode"),
            sample("prefill", [(32, 0), (20, 0)], "mixed"),
            sample("mixed", [(1, 50), (2, 17), (20, 0), (11, 40)], "mixed"),
        ]


class CompressedBlock(Op, name="compressed_block", extension=True):
    """As `SharedKVBlock`, over the entries of a window and compressed ones.

    Before attention `compressor(x)` stores the compressed entries that the step's tokens complete; `indexer(x, c)`
    chooses those that each query reads; without an indexer it reads all.

    Args of the call:
        x: `[T, D]`. batch: the step, with the block tables of all parts. cache: the layer's caches, changed.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: as of `SharedKVBlock`; `compressor`; `indexer` or None.

    Source: DeepSeek-V4 (2026), section 2.3; transformers' modeling_deepseek_v4.
    """

    tolerance = BLOCK
    has_compressed_attention = True

    q_a: Linear
    q_a_norm: RMSNorm
    q_b: Linear
    kv: Linear
    enter: SharedKVNormRopeWrite
    compressor: Compressor
    indexer: CompressedIndexer | None
    few: CompressedAttention
    many: CompressedAttention
    unrotate: TailRope
    o_a: GroupedLinear
    o_b: Linear
    heads: int
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor, batch: Batch, cache: CompressedCache) -> torch.Tensor:
        c = self.q_a_norm(self.q_a(x))
        q = self.q_b(c).view(x.shape[0], self.heads, -1)
        q = self.enter(q, self.kv(x), batch.for_table(cache.window.table), cache.window.kv)
        self.compressor(x, batch, cache.compressed)
        chosen = None if self.indexer is None else self.indexer(x, c, batch, cache.index_keys)  # type: ignore[arg-type]
        y = each_range(batch, (q, chosen), self.few, self.many, cache)
        y = self.o_b(self.o_a(self.unrotate(y, batch.positions).flatten(1)))
        return y if self.reduce is None else self.reduce(y)

    def cost(self, load: Workload) -> Cost:
        """The sum over the children; `few` and `many` share the sequences and cost the same, so one of them counts."""
        return sum((child.cost(load) for path, child in self.children() if path != "few"), Cost())

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, prefill and a mixture; with an indexer and without. Rounding cannot swap positions."""
        request = KVRequest("shared_kv", 1, 48, window=20, rope=16)
        index = IndexDims(8, 32, 16, 32)

        def sample(label: str, rate: int, sequences: Sequences, kind: StepKind) -> Sample:
            indexer = make_compressed_indexer(index, 64, 40) if rate == 4 else None
            dims = CompressorDims(request.dim, rate, indexer is not None, request.rope)
            op = CompressedBlock(**make_compressed_fields(request, dims, indexer))

            def inputs(draw: Draw) -> tuple[Any, ...]:
                requests = [(request, False), (dims.rows, False), (dims.entries, False)]
                requests += [(r, False) for r in (indexer.kv_requests() if indexer is not None else ())]
                batch, parts = draw_caches(draw, requests, sequences)
                if indexer is not None:
                    keys = parts[-1]
                    write_few_keys(draw, keys.kv, int(batch.for_table(keys.table).block_tables.max()) + 1)
                return draw.normal(batch.tokens, 64).abs(), batch, make_compressed_cache(parts)

            return Sample(label, op, inputs, kind)

        return [
            sample("decode", 4, [(1, 430), (3, 20), (1, 0)], "decode"),
            sample("prefill", 4, [(32, 0), (20, 0)], "mixed"),
            sample("mixed", 4, [(1, 250), (2, 17), (20, 0), (11, 300)], "mixed"),
            sample("all_decode", 64, [(1, 130), (3, 62), (1, 0)], "decode"),
            sample("all_mixed", 64, [(1, 63), (2, 17), (70, 0), (11, 120)], "mixed"),
        ]


def make_compressed_fields(request: KVRequest, dims: CompressorDims, indexer: CompressedIndexer | None) -> Any:
    """The fields of a block with compressed entries for samples."""
    fields = make_block_fields(request)
    heads, sinks = fields["heads"], placeholder(fields["heads"], dtype=torch.float32)
    top = indexer.dims.top if indexer is not None else 0
    few, many = (
        CompressedAttention(heads, request.dim**-0.5, request, dims.entries, sinks, top, queries)
        for queries in ("few", "many")
    )
    return {**fields, "compressor": make_compressor(dims), "indexer": indexer, "few": few, "many": many}


def make_block_fields(request: KVRequest, *, heads: int = 4, groups: int = 2, width: int = 64, rank: int = 40) -> Any:
    """The fields of a block for samples."""
    dim, size = request.dim, request.rope
    sinks = placeholder(heads, dtype=torch.float32)
    few, many = (SharedKVAttention(heads, dim**-0.5, request, sinks, queries) for queries in ("few", "many"))
    o_a = GroupedLinear(tuple(Linear(placeholder(24, heads // groups * dim)) for _ in range(groups)))
    return {
        "q_a": Linear(placeholder(rank, width)),
        "q_a_norm": RMSNorm(placeholder(rank), 1e-6),
        "q_b": Linear(placeholder(heads * dim, rank)),
        "kv": Linear(placeholder(dim, width)),
        "enter": make_enter(request),
        "few": few,
        "many": many,
        "unrotate": TailRope(Rope(rope_table(size), True), size, inverse=True),
        "o_a": o_a,
        "o_b": Linear(placeholder(width, groups * 24)),
        "heads": heads,
    }
