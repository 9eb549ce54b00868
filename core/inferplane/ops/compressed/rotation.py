"""What lies around attention of one KV head: rotation of the last entries, its inverse, and the cache write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.draw import Sequences, step_inputs
from inferplane.ops.op import ACCUMULATED, EXACT, ROUNDED, Cost, Op, Sample, Workload, placeholder
from inferplane.types import Batch, KVRequest, LayerKV, StepKind, Weight


class TailRope(Op, name="tail_rope", extension=True):
    """Rotate the last entries of each head and leave the others: `y = [x[..., :-size] | rope(x[..., -size:])]`.

    With `inverse` by the opposite angle: a pair `(a, b)` is exchanged, rotated, and exchanged again.

    Args of the call:
        x: `[T, H, D]`, possibly strided.
        positions: int64 `[T]`.

    Returns:
        `[T, H, D]` in the dtype of `x`, contiguous.

    Fields: `rope` rotates heads of `size` entries, adjacent ones; `size` is at most D; `inverse`.

    Source: DeepSeek-V4 (2026), section 2.3; transformers' modeling_deepseek_v4.
    """

    tolerance = ROUNDED

    rope: Rope
    size: int
    inverse: bool = False

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rest, tail = x[..., : -self.size], x[..., -self.size :]
        turned = _exchange_pairs(tail) if self.inverse else tail
        turned = self.rope(turned, positions)
        return torch.cat((rest, _exchange_pairs(turned) if self.inverse else turned), -1)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Both directions, few and all of the entries; V4's own sizes."""

        def sample(label: str, size: int, heads: int, dim: int, *, inverse: bool) -> Sample:
            op = TailRope(Rope(rope_table(size), True), size, inverse)
            return Sample(label, op, lambda d: (d.normal(5, heads, dim), d.ints(5, below=512)))

        return [
            sample("some", 16, 2, 48, inverse=False),
            sample("inverse", 16, 3, 48, inverse=True),
            sample("all", 32, 2, 32, inverse=True),
            sample("v4", 64, 2, 512, inverse=True),
        ]


def _exchange_pairs(x: torch.Tensor) -> torch.Tensor:
    """`(a, b) -> (b, a)` of adjacent entries."""
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


class EntryWrite(Op, name="entry_write"):
    """Store an entry of each token, or of those tokens that complete one where it stands for several
    (`Batch.for_entries`); rows without a slot are ignored.

    Args of the call:
        entries: `[T, D]`. batch: its `slots` `[T]`. kv: the cache in this batch's block table, changed.

    Returns:
        None.

    Source: DeepSeek-V4 (2026), section 2.3.
    """

    tolerance = EXACT
    writes_cache = True

    kv: KVRequest

    def __call__(self, entries: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
        kv.write(batch.for_entries(kv).slots, entries.reshape(-1, *self.kv.entry_shapes[0]))

    def cost(self, load: Workload) -> Cost:
        """Bytes read and written."""
        return Cost(2 * load.tokens * self.kv.entries * load.dtype.itemsize / self.kv.rate)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps over caches with history; V4's own size; entries of several tokens."""

        def sample(label: str, dim: int, sequences: Sequences, kind: StepKind, rate: int = 1) -> Sample:
            request = KVRequest("shared_kv", 1, dim, window=128 if rate == 1 else None, rate=rate)
            inputs = step_inputs(request, sequences, lambda d, t: (d.normal(t, dim),))
            return Sample(label, EntryWrite(request), inputs, kind)

        return [
            sample("decode", 48, [(1, 5), (2, 70)], "decode"),
            sample("mixed", 48, [(1, 130), (50, 0), (9, 63)], "mixed"),
            sample("v4_decode", 512, [(1, 127), (2, 70)], "decode"),
            sample("rate_decode", 48, [(1, 7), (1, 8), (5, 62)], "decode", 4),
            sample("rate_mixed", 48, [(1, 127), (3, 254), (150, 0)], "mixed", 128),
        ]


class SharedKVNormRopeWrite(Op, name="shared_kv_norm_rope_write"):
    """The steps between a block's projections and its attention: `q = rope(q_norm(q)); write(rope(kv_norm(kv)))`.

    Rows with slot -1 are rotated but not written.

    Args of the call:
        q: `[T, H, D]`. kv: `[T, D]`, the entry that all heads share. Either may be strided.
        batch: its `positions` and `slots`. cache: the layer's entries, changed.

    Returns:
        q, `[T, H, D]`.

    Source: DeepSeek-V4 (2026), section 2.3.
    """

    tolerance = ACCUMULATED

    q_norm: RMSNorm
    kv_norm: RMSNorm
    rope: TailRope
    write: EntryWrite

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, batch: Batch, cache: LayerKV) -> torch.Tensor:
        entries = self.rope(self.kv_norm(kv)[:, None], batch.positions)[:, 0]
        self.write(entries, batch, cache)
        return self.rope(self.q_norm(q), batch.positions)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps; V4's own sizes with few heads."""

        def sample(label: str, dim: int, size: int, sequences: Sequences, kind: StepKind) -> Sample:
            request = KVRequest("shared_kv", 1, dim, window=128, rope=size)
            inputs = step_inputs(request, sequences, lambda d, t: (d.normal(t, 3, dim), d.normal(t, dim)))
            return Sample(label, make_enter(request), inputs, kind)

        return [
            sample("decode", 48, 16, [(1, 9), (3, 70)], "decode"),
            sample("mixed", 48, 16, [(1, 10), (17, 5)], "mixed"),
            sample("v4_decode", 512, 64, [(1, 127), (2, 5)], "decode"),
        ]


def weightless_norm(dim: int, eps: float) -> RMSNorm:
    """An RMS norm whose weight is one, which no checkpoint has."""
    return RMSNorm(Weight((), (dim,), make=lambda: torch.ones(dim)), eps)


def make_enter(request: KVRequest) -> SharedKVNormRopeWrite:
    """The steps before attention, for samples."""
    dim, size = request.dim, request.rope
    rope = TailRope(Rope(rope_table(size), True), size)
    return SharedKVNormRopeWrite(weightless_norm(dim, 1e-6), RMSNorm(placeholder(dim), 1e-6), rope, EntryWrite(request))
