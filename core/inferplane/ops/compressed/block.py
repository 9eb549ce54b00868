"""The block around attention of one KV head: low-rank queries, the shared entry, a grouped output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.attention import each_range
from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.collective import AllReduce
from inferplane.ops.compressed.attention import SharedKVAttention
from inferplane.ops.compressed.output import GroupedLinear
from inferplane.ops.compressed.rotation import SharedKVNormRopeWrite, TailRope, make_enter
from inferplane.ops.draw import Sequences, step_inputs
from inferplane.ops.linear import Linear
from inferplane.ops.op import BLOCK, Cost, Op, Sample, Workload, placeholder
from inferplane.types import Batch, KVRequest, LayerKV, StepKind


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
            return Sample(label, SharedKVBlock(**block_fields(request)), inputs, kind)

        return [
            sample("decode", [(1, 30), (3, 20), (1, 0)], "decode"),
            sample("prefill", [(32, 0), (20, 0)], "mixed"),
            sample("mixed", [(1, 50), (2, 17), (20, 0), (11, 40)], "mixed"),
        ]


def block_fields(request: KVRequest, *, heads: int = 4, groups: int = 2, width: int = 64, rank: int = 40) -> Any:
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
