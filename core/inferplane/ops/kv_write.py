"""Writing a step's keys and values to the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.ops.draw import Sequences, step_inputs
from inferplane.ops.op import EXACT, Cost, Op, Sample, Workload
from inferplane.types import Batch, KVRequest, LayerKV, StepKind


class KVWrite(Op, name="kv_write"):
    """Store this step's K and V in the cache; rows with slot -1 are ignored.

    Args of the call:
        k: `[T, G, D]`. v: `[T, G, Dv]`. Either may be strided.
        batch: its `slots` `[T]`.
        kv: the layer's cache, changed.

    Returns:
        None.

    Source: paged attention, Kwon et al., arXiv 2309.06180.
    """

    tolerance = EXACT
    writes_cache = True

    kv: KVRequest

    def __call__(self, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
        kv.write(batch.slots, k, v)

    def cost(self, load: Workload) -> Cost:
        """Bytes read and written."""
        return Cost(2 * load.tokens * self.kv.entries * load.dtype.itemsize)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Empty caches and caches with history, strided V."""
        request = KVRequest("gqa", 2, 64, 64)

        def sample(label: StepKind, sequences: Sequences) -> Sample:
            inputs = step_inputs(request, sequences, lambda d, t: (d.normal(t, 2, 64), d.normal(t, 2, 160)[..., 96:]))
            return Sample(label, KVWrite(request), inputs, label)

        return [sample("decode", [(1, 5), (2, 70)]), sample("mixed", [(1, 130), (50, 0), (9, 63)])]
