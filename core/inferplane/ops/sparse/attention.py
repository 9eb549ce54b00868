"""Latent attention over chosen tokens alone, in the two forms of latent attention, and the block around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.attention import each_range
from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw, Sequences
from inferplane.ops.linear import Linear
from inferplane.ops.mla import MLADims, MLAKVWrite, MLANormRopeWrite
from inferplane.ops.op import BLOCK, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.sparse.indexer import IndexDims, LightningIndexer, make_indexer, write_few_keys
from inferplane.types import Batch, IndexedCache, KVRequest, LayerKV, Selection, StepKind, Weight


def hide_others(chosen: torch.Tensor, tokens: int) -> torch.Tensor:
    """Mask of the positions that each row did not choose, bool `[Q, tokens]`; `chosen` int32 `[Q, K]`, -1: none."""
    hidden = torch.ones(chosen.shape[0], tokens + 1, dtype=torch.bool, device=chosen.device)
    return hidden.scatter_(1, torch.where(chosen < 0, tokens, chosen).long(), False)[:, :tokens]


class SparseMLAExpanded(Op, name="sparse_mla_expanded", hot=True):
    """As `MLAExpanded`, over the chosen tokens of each query alone, for many query tokens.

    `[k_nope | v] = kv_b(c); s = (q_nope k_nope^T + q_rope k_rope^T) scale; y = softmax(s) v`, where s is -inf at tokens
    that the query did not choose; float32 inside.

    Args of the call:
        q_nope: `[T, H, N]`. q_rope: `[T, H, P]`, rotated. Either may be strided.
        chosen: int32 `[T, K]`, positions that the query may see, one at least, each once, in any order, then -1.
        batch: the step; its own latents are already in the cache. kv: the layer's cache.

    Returns:
        `[T, H, V]` in the dtype of `q_nope`.

    Fields: `kv_b` linear R -> H (N + V), rows `[k_nope | v]` per head; `dims`; `scale`; `kv`; `top` is K.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1 and appendix A ("MHA mode").
    """

    tolerance = BLOCK

    kv_b: Linear
    dims: MLADims
    scale: float
    kv: KVRequest
    top: int

    @property
    def serves_many_queries(self) -> bool:
        """See `Op.serves_many_queries`."""
        return True

    def __call__(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
    ) -> torch.Tensor:
        d = self.dims
        out = q_nope.new_zeros(q_nope.shape[0], d.heads, d.value)
        for a, b, n, table in batch.rows():
            latent, k_rope = kv.read(table, n)[0].to(q_nope.dtype).split((d.latent, d.rope), -1)
            k, v = self.kv_b(latent.contiguous()).view(n, d.heads, -1).float().split((d.nope, d.value), -1)
            s = torch.einsum("qhd,khd->hqk", q_nope[a:b].float(), k)
            s = (s + torch.einsum("qhd,kd->hqk", q_rope[a:b].float(), k_rope.float())) * self.scale
            s = s.masked_fill(hide_others(chosen[a:b], n), -torch.inf)
            out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), v).to(out.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Reading and expanding the cache once, then scores and values of the chosen tokens per head."""
        d = self.dims
        expand = self.kv_b.cost(Workload(load.kv_tokens, dtype=load.dtype))
        attend = 2.0 * count_pairs(load, self.top) * d.heads * (d.nope + d.rope + d.value)
        return expand + Cost(load.kv_tokens * self.kv.entries * load.dtype.itemsize, attend)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Prefill, chunks; V3.2's own dims with few heads; contexts below, at and beyond K; weights of 8 bits."""
        small, real = MLADims(2, 32, 16, 24, 48), MLADims(2, 128, 64, 128, 512)

        def make(d: MLADims, top: int, **format: Any) -> SparseMLAExpanded:
            kv_b = Linear(placeholder(d.heads * (d.nope + d.value), d.latent, **format))
            return SparseMLAExpanded(kv_b, d, (d.nope + d.rope) ** -0.5, d.request, top)

        return [
            Sample("prefill", make(small, 8), _queries(small, [(20, 0), (13, 0)], 8)),
            Sample("chunks", make(small, 16), _queries(small, [(9, 7), (33, 128)], 16)),
            Sample("v32_dims", make(real, 24), _queries(real, [(17, 60)], 24)),
            Sample("fp8", make(real, 24, format="fp8_block"), _queries(real, [(19, 33)], 24)),
            Sample("int8", make(small, 8, format="int8_group"), _queries(small, [(9, 70), (33, 0)], 8)),
        ]


