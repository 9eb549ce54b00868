"""The lightning indexer: cheap scores of all earlier tokens, by which each query chooses those that attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferplane.ops.basic import Rope, rope_table
from inferplane.ops.draw import Draw, Sequences, step_inputs
from inferplane.ops.forms.norms import LayerNorm
from inferplane.ops.forms.rotated_activation import rotate_blocks
from inferplane.ops.forms.rotation import PartialRope
from inferplane.ops.linear import Linear
from inferplane.ops.op import EXACT, ROUNDED, Comparison, Cost, Op, Sample, Workload, extension, placeholder
from inferplane.types import Batch, KVRequest, LayerKV, StepKind, Weight

SWAPPED = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.02)
"""Tolerance of selections: the share of a row's positions that may be others, where sums in another order swap two
scores that are almost equal."""


@dataclass(frozen=True)
class IndexDims:
    """Sizes of an indexer.

    Args:
        heads: its query heads J; all ranks have all of them.
        dim: entries per head and of a token's key E.
        rope: the first entries of each head, which are rotated.
        top: the number of tokens that a query chooses K.
    """

    heads: int
    dim: int
    rope: int
    top: int

    @property
    def request(self) -> KVRequest:
        """The cache request: one key of E entries per token."""
        return KVRequest("index_keys", 1, self.dim, rope=self.rope)

    @property
    def scale(self) -> float:
        """The factor of the heads' weights."""
        return float(self.heads**-0.5 * self.dim**-0.5)


