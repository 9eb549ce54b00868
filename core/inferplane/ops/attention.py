"""Attention over a paged cache: writing K and V, attending, and the block around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Sequences, step_inputs
from inferplane.ops.forms.rotation import PrepareAttention
from inferplane.ops.kv_write import KVWrite
from inferplane.ops.linear import Linear
from inferplane.ops.op import ACCUMULATED, BLOCK, Cost, Op, Sample, Workload, extension, placeholder, values
from inferplane.types import Batch, CompressedCache, KVRequest, LayerKV, StepKind, Weight

Queries = Literal["few", "many"]
Attend = Callable[..., torch.Tensor]
"""A bound op of attention: `(*q, batch, kv) -> [T, ...]`."""

OTHER_SCALE = 0.7
"""Factor on the default scale in some samples: they fail for kernels that ignore `scale`."""


def mask_pairs(
    query_tokens: int, tokens: int, window: int | None, device: torch.device, chunk: int | None = None, first: int = 0
) -> torch.Tensor:
    """Mask of the keys that each query must not see: True above the causal diagonal, before the window and in other
    chunks.

    Args:
        query_tokens: the last `query_tokens` tokens of the sequence are queries.
        tokens: length of the sequence.
        window: number of last tokens that a query sees, itself included; None: all.
        device: device of the mask.
        chunk: number of tokens of a chunk, in which a query sees keys of its own alone; None: there are none.
        first: position of the first token.

    Returns:
        bool `[query_tokens, tokens]`.
    """
    key = torch.arange(tokens, device=device)[None]
    query = torch.arange(tokens - query_tokens, tokens, device=device)[:, None]
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    if chunk is not None:
        hidden = hidden | ((key + first) // chunk < (query + first) // chunk)
    return hidden


def each_range(
    batch: Batch, q: tuple[torch.Tensor | None, ...], few: Attend, many: Attend, kv: LayerKV | CompressedCache
) -> torch.Tensor:
    """Run `few` on the sequences with few query tokens and `many` on the others; the result's rows are in order.

    Args:
        batch: the step.
        q: tensors whose dim 0 is tokens, or None; each call gets its slice.
        few: attention bound for few query tokens.
        many: attention bound for many query tokens.
        kv: the layer's cache.
    """
    first, rest = batch.split()
    if rest is None:
        return few(*q, batch if first is None else first, kv)
    if first is None:
        return many(*q, rest, kv)
    n = first.tokens
    near, far = ([t if t is None else t[part] for t in q] for part in (slice(None, n), slice(n, None)))
    return torch.cat((few(*near, first, kv), many(*far, rest, kv)))


class Attention(Op, name="attention", hot=True):
    """Causal attention of ragged queries over a paged cache: `softmax(q k^T scale) v`, each query group on its KV head.

    A query at position p sees keys 0..p, or the last `window` of them. With `chunk` c it sees none before the last
    multiple of c up to p; `window` is c then, so that passed chunks are released. Softmax and sums in float32, rounded
    once.
    With `softcap` c, a score s is `c tanh(s / c)`. With `sinks`, each softmax has one more score, the head's sink,
    whose weight falls on no value: the weights of the values then sum to less than 1.
    Blocks that lie entirely before all windows may hold anything and are never read
    (`KVRequest.blocks_before_window`).

    Args of the call:
        q: `[T, H, D]`, contiguous rows.
        batch: lengths, offsets and block tables; the step's own K and V are already in the cache.
        kv: the layer's cache.

    Returns:
        `[T, H, Dv]` in the dtype of `q`. Rows of padded sequences are undefined.

    Fields: `heads` query heads H; `scale`; `kv` the cache request (KV heads, dims, window); `queries` "few" if every
    sequence has at most 8 query tokens, else "many"; `sinks` `[H]` or None; `softcap` or None; `chunk` or None.

    Source: GQA, arXiv 2305.13245; paged attention, arXiv 2309.06180; window as in Mistral 7B, arXiv 2310.06825; soft
    cap: Gemma 2, arXiv 2408.00118; a learned sink a head: the gpt-oss model card, arXiv 2508.10925; chunks: Llama 4
    (Meta, 2025).
    """

    tolerance = ACCUMULATED

    heads: int
    scale: float
    kv: KVRequest
    queries: Queries = "many"
    sinks: Weight | None = extension(None)
    softcap: float | None = extension(None)
    chunk: int | None = extension(None)

    @property
    def serves_many_queries(self) -> bool:
        """See `Op.serves_many_queries`."""
        return self.queries == "many"

    def __call__(self, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        group = self.heads // self.kv.heads
        out = q.new_zeros(q.shape[0], self.heads, self.kv.v_dim)
        for a, b, n, table in batch.rows():
            skipped = self.kv.blocks_before_window(b - a, n, kv.block_tokens)
            n -= skipped * kv.block_tokens
            k, v = (t.float().repeat_interleave(group, 1) for t in kv.read(table[skipped:], n))
            s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k) * self.scale
            if self.softcap is not None:
                s = torch.tanh(s / self.softcap) * self.softcap
            hidden = mask_pairs(b - a, n, self.kv.window, q.device, self.chunk, skipped * kv.block_tokens)
            s = s.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                sinks = values(self.sinks)  # type: ignore[arg-type]
                s = torch.cat((s, sinks[:, None, None].expand(-1, b - a, 1)), -1)
            out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1)[..., :n], v).to(q.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Bytes of the cache read once; two operations per multiply-add of scores and values."""
        r = self.kv
        moved = load.kv_tokens * r.entries * load.dtype.itemsize
        return Cost(moved, 2.0 * load.pairs * self.heads * (r.dim + r.v_dim))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Single tokens, drafts, prefill, chunks and mixtures; dims of real models; a window; a scale; sinks; a cap;
        attention within chunks."""
        g2 = KVRequest("gqa", 2, 64, 64)
        g1 = KVRequest("gqa", 1, 128, 128)
        g4 = KVRequest("gqa", 4, 32, 32)
        window = KVRequest("gqa", 2, 64, 64, window=20)
        narrow = KVRequest("gqa", 2, 96, 64, window=20)

        def sample(
            label: str,
            request: KVRequest,
            heads: int,
            sequences: Sequences,
            queries: Queries,
            factor: float = 1.0,
            **fields: Any,
        ) -> Sample:
            inputs = step_inputs(request, sequences, lambda d, t: (d.normal(t, heads, request.dim),), written=True)
            op = Attention(heads, factor * request.dim**-0.5, request, queries, **fields)
            return Sample(label, op, inputs, "decode" if queries == "few" else "mixed")

        return [
            sample("decode", g2, 4, [(1, 5), (1, 90)], "few"),
            sample("first_token", g2, 4, [(1, 0)], "few"),
            sample("drafts", g2, 6, [(1, 40), (3, 64), (8, 127)], "few"),
            sample("decode_d128_mqa", g1, 8, [(1, 200), (2, 33)], "few"),
            sample("window_decode", window, 4, [(1, 90), (3, 12), (2, 300)], "few"),
            sample("prefill", g2, 4, [(70, 0), (19, 0)], "many"),
            sample("chunks", g2, 4, [(9, 90), (33, 64), (64, 128)], "many"),
            sample("mha_d32", g4, 4, [(40, 3)], "many"),
            sample("prefill_d128", g1, 4, [(65, 0), (12, 130)], "many"),
            sample("window_prefill", window, 2, [(60, 0), (15, 40)], "many"),
            sample("scaled_decode", g2, 4, [(1, 5), (3, 90)], "few", OTHER_SCALE),
            sample("scaled_prefill", g2, 4, [(20, 0), (13, 40)], "many", OTHER_SCALE),
            sample("sinks_decode", g2, 4, [(1, 5), (3, 90), (1, 0)], "few", sinks=placeholder(4)),
            sample("sinks_window", window, 6, [(60, 0), (15, 40)], "many", sinks=placeholder(6)),
            sample("sinks_window_decode", window, 6, [(1, 300), (2, 12), (3, 160)], "few", sinks=placeholder(6)),
            # Scores of about 1 are far beyond these caps, so that a kernel without a cap fails.
            sample("softcap_decode", g1, 3, [(1, 40), (8, 127)], "few", softcap=0.5),
            sample("softcap_window", window, 4, [(33, 0), (9, 90)], "many", softcap=0.3),
            sample("chunk_decode", window, 4, [(1, 90), (3, 12), (1, 40), (1, 39)], "few", chunk=20),
            sample("chunk_prefill", window, 4, [(60, 0), (15, 45), (33, 20)], "many", chunk=20),
            sample("values_decode", replace(narrow, window=None), 4, [(1, 5), (3, 90)], "few"),
            sample("values_sinks_decode", narrow, 4, [(1, 90), (2, 12)], "few", sinks=placeholder(4)),
            sample("values_prefill", narrow, 4, [(33, 0), (15, 40)], "many"),
            sample("sinks_softcap", g4, 8, [(20, 0), (13, 40)], "many", sinks=placeholder(8), softcap=0.7),
        ]


class NormRopeWrite(Op, name="norm_rope_write"):
    """The steps between a block's projection and its attention: norms on q and k, rotation, cache write.

    `q = rope(q_norm(q)); write(rope(k_norm(k)), v)`; without norms `q = rope(q); write(rope(k), v)`. Rows with slot -1
    are rotated but not written.

    Args of the call:
        q: `[T, H, d]`. k: `[T, G, d]`. v: `[T, G, dv]`. Any may be strided.
        batch: its `positions` and `slots`. kv: the layer's cache, changed.

    Returns:
        q, `[T, H, d]`.

    Source: norms on q and k as in Qwen3, arXiv 2505.09388; rotation, arXiv 2104.09864.
    """

    tolerance = ACCUMULATED

    rope: Rope
    write: KVWrite
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
        self.write(k, v, batch, kv)
        return q

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without norms and an offset of one, both orders of pairs, decode and mixed steps; heads of 128."""

        def sample(
            label: str,
            dim: int,
            sequences: Sequences,
            kind: StepKind,
            *,
            norms: bool,
            pairs: bool = False,
            offset: float = 0.0,
        ) -> Sample:
            request = KVRequest("gqa", 2, dim, dim)
            norm = lambda x=0.0: RMSNorm(placeholder(dim), 1e-6, x) if norms else None  # noqa: E731
            op = NormRopeWrite(Rope(rope_table(dim), pairs), KVWrite(request), norm(), norm(offset))
            inputs = step_inputs(request, sequences, lambda d, t: d.normal(t, 8, dim).split((4, 2, 2), 1))
            return Sample(label, op, inputs, kind)

        return [
            sample("decode", 32, [(1, 9), (3, 70)], "decode", norms=False),
            sample("qk_norm", 32, [(1, 10), (17, 5)], "mixed", norms=True),
            sample("interleaved", 64, [(1, 63), (2, 64)], "decode", norms=True, pairs=True),
            sample("d128", 128, [(1, 127), (2, 5)], "decode", norms=True),
            sample("offset", 32, [(1, 9), (9, 5)], "mixed", norms=True, offset=1.0),
        ]


