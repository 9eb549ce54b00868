"""A model that runs layer by layer in float32 on the host, by the bodies of its ops: one layer's weights at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inferplane.binding import FormatReader, TensorSource
from inferplane.binding.link import Around, bind_body
from inferplane.binding.load import assemble
from inferplane.calibrate.drafting import PredictionLayer
from inferplane.ops import CausalLM, Op
from inferplane.ops.oracle import OracleKV, Stored
from inferplane.types import (
    HOST,
    Batch,
    CachePart,
    HybridCache,
    IndexedCache,
    KVRequest,
    LayerCache,
    QTensor,
    Selection,
    StateCache,
    StateSlots,
    Weight,
)
from inferplane.types.batch import Query, make_batch
from inferplane.types.kv import make_compressed_cache

BLOCK_TOKENS = 64
LayerOp = Op | PredictionLayer
"""What is loaded, bound and run by itself."""
STATES = StateSlots(1, 2)
"""The slots of the one sequence of a step; slot 0 is that of padding."""


class Hidden(NamedTuple):
    """What a layer reads and returns: x and residual, whose sum is the hidden state, `[T, D]` each; no residual before
    the first layer. Between the halves of a layer with a shortcut the residual is `[T, 2 D]`, two parts of that sum.
    With sparse attention also the positions that a layer chose (`Selection`)."""

    x: torch.Tensor
    residual: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """The hidden state, `[T, D]`."""
        if self.residual is None:
            return self.x
        return self.x + self.residual.unflatten(-1, (-1, self.x.shape[-1])).sum(-2)


@dataclass(frozen=True)
class LayeredModel:
    """A model whose layers are loaded and run one after the other.

    Args:
        model: its tree of ops.
        source: its tensors, as its readers need them.
        readers: a reader per quantized format.
    """

    model: CausalLM
    source: TensorSource
    readers: Mapping[str, FormatReader]

    def load(self, op: LayerOp) -> dict[int, torch.Tensor]:
        """The values of an op's weights in float32, by the weights' ids. Integers stay as they are.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        found: dict[int, torch.Tensor] = {}
        for _, weight in op.weights():
            if id(weight) in found:
                continue
            value = assemble(weight, self.source, torch.float32, self.readers)
            if isinstance(value, QTensor):
                value = value.dequantize()
            found[id(weight)] = value.float() if value.is_floating_point() else value
        return found

    def embed(self, windows: Sequence[Sequence[int]]) -> list[Hidden]:
        """What the first layer reads of each window of token ids."""
        embed = bind(self.model.embed, self.load(self.model.embed))
        return [Hidden(embed(torch.tensor(ids)), None) for ids in windows]

    def norm(self, op: Op, hidden: Sequence[Hidden]) -> list[torch.Tensor]:
        """The hidden states of each window after a norm that adds x and the residual."""
        norm = bind(op, self.load(op))
        return [norm(each.x, each.residual)[0] for each in hidden]


def bind(op: LayerOp, values: Mapping[int, torch.Tensor], around: Around | None = None) -> Callable[..., Any]:
    """Bind an op to its body, with the values of its weights (`LayeredModel.load`)."""

    def value_of(weight: Weight) -> torch.Tensor:
        return values[id(weight)]

    if isinstance(op, PredictionLayer):
        return op.bind(lambda part: bind_body(part, value_of, around))
    return bind_body(op, value_of, around)


def make_step(ids: Sequence[int]) -> Batch:
    """The step of one window, as a prompt."""
    blocks = range(-(-len(ids) // BLOCK_TOKENS))
    return make_batch([Query(ids, 0, list(blocks), state=STATES)], block_tokens=BLOCK_TOKENS, device=HOST)


def make_cache(
    layer: LayerOp, tokens: int, through: Stored | None = None, positions: torch.Tensor | None = None
) -> LayerCache:
    """What a layer is called with beside the step: caches in float32 for a sequence of so many tokens.

    Args:
        layer: the layer.
        tokens: of the sequence.
        through: applied to entries when they are written; None: they are stored as they are.
        positions: what the layers before chose; None: there is no sparse attention.
    """
    request, states = next(iter(layer.kv_requests()), None), next(iter(layer.state_requests()), None)
    slots = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    if request is not None and any(op.has_sparse_attention for _, op in layer.sites()):
        keys = next((OracleKV(other, BLOCK_TOKENS, slots) for other in layer.kv_requests()[1:]), None)
        return IndexedCache(OracleKV(request, BLOCK_TOKENS, slots, through), keys, Selection(positions))
    if any(op.has_compressed_attention for _, op in layer.sites()):
        return make_compressed_cache([CachePart(_make_kv(other, slots, through)) for other in layer.kv_requests()])
    kv = None if request is None else OracleKV(request, BLOCK_TOKENS, slots, through)
    stored = None if states is None else StateCache(states, max(STATES) + 1, torch.float32, HOST)
    return HybridCache(kv, stored) if kv is not None and stored is not None else kv or stored


def _make_kv(request: KVRequest, slots: int, through: Stored | None) -> OracleKV:
    """A cache of so many tokens; what compressors read is stored as it is."""
    per_block, is_entry = request.entries_per_block(BLOCK_TOKENS), request.kind == "shared_kv"
    kv = OracleKV(request, per_block, slots // BLOCK_TOKENS * per_block, through if is_entry else None)
    kv.covered_tokens = BLOCK_TOKENS
    return kv


def run_layer(
    layer: LayerOp, bound: Callable[..., Any], hidden: Hidden, ids: Sequence[int], through: Stored | None = None
) -> Hidden:
    """Run a bound layer over one window; `through` as of `make_cache`."""
    cache = make_cache(layer, len(ids), through, hidden.positions)
    x, residual = bound(hidden.x, hidden.residual, make_step(ids), cache)
    return Hidden(x, residual, cache.selection.positions if isinstance(cache, IndexedCache) else None)