class SparseMLAAbsorbed(Op, name="sparse_mla_absorbed", hot=True):
    """The same result as `SparseMLAExpanded` with `kv_b` folded into the query and the output, for few query tokens.

    Per head, `W_k [N, R]` and `W_v [V, R]` are rows of `kv_b`: `q' = [q_nope W_k | q_rope]; s = q' c^T scale;
    y = (softmax(s) c[:R]) W_v^T`, over the entries c of the chosen tokens.

    Args of the call:
        q_nope: `[T, H, N]`. q_rope: `[T, H, P]`, rotated. Either may be strided.
        chosen: int32 `[T, K]`, as of `SparseMLAExpanded`.
        batch: the step; its own latents are already in the cache. kv: the layer's cache.

    Returns:
        `[T, H, V]` in the dtype of `q_nope`.

    Fields: `kv_b` `[H (N + V), R]`, tied to `SparseMLAExpanded.kv_b`; `dims`; `scale`; `kv`; `top` is K.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1 and appendix A ("MQA mode").
    """

    tolerance = BLOCK

    kv_b: Weight
    dims: MLADims
    scale: float
    kv: KVRequest
    top: int

    def __call__(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
    ) -> torch.Tensor:
        d = self.dims
        w = values(self.kv_b).view(d.heads, d.nope + d.value, d.latent)  # type: ignore[arg-type]
        w_k, w_v = w.split((d.nope, d.value), 1)
        q = torch.cat((torch.einsum("thn,hnr->thr", q_nope.float(), w_k), q_rope.float()), -1)
        out = q_nope.new_zeros(q_nope.shape[0], d.heads, d.value)
        for a, b, n, table in batch.rows():
            c = kv.read(table, n)[0].float()
            s = torch.einsum("qhd,kd->hqk", q[a:b], c) * self.scale
            s = s.masked_fill(hide_others(chosen[a:b], n), -torch.inf)
            o = torch.einsum("hqk,kr->qhr", s.softmax(-1), c[:, : d.latent])
            out[a:b] = torch.einsum("qhr,hvr->qhv", o, w_v).to(out.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Reading the chosen entries and the weight once; folding, scores and values."""
        d = self.dims
        pairs = count_pairs(load, self.top)
        fold = 2.0 * load.tokens * d.heads * d.latent * (d.nope + d.value)
        read = min(load.kv_tokens, pairs) * self.kv.entries * load.dtype.itemsize
        return Cost(self.kv_b.nbytes(load.dtype) + read, fold + 2.0 * pairs * d.heads * (2 * d.latent + d.rope))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Single tokens and drafts; V3.2's own dims with few and with more heads; contexts below, at and beyond K."""
        small, real = MLADims(2, 32, 16, 24, 48), MLADims(4, 128, 64, 128, 512)
        wide = replace(real, heads=16)

        def make(d: MLADims, top: int, **format: Any) -> SparseMLAAbsorbed:
            kv_b = placeholder(d.heads * (d.nope + d.value), d.latent, **format)
            return SparseMLAAbsorbed(kv_b, d, (d.nope + d.rope) ** -0.5, d.request, top)

        return [
            Sample("decode", make(small, 8), _queries(small, [(1, 5), (1, 90)], 8), "decode"),
            Sample("drafts", make(small, 16), _queries(small, [(1, 0), (3, 64), (8, 127)], 16), "decode"),
            Sample("v32_dims", make(real, 24), _queries(real, [(1, 100), (2, 23)], 24), "decode"),
            Sample("v32_heads", make(wide, 64), _queries(wide, [(1, 300), (2, 30)], 64), "decode"),
            Sample("fp8", make(real, 24, format="fp8_block"), _queries(real, [(1, 90), (3, 20)], 24), "decode"),
            Sample("int8", make(small, 8, format="int8_group"), _queries(small, [(1, 9), (6, 70)], 8), "decode"),
        ]


def count_pairs(load: Workload, top: int) -> int:
    """The number of pairs of a query and a token that it reads."""
    return min(load.pairs, load.tokens * top)


class SparseMLABlock(Op, name="sparse_mla_block", extension=True):
    """A latent attention block that reads chosen tokens alone: as `MLABlock`, with a selection before attention.

    `c_q = enter(q_a(x), kv_a(x))` norms both, rotates the key and writes the latent; `chosen = indexer(x, c_q)`, or
    without an indexer what the layer before chose, which is in the cache's `selection`; `[q_nope | q_rope] = q_b(c_q)`
    per head; rotate q_rope; sequences with few query tokens attend absorbed, the others expanded.

    Args of the call:
        x: `[T, D]`. batch: the step. kv: the layer's `IndexedCache`, changed.

    Returns:
        `[T, D]` in the dtype of `x`.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1; layers that share a selection: arXiv 2603.12201.
    """

    tolerance = BLOCK
    has_sparse_attention = True

    q_a: Linear
    q_b: Linear
    kv_a: Linear
    enter: MLANormRopeWrite
    rope: Rope
    indexer: LightningIndexer | None
    expanded: SparseMLAExpanded
    absorbed: SparseMLAAbsorbed
    o: Linear
    dims: MLADims
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor, batch: Batch, kv: IndexedCache) -> torch.Tensor:
        d = self.dims
        c = self.enter(self.q_a(x), self.kv_a(x), batch, kv.kv)
        if self.indexer is not None:
            kv.selection.positions = self.indexer(x, c, batch, kv.index_keys)  # type: ignore[arg-type]
        chosen: Any = kv.selection.positions
        q_nope, q_rope = self.q_b(c).view(x.shape[0], d.heads, -1).split((d.nope, d.rope), -1)  # type: ignore[arg-type]
        q_rope = self.rope(q_rope, batch.positions)
        y = each_range(batch, (q_nope, q_rope, chosen), self.absorbed, self.expanded, kv.kv)
        y = self.o(y.flatten(1))
        return y if self.reduce is None else self.reduce(y)

    def cost(self, load: Workload) -> Cost:
        """The sum over the children, with the form of attention that needs fewer operations for this load."""
        attend = min(self.absorbed.cost(load), self.expanded.cost(load), key=lambda c: c.flops)
        forms = ("absorbed", "expanded")
        return sum((child.cost(load) for path, child in self.children() if path not in forms), attend)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, prefill and a mixture; contexts below and beyond K; with another layer's selection; V3.2's own dims
        with few heads, and GLM-5's. Rounding cannot swap positions."""
        small, real = MLADims(2, 32, 16, 24, 48), MLADims(2, 128, 64, 128, 512)
        index, real_index = IndexDims(8, 32, 16, 32), IndexDims(16, 128, 64, 64)
        glm = MLADims(2, 192, 64, 256, 512)

        def sample(
            label: str,
            d: MLADims,
            i: IndexDims,
            sequences: Sequences,
            kind: StepKind,
            *,
            shared: bool = False,
            width: int = 64,
            rank: int = 40,
        ) -> Sample:
            def inputs(draw: Draw) -> tuple[Any, ...]:
                batch, kv = draw.step(d.request, sequences)
                x = draw.normal(batch.tokens, width).abs()
                if shared:
                    return x, batch, IndexedCache(kv, None, Selection(draw_positions(draw, batch, i.top)))
                blocks = int(batch.block_tables.max()) + 1
                assert draw.build_kv is not None, "this draw was made without a cache"
                keys = draw.build_kv(i.request, blocks)
                write_few_keys(draw, keys, blocks)
                return x, batch, IndexedCache(kv, keys, Selection())

            return Sample(label, make_block(d, i, shared=shared, width=width, rank=rank), inputs, kind)

        return [
            sample("decode", small, index, [(1, 120), (3, 20)], "decode"),
            sample("prefill", small, index, [(32, 0), (20, 0)], "mixed"),
            sample("mixed", small, index, [(1, 150), (2, 47), (20, 0), (11, 100)], "mixed"),
            sample("shared", small, index, [(1, 120), (3, 20)], "decode", shared=True),
            sample("shared_mixed", small, index, [(1, 150), (30, 20)], "mixed", shared=True),
            sample("v32_decode", real, real_index, [(1, 200), (3, 70)], "decode"),
            sample("v32_mixed", real, real_index, [(2, 180), (17, 0), (11, 160)], "mixed"),
            sample("v32_rank", real, real_index, [(1, 200), (3, 70)], "decode", width=1024, rank=1536),
            sample("glm_rank_shared", glm, real_index, [(20, 150)], "mixed", shared=True, width=1024, rank=2048),
        ]