class GQABlock(Op, name="gqa_block"):
    """A grouped-query attention block: project, rotate, write the cache, attend, project back.

    `q, k, v = split(qkv(x)); q = enter(q, k, v); y = o(attend(q))`. `enter` applies the model's norms on q and k, if
    any, rotates, and writes the cache. Sequences with few query tokens attend by `few`, the others by `many`. With
    `output_gate` each head has a gate beside its query, and `y = o(attend(q) * sigmoid(gate))`. With `head_gate`
    each head has one number for a gate, `y = o(attend(q) * sigmoid(head_gate(x)))`. With `v_factor` v is multiplied by
    it first, in float32, and rounded.

    Args of the call:
        x: `[T, D]`. batch: the step. kv: the layer's cache, changed.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `qkv` linear D -> (H + G) d + G dv, rows q then k then v; `o` linear H dv -> D; `heads` (H, G); `head_dim`
    d; `v_dim` dv, or None for d; `v_factor`; `output_gate`: `qkv` then has H d rows more, the d of each head's gate
    after those of its query; `head_gate` linear D -> H or None.

    Source: GQA, arXiv 2305.13245; norms on q and k as in Qwen3, arXiv 2505.09388; gates, arXiv 2505.06708; values of
    another width, with a factor, as in MiMo-V2-Flash, arXiv 2601.02780.
    """

    tolerance = BLOCK
    has_grouped_queries = True

    qkv: Linear
    o: Linear
    enter: NormRopeWrite | PrepareAttention
    few: Attention
    many: Attention
    heads: tuple[int, int]
    head_dim: int
    reduce: AllReduce | None = None
    output_gate: bool = extension(False)
    v_dim: int | None = extension(None)
    v_factor: float = extension(1.0)
    head_gate: Linear | None = extension(None)

    def __call__(self, x: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        (h, g), dim = self.heads, self.head_dim
        queries, gate = h * (2 if self.output_gate else 1), None
        q, k, v = self.qkv(x).split((queries * dim, g * dim, g * (self.v_dim or dim)), 1)
        q, k, v = (part.unflatten(1, (n, -1)) for part, n in ((q, queries), (k, g), (v, g)))
        if self.output_gate:
            q, gate = q.unflatten(1, (h, 2)).unbind(2)
        if self.v_factor != 1:
            v = (v.float() * self.v_factor).to(v.dtype)
        q = self.enter(q, k, v, batch, kv)
        y = each_range(batch, (q,), self.few, self.many, kv)
        if gate is not None:
            y = (y.float() * gate.float().sigmoid()).to(y.dtype)
        if self.head_gate is not None:
            y = (y.float() * self.head_gate(x).float().sigmoid()[..., None]).to(y.dtype)
        y = self.o(y.flatten(1))
        return y if self.reduce is None else self.reduce(y)

    def cost(self, load: Workload) -> Cost:
        """The sum over the children; `few` and `many` share the sequences and cost the same, so one of them counts."""
        return sum((child.cost(load) for path, child in self.children() if path != "few"), Cost())

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, prefill and a mixture; with norms on q and k; with gates; with narrow values and a factor."""

        def block(norms: bool, *, gate: bool = False, v_dim: int | None = None, v_factor: float = 1.0) -> GQABlock:
            norm = lambda: RMSNorm(placeholder(32), 1e-6) if norms else None  # noqa: E731
            request = KVRequest("gqa", 2, 32, v_dim or 32)
            return GQABlock(
                qkv=Linear(placeholder((4 + 2 + 4 * gate) * 32 + 2 * (v_dim or 32), 64)),
                o=Linear(placeholder(64, 4 * (v_dim or 32))),
                enter=NormRopeWrite(Rope(rope_table(32)), KVWrite(request), norm(), norm()),
                few=Attention(4, 32**-0.5, request, "few"),
                many=Attention(4, 32**-0.5, request, "many"),
                heads=(4, 2),
                head_dim=32,
                output_gate=gate,
                v_dim=v_dim,
                v_factor=v_factor,
            )

        def sample(label: str, op: GQABlock, sequences: Sequences, kind: StepKind) -> Sample:
            return Sample(label, op, step_inputs(op.few.kv, sequences, lambda d, t: (d.normal(t, 64),)), kind)

        gated = replace(block(True), head_gate=Linear(placeholder(4, 64)))
        return [
            sample("decode", block(False), [(1, 9), (3, 70)], "decode"),
            sample("prefill", block(False), [(33, 0), (20, 0)], "mixed"),
            sample("mixed", block(False), [(1, 100), (2, 47), (40, 0), (11, 60)], "mixed"),
            sample("qk_norm", block(True), [(1, 10), (17, 5)], "mixed"),
            sample("gate_decode", block(True, gate=True), [(1, 9), (3, 70)], "decode"),
            sample("gate_mixed", block(False, gate=True), [(1, 10), (17, 5)], "mixed"),
            sample("values_decode", block(False, v_dim=16, v_factor=0.7), [(1, 9), (3, 70)], "decode"),
            sample("head_gate_decode", gated, [(1, 9), (3, 70)], "decode"),
            sample("head_gate_mixed", gated, [(1, 10), (17, 5)], "mixed"),
            sample("values_mixed", block(False, v_dim=24), [(1, 10), (17, 5)], "mixed"),
        ]