class IndexKeyWrite(Op, name="index_key_write"):
    """Store the index key of each token; rows with slot -1 are ignored.

    Args of the call:
        k: `[T, 1, E]`, rotated. batch: its `slots` `[T]`. kv: the layer's index keys, changed.

    Returns:
        None.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
    """

    tolerance = EXACT
    writes_cache = True

    kv: KVRequest

    def __call__(self, k: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
        kv.write(batch.slots, k)

    def cost(self, load: Workload) -> Cost:
        """Bytes read and written."""
        return Cost(2 * load.tokens * self.kv.entries * load.dtype.itemsize)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps over caches with history; V3.2's own size."""

        def sample(label: str, dim: int, sequences: Sequences, kind: StepKind) -> Sample:
            request = KVRequest("index_keys", 1, dim)
            tensors = lambda d, t: (d.normal(t, 1, dim),)  # noqa: E731
            return Sample(label, IndexKeyWrite(request), step_inputs(request, sequences, tensors), kind)

        return [
            sample("decode", 32, [(1, 5), (2, 70)], "decode"),
            sample("mixed", 32, [(1, 130), (50, 0), (9, 63)], "mixed"),
            sample("v32_decode", 128, [(1, 127), (2, 70)], "decode"),
        ]


class IndexSelect(Op, name="index_select", hot=True):
    """The K positions with the largest index scores that each query may see: `s = sum_j w_j relu(q_j . k)`.

    A query at position p chooses among 0..p; of equal scores the lower position wins. Where p < K it chooses all of
    them, whatever the scores are. Scores and sums in float32; 0 and -0 are equal. With a `rate` r a key stands for r
    tokens, positions count keys, and a query chooses among the `(p + 1) // r` whose tokens it sees.

    Args of the call:
        q: `[T, J, E]`, rotated. w: float32 `[T, J]`, of any sign.
        batch: the step; its own keys are already in the cache. kv: the layer's index keys, in this batch's block
        table.

    Returns:
        int32 `[T, K]`: each row has the positions, in any order, then -1 for the rest. Rows of padding are undefined.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1, "lightning indexer" and "fine-grained token selection".
    """

    tolerance = SWAPPED
    compares_entries = False

    dims: IndexDims
    kv: KVRequest
    rate: int = extension(1)

    def __call__(self, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        chosen = torch.full((q.shape[0], self.dims.top), -1, dtype=torch.int32, device=q.device)
        tables = batch.for_entries(kv).block_tables
        for i, (a, b, tokens) in batch.list_spans():
            if not (n := tokens // self.rate):
                continue
            k = kv.read(tables[i], n)[0][:, 0].float()
            s = torch.einsum("qj,qjk->qk", w[a:b], torch.einsum("qje,ke->qjk", q[a:b].float(), k).relu())
            hidden = mask_entries(b - a, tokens, self.rate, q.device)
            chosen[a:b] = choose_positions(s.masked_fill(hidden, -torch.inf), hidden, self.dims.top)
        return chosen

    def cost(self, load: Workload) -> Cost:
        """Reading the keys once; scores of all pairs."""
        keys, pairs = load.kv_tokens / self.rate, load.pairs / self.rate
        moved = keys * self.kv.entries * load.dtype.itemsize + 4 * load.tokens * self.dims.top
        return Cost(moved, 2.0 * pairs * self.dims.heads * (self.dims.dim + 1))

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """The largest share of a row's positions that are others than the oracle's; infinite where a position occurs
        twice, or -1 does not stand for as many."""
        if tuple(got.shape) != tuple(want.shape):
            return Comparison(float("inf"), f"shape {list(got.shape)} instead of {list(want.shape)}")
        worst = Comparison(0.0)
        for i, (g, u) in enumerate(zip(got.tolist(), want.tolist())):
            found, expected = [p for p in g if p >= 0], {p for p in u if p >= 0}
            if len(found) != len(set(found)) or len(found) != len(expected):
                return Comparison(float("inf"), f"row {i} has {len(set(found))} positions instead of {len(expected)}")
            error = len(expected - set(found)) / max(1, len(expected))
            worst = Comparison(error, f"row {i}") if error > worst.error else worst
        return worst

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Contexts below, at and beyond K; equal scores; weights of both signs; V3.2's own sizes; keys that stand for
        several tokens."""
        small, real = IndexDims(4, 32, 16, 16), IndexDims(64, 128, 64, 64)

        def sample(
            label: str, d: IndexDims, sequences: Sequences, kind: StepKind, *, ties: bool = False, rate: int = 1
        ) -> Sample:
            request = replace(d.request, rate=rate)

            def tensors(draw: Draw, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
                w = draw.normal(tokens, d.heads, dtype=torch.float32)
                return draw.normal(tokens, d.heads, d.dim), w * 0 if ties else w

            inputs = step_inputs(request, sequences, tensors, written=True)
            return Sample(label, IndexSelect(d, request, rate), inputs, kind)

        return [
            sample("decode", small, [(1, 70), (2, 9)], "decode"),
            sample("mixed", small, [(1, 15), (1, 16), (3, 100), (40, 0), (9, 120)], "mixed"),
            sample("drafts", small, [(8, 300), (1, 0)], "decode"),
            sample("ties", small, [(2, 90), (1, 30)], "decode", ties=True),
            sample("v32_ties", real, [(2, 90), (1, 63)], "decode", ties=True),
            sample("v32_decode", real, [(1, 300), (2, 40)], "decode"),
            sample("v32_mixed", real, [(33, 150)], "mixed"),
            sample("rate_decode", small, [(1, 2), (1, 3), (8, 60), (5, 300)], "decode", rate=4),
            sample("rate_mixed", small, [(2, 66), (9, 120), (90, 0)], "mixed", rate=4),
            sample("rate_ties", small, [(2, 90), (1, 130)], "decode", ties=True, rate=4),
            sample("v4_decode", real, [(1, 300), (2, 254)], "decode", rate=4),
        ]


def mask_entries(query_tokens: int, tokens: int, rate: int, device: torch.device) -> torch.Tensor:
    """Mask of the entries, each of which stands for `rate` tokens, that a query must not see: those with later tokens.

    Args:
        query_tokens: the last `query_tokens` tokens of the sequence are queries.
        tokens: length of the sequence.
        rate: tokens that an entry stands for.
        device: of the mask.

    Returns:
        bool `[query_tokens, tokens // rate]`.
    """
    query = torch.arange(tokens - query_tokens, tokens, device=device)[:, None]
    return torch.arange(tokens // rate, device=device)[None] >= (query + 1) // rate


def choose_positions(scores: torch.Tensor, hidden: torch.Tensor, top: int) -> torch.Tensor:
    """The positions of the largest scores of each row, the lower of equal ones, ascending, then -1: int32 `[Q, top]`.
    A row that sees no more than `top` positions has all of them, also where their scores are infinite or NaN.

    Args:
        scores: float32 `[Q, n]`; -inf where a query does not see a position.
        hidden: bool `[Q, n]`, where it does not see one; those that it sees come first.
        top: how many are chosen at most.
    """
    entries = scores.shape[1]
    count = min(top, entries)
    found = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    hidden = hidden.gather(1, found)  # none sorts before a seen one
    found = torch.where(hidden, entries, found).sort(-1).values
    found = torch.where(found == entries, -1, found)
    return torch.nn.functional.pad(found, (0, top - count), value=-1).int()


class RotateIndexKeys(Op, name="rotate_index_keys"):
    """Each `block` of entries times Sylvester's Hadamard matrix over the root of its size, in float32, rounded once.

    Applied to index queries and keys alike it changes no score, and spreads large entries over a block, so that one
    scale per token loses less of keys that are stored in int8; in FP8 it does little, but models were published with
    it. Its cost is not counted: it is small beside the scores.

    Args of the call:
        x: `[T, J, E]`.

    Returns:
        `[T, J, E]` in the dtype of `x`.

    Fields: `block` entries, a power of two that divides E.

    Source: DeepSeek-V3.2's published inference code, `rotate_activation`; QuaRot, arXiv 2404.00456.
    """

    tolerance = ROUNDED

    block: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rotate_blocks(x.float(), self.block).to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Keys and queries; one block a head and several."""
        return [
            Sample("keys", RotateIndexKeys(128), lambda d: (d.normal(3, 1, 128),)),
            Sample("queries", RotateIndexKeys(16), lambda d: (d.normal(2, 5, 48),)),
        ]


class LightningIndexer(Op, name="lightning_indexer"):
    """Index queries, key and weights of each token, the key's cache write, and the selection.

    `q = rope(wq_b(c)); k = rope(k_norm(wk(x))); w = weights_proj(x) J^-1/2 E^-1/2; select(q, w)` over the keys of the
    step and all before it. Only the first P entries of a head are rotated; the weights are in float32 throughout. With
    `spread`, which caches of 8 bits have, it is applied to q and k first.

    Args of the call:
        x: `[T, D]`, what the block reads. c: `[T, Q]`, the normed low-rank query of the block's attention.
        batch: the step. kv: the layer's index keys, changed.

    Returns:
        int32 `[T, K]`, as of `index_select`.

    Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1; names of weights as in the published checkpoints.
    """

    tolerance = SWAPPED
    compares_entries = False

    wq_b: Linear
    wk: Linear
    k_norm: LayerNorm
    weights_proj: Linear
    rope: PartialRope | Rope
    write: IndexKeyWrite
    select: IndexSelect
    dims: IndexDims
    spread: RotateIndexKeys | None = None

    def __call__(self, x: torch.Tensor, c: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        d = self.dims
        q = self.rope(self.wq_b(c).view(x.shape[0], d.heads, d.dim), batch.positions)
        k = self.rope(self.k_norm(self.wk(x))[:, None], batch.positions)
        if self.spread is not None:
            q, k = self.spread(q), self.spread(k)
        self.write(k, batch, kv)
        return self.select(q, self.weights_proj(x) * d.scale, batch, kv)

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """As of `index_select`."""
        return IndexSelect.compare(got, want)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Both rotations; decode and mixed steps; contexts below and beyond K; spread keys. Rounding cannot swap
        positions."""
        small, real = IndexDims(8, 32, 16, 32), IndexDims(64, 128, 64, 64)

        def sample(
            label: str, d: IndexDims, sequences: Sequences, kind: StepKind, *, pairs: bool = False, spread: int = 0
        ) -> Sample:
            op = make_indexer(d, 64, 40, interleaved=pairs)
            op = replace(op, spread=RotateIndexKeys(spread)) if spread else op

            def inputs(draw: Draw) -> tuple[Any, ...]:
                batch, kv = step_of_few_keys(draw, d.request, sequences)
                return draw.normal(batch.tokens, 64).abs(), draw.normal(batch.tokens, 40), batch, kv

            return Sample(label, op, inputs, kind)

        return [
            sample("decode", small, [(1, 120), (3, 20)], "decode"),
            sample("interleaved", small, [(2, 120)], "decode", pairs=True),
            sample("mixed", small, [(1, 150), (20, 0), (12, 100)], "mixed"),
            sample("v32_decode", real, [(1, 200), (2, 40)], "decode"),
            sample("v32_spread", real, [(1, 200), (2, 40)], "decode", spread=128),
        ]


def make_indexer(d: IndexDims, width: int, rank: int, *, interleaved: bool = False) -> LightningIndexer:
    """An indexer for samples whose heads' weights are equal and positive where the entries of x are."""
    even = Weight((), (d.heads, width), torch.float32, make=lambda: torch.full((d.heads, width), 1 / width))
    rope = Rope(rope_table(d.rope), interleaved)
    return LightningIndexer(
        wq_b=Linear(placeholder(d.heads * d.dim, rank)),
        wk=Linear(placeholder(d.dim, width)),
        k_norm=LayerNorm(placeholder(d.dim), 1e-6, placeholder(d.dim)),
        weights_proj=Linear(even, out_dtype=torch.float32),
        rope=PartialRope(rope, d.rope) if d.rope < d.dim else rope,
        write=IndexKeyWrite(d.request),
        select=IndexSelect(d, d.request),
        dims=d,
    )


KEY_EVERY = 13
"""In a sample's history, one key of so many is not zero."""


def step_of_few_keys(draw: Draw, request: KVRequest, sequences: Sequences) -> tuple[Batch, LayerKV]:
    """As `Draw.step`, with the keys of `write_few_keys` as history."""
    batch, kv = draw.step(request, sequences)
    write_few_keys(draw, kv, int(batch.block_tables.max()) + 1)
    return batch, kv


def write_few_keys(draw: Draw, kv: LayerKV, blocks: int) -> None:
    """Fill all slots of the first blocks with keys, most of which are zero. Scores of these are exactly equal in every
    precision, so what is chosen of them is decided by position. The others have larger scores where the weights are
    positive, and are fewer than an indexer of the samples chooses.
    """
    slots = torch.arange(blocks * kv.block_tokens)
    is_key = (slots % KEY_EVERY == 0).to(draw.dtype).to(draw.device)
    (keys,) = draw.kv_entries(kv.request, len(slots))
    kv.write(slots.to(draw.device), keys * is_key[:, None, None])