def make_block(d: MLADims, i: IndexDims, *, shared: bool = False, width: int = 64, rank: int = 40) -> SparseMLABlock:
    """A block for samples; `shared`: it has no indexer of its own."""
    kv_b = placeholder(d.heads * (d.nope + d.value), d.latent)
    scale, rope = (d.nope + d.rope) ** -0.5, Rope(rope_table(d.rope), True)
    norms = RMSNorm(placeholder(rank), 1e-6), RMSNorm(placeholder(d.latent), 1e-6)
    return SparseMLABlock(
        q_a=Linear(placeholder(rank, width)),
        q_b=Linear(placeholder(d.heads * (d.nope + d.rope), rank)),
        kv_a=Linear(placeholder(d.latent + d.rope, width)),
        enter=MLANormRopeWrite(*norms, rope, MLAKVWrite(d.request), d),
        rope=rope,
        indexer=None if shared else make_indexer(i, width, rank),
        expanded=SparseMLAExpanded(Linear(kv_b), d, scale, d.request, i.top),
        absorbed=SparseMLAAbsorbed(kv_b, d, scale, d.request, i.top),
        o=Linear(placeholder(width, d.heads * d.value)),
        dims=d,
    )


def draw_positions(draw: Draw, batch: Batch, top: int) -> torch.Tensor:
    """Random positions for each token of a step, in random order, then -1: int32 `[T, top]`."""
    rows = []
    for position in batch.positions.tolist():
        found = draw.permutation(position + 1)[:top]
        rows.append(found + [-1] * (top - len(found)))
    return torch.tensor(rows, dtype=torch.int32).to(draw.device)


def _queries(d: MLADims, sequences: Sequences, top: int) -> Any:
    def inputs(draw: Draw) -> tuple[Any, ...]:
        batch, kv = draw.step(d.request, sequences, written=True)
        wide = draw.normal(batch.tokens, d.heads, d.nope + d.rope)
        q = wide[..., : d.nope], draw.normal(batch.tokens, d.heads, d.rope)
        return *q, draw_positions(draw, batch, top), batch, kv

    return inputs
