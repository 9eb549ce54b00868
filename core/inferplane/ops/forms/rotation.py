"""What lies between a block's projection and its attention, in its less common forms: partial rotation, norms after the
rotation, no rotation at all, queries that grow with the position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.draw import Sequences, step_inputs
from inferplane.ops.forms.norms import LayerNorm, Norm, WidthRMSNorm
from inferplane.ops.kv_write import KVWrite
from inferplane.ops.op import ACCUMULATED, ROUNDED, Op, Sample, placeholder
from inferplane.types import Batch, KVRequest, LayerKV, StepKind, Weight


class PartialRope(Op, name="partial_rope", extension=True):
    """Rotate the first entries of each head and leave the others: `y = [rope(x[..., :size]) | x[..., size:]]`.

    Args of the call:
        x: `[T, H, D]`, possibly strided.
        positions: int64 `[T]`.

    Returns:
        `[T, H, D]` in the dtype of `x`, contiguous.

    Fields: `rope` rotates heads of `size` entries; `size` is less than D.

    Source: GPT-NeoX, arXiv 2204.06745.
    """

    tolerance = ROUNDED

    rope: Rope
    size: int

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.rope(x[..., : self.size], positions), x[..., self.size :]), -1)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Both pairings, most and few of the entries."""

        def sample(label: str, size: int, heads: int, dim: int, *, interleaved: bool) -> Sample:
            op = PartialRope(Rope(rope_table(size), interleaved), size)
            return Sample(label, op, lambda d: (d.normal(5, heads, dim), d.ints(5, below=512)))

        return [
            sample("half", 32, 2, 64, interleaved=False),
            sample("interleaved", 64, 1, 128, interleaved=True),
            sample("most", 36, 3, 48, interleaved=False),
        ]


class PrepareAttention(Op, name="prepare_attention", extension=True):
    """The steps between a block's projection and its attention: norms on q and k, rotation, factors by position, cache
    write. Each may be left out.

    `q, k = rope(q_norm(q)), rope(k_norm(k))`, or with `norms_last` `q, k = q_norm(rope(q)), k_norm(rope(k))`; then
    `q = q * q_factors[positions]`, in float32, rounded once; `write(k, v)`. A part that is None is the identity. Rows
    with slot -1 are computed but not written.

    Args of the call:
        q: `[T, H, d]`. k: `[T, G, d]`. v: `[T, G, dv]`. Any may be strided.
        batch: its `positions` and `slots`. kv: the layer's cache, changed.

    Returns:
        q, `[T, H, d]`, contiguous.

    Fields: `write`; `rope`; `q_norm` and `k_norm`, over each head or over all heads together; `norms_last`;
    `q_factors` float32 `[positions]` or None.

    Source: norms over all heads as in OLMo 2, arXiv 2501.00656; layers without rotation as in arXiv 2501.18795; factors
    by position as in Llama 4 (transformers' Llama4TextConfig).
    """

    tolerance = ACCUMULATED

    write: KVWrite
    rope: Rope | PartialRope | None = None
    q_norm: Norm | WidthRMSNorm | None = None
    k_norm: Norm | WidthRMSNorm | None = None
    norms_last: bool = False
    q_factors: Weight | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and not self.norms_last:
            q, k = q_norm(q), k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
        if q_norm is not None and k_norm is not None and self.norms_last:
            q, k = q_norm(q), k_norm(k)
        if self.q_factors is not None:
            factors = self.q_factors[batch.positions]  # type: ignore[index]
            q = (q.float() * factors[:, None, None]).to(q.dtype)
        self.write(k, v, batch, kv)
        return q.contiguous()

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Each norm before and after the rotation, partial and no rotation, factors by position."""
        width, rms = _norms(WidthRMSNorm), _norms(RMSNorm)
        rope = Rope(rope_table(32))
        partial = PartialRope(Rope(rope_table(16), True), 16)
        factors = Weight((), (512,), torch.float32, make=lambda: 1 + 0.1 * torch.log1p(torch.arange(512.0) // 8))

        def sample(label: str, sequences: Sequences, kind: StepKind, **fields: Any) -> Sample:
            request = KVRequest("gqa", 2, 32, 32)
            inputs = step_inputs(request, sequences, lambda d, t: d.normal(t, 8, 32).split((4, 2, 2), 1))
            return Sample(label, PrepareAttention(KVWrite(request), **fields), inputs, kind)

        decode, mixed = [(1, 9), (3, 70)], [(1, 10), (17, 5)]
        return [
            sample("no_rotation", decode, "decode"),
            sample("width", decode, "decode", rope=rope, **width),
            sample("heads", mixed, "mixed", rope=rope, **rms),
            sample("norms_last", mixed, "mixed", rope=rope, norms_last=True, **rms),
            sample("partial", mixed, "mixed", rope=partial),
            sample("factors", decode, "decode", rope=rope, q_factors=factors),
            sample("by_head", decode, "decode", rope=rope, **_norms(LayerNorm)),
        ]


def _norms(kind: type[Op]) -> dict[str, Any]:
    """Norms of a kind for samples with 4 heads and 2 KV heads of 32 entries."""
    if kind is WidthRMSNorm:
        return {f"{x}_norm": WidthRMSNorm(placeholder(h * 32), 1e-6, h * 32) for x, h in (("q", 4), ("k", 2))}
    if kind is LayerNorm:
        return {f"{x}_norm": LayerNorm(placeholder(h, 32), 1e-5) for x, h in (("q", 4), ("k", 2))}
    return {f"{x}_norm": kind(placeholder(32), 1e-6) for x in "qk"}  # type: ignore[call-arg]
