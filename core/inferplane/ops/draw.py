"""Random inputs for samples: tensors, ragged batches, caches with history, weights. Fresh numbers for every seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferplane.ops.formats import encode
from inferplane.types import (
    HOST,
    PLAIN,
    Batch,
    KVRequest,
    LayerKV,
    QTensor,
    StateCache,
    StateRequest,
    StateSlots,
    Weight,
)
from inferplane.types.batch import Query, make_batch

MOST = 2**15
"""Weights of integers are drawn below it."""
BuildKV = Callable[[KVRequest, int], LayerKV]
Sequences = Sequence[tuple[int, int]]
"""`(query tokens, tokens before)` of each sequence of a step, those with few query tokens first."""


class Draw:
    """A seeded source of inputs in one dtype on one device. Numbers are drawn on the host, so that a seed gives the
    same numbers on every device.

    Args:
        seed: any integer.
        dtype: dtype of drawn activations.
        device: torch device the tensors are moved to.
        build_kv: `(request, blocks) -> LayerKV`, in the layout under test.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: str = HOST, build_kv: BuildKV | None = None) -> None:
        self.generator = torch.Generator(HOST).manual_seed(seed)
        self.dtype, self.device, self.build_kv = dtype, device, build_kv

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers of the given standard deviation, in this draw's dtype unless `dtype` is given."""
        return self._place(torch.randn(*shape, generator=self.generator) * scale, dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Uniform float32 numbers in [low, high)."""
        return self._place(torch.rand(*shape, generator=self.generator) * (high - low) + low, torch.float32)

    def ints(self, *shape: int, below: int) -> torch.Tensor:
        """Integers in [0, below), int64."""
        return self._place(torch.randint(0, below, shape, generator=self.generator), torch.int64)

    def permutation(self, n: int) -> list[int]:
        """The numbers 0 to n-1 in random order."""
        return [int(i) for i in torch.randperm(n, generator=self.generator)]

    def _place(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype).to(self.device)

    # -- batches and caches

    def step(
        self, request: KVRequest, sequences: Sequences, *, written: bool = False, vocab: int = 97
    ) -> tuple[Batch, LayerKV]:
        """A ragged step over a cache that already holds each sequence's history.

        Args:
            request: the layer's cache request.
            sequences: of the step.
            written: also write the query tokens' own entries, for ops that read but do not write them (attention).
            vocab: token ids are drawn below this.

        Returns:
            The batch, and the layer's cache with random entries. Blocks are scattered, and one spare block stays
            unused. Blocks that lie entirely before a window hold NaN.
        """
        assert self.build_kv is not None, "this draw was made without a cache"
        probe = self.build_kv(request, 1)
        size, per_block, rate = probe.covered_tokens or probe.block_tokens, probe.block_tokens, request.rate
        counts = [math.ceil((new + before) / size) for new, before in sequences]
        kv = self.build_kv(request, sum(counts) + 1)
        order = self.permutation(sum(counts) + 1)
        queries = []
        for (new, before), count in zip(sequences, counts):
            blocks, order = order[:count], order[count:]
            ids = [int(i) for i in torch.randint(0, vocab, (new,), generator=self.generator)]
            queries.append(Query(ids, before, blocks))
            stored = (before + (new if written else 0)) // rate
            if stored:
                lasts = [(i + 1) * rate - 1 for i in range(stored)]  # tokens
                places = [blocks[i // size] * per_block + i % size // rate for i in lasts]
                slots = torch.tensor(places).to(self.device)
                entries = self.kv_entries(request, stored)
                for entry in entries:  # these blocks may be released and hold anything
                    entry[: request.blocks_before_window(new, before + new, size) * size] = torch.nan
                kv.write(slots, *entries)
        return make_batch(queries, block_tokens=size, device=self.device), kv

    def kv_entries(self, request: KVRequest, tokens: int) -> tuple[torch.Tensor, ...]:
        """Random entries of `tokens` tokens in canonical form, as `LayerKV.write` takes them."""
        return tuple(self.normal(tokens, *shape) for shape in request.entry_shapes)

    def fill_kv(self, request: KVRequest, blocks: int) -> LayerKV:
        """A cache of `blocks` blocks with random entries in all slots: history for any step."""
        assert self.build_kv is not None, "this draw was made without a cache"
        kv = self.build_kv(request, blocks)
        slots = blocks * kv.block_tokens
        kv.write(torch.arange(slots).to(self.device), *self.kv_entries(request, slots))
        return kv

    def state_slots(self, sequences: int) -> list[StateSlots]:
        """Slots of the states of this many sequences, in random order; one pair stays unused."""
        order = [1 + slot for slot in self.permutation(2 * (sequences + 1))]
        return [StateSlots(*order[2 * i : 2 * i + 2]) for i in range(sequences)]

    def fill_states(self, request: StateRequest, sequences: int) -> StateCache:
        """A layer's states with random numbers in all slots: those before any step of this many sequences."""
        cache = StateCache(request, 1 + 2 * (sequences + 1), self.dtype, self.device)
        for tensor in cache.tensors:
            tensor.copy_(self.normal(*tensor.shape, dtype=tensor.dtype))
        return cache

    # -- weights

    def weight(self, weight: Weight) -> torch.Tensor | QTensor:
        """Random canonical values for a declared weight, scaled so that outputs are of order one, on the host."""
        dtype = weight.dtype or self.dtype
        if weight.make is not None:
            return weight.make().to(dtype)
        if not dtype.is_floating_point:
            return torch.randint(0, MOST, weight.shape, generator=self.generator).to(dtype)
        fan_in = weight.shape[-1] if len(weight.shape) > 1 else 1
        values = torch.randn(*weight.shape, generator=self.generator) / math.sqrt(fan_in)
        if len(weight.shape) == 1:
            values = values * 0.2 + 1.0
        if weight.format == PLAIN:
            return values.to(dtype)
        return encode(values, weight.format)


StepTensors = Callable[[Draw, int], tuple[torch.Tensor | None, ...]]
"""`(draw, tokens of the step)` -> the tensors among the arguments of an op's call."""


def step_inputs(
    request: KVRequest, sequences: Sequences, tensors: StepTensors, *, written: bool = False
) -> Callable[[Draw], tuple[Any, ...]]:
    """`Sample.inputs` of an op that is called with `(*tensors, batch, kv)`; the other arguments as of `Draw.step`."""

    def inputs(draw: Draw) -> tuple[Any, ...]:
        batch, kv = draw.step(request, sequences, written=written)
        return *tensors(draw, batch.tokens), batch, kv

    return inputs
