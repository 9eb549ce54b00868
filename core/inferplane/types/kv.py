"""The KV cache as kernels and reference bodies see it. The engine owns block numbers; the backend owns the blocks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from inferplane.errors import UsageError
from inferplane.renamed import warn_of_old_name
from inferplane.types.device import HOST
from inferplane.types.kv_request import KVRequest
from inferplane.types.scratch import Scratch
from inferplane.types.state import StateCache


class LayerKV(Scratch, ABC):
    """One layer's cache in some layout. Reference bodies use only `write` and `read`.

    A slot is `block * block_tokens + offset`. Attributes: `layout` (the name that kernels state in
    `When.kv_layouts`), `block_tokens`, `request`. Kernels keep what they compute once per cache in `once(key, make)`.
    Where an entry stands for several tokens (`KVRequest.rate`), slots, tables and `block_tokens` count entries, and
    `Batch.for_entries` gives the step so.
    """

    layout: str
    block_tokens: int
    request: KVRequest
    covered_tokens: int | None = None
    """Tokens of a sequence that a block is for, where it has another number of entries; None: `block_tokens`."""
    shares: LayerKV | None = None
    """The cache whose memory this one uses (`share`); None: it has memory of its own."""

    def share(self, request: KVRequest) -> LayerKV:
        """(optional) This cache as a further layer sees it, whose entries lie in other blocks of the same memory.

        Default: a shallow copy with the other request. Override it if that does not share the memory.

        Args:
            request: of the further layer; it differs in its window at most.
        """
        if replace(request, window=None) != replace(self.request, window=None):
            raise UsageError(
                f"A layer that stores {request} cannot use the memory of one that stores {self.request}.",
                remedy="share memory only between layers whose entries have the same shapes",
            )
        return self.copy_with(request=request, shares=self.shares or self)

    def with_scales(self, scales: Sequence[float]) -> LayerKV:
        """(required of layouts with `KVLayout.has_static_scales`) This cache, in the same memory, with the static
        scales of a layer.

        Args:
            scales: positive; one for each of `request.entry_shapes`: an entry is stored divided by it.
        """
        raise UsageError(
            f"KV layout {self.layout} has no static scales.", remedy="override LayerKV.with_scales in its class"
        )

    @abstractmethod
    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """(required) Store one token per row.

        Args:
            slots: `[T]`; rows with slot -1 are ignored.
            values: "gqa": K `[T, heads, dim]` and V `[T, heads, v_dim]`; "mla": one `[T, dim]`. In general one
                `[T, *shape]` for each of `request.entry_shapes`.
        """

    @abstractmethod
    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """(required) The first `tokens` tokens of a sequence in canonical form, dequantized, as attention sees them.

        Args:
            table: the sequence's block table `[blocks]`.
            tokens: number of tokens to return.

        Returns:
            "gqa": K `[tokens, heads, dim]`, V `[tokens, heads, v_dim]`; "mla": one `[tokens, dim]`; in general one
            `[tokens, *shape]` for each of `request.entry_shapes`. The results may be views: use them before the next
            `write`.
        """

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """(optional) Copy whole blocks inside this layer: `[n]` block numbers to `[n]` block numbers.

        Default: read all source blocks, then write the target blocks. Override it if the layout quantizes entries, so
        that copying does not round them again; `BlockedKV` does.
        """
        values = self.read(source, len(source) * self.block_tokens)
        self.write(self._slots_of(target), *(value.clone() for value in values))

    def export(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(optional) Contents of `[n]` blocks, each `[n, ...]` on the host, for `load`. Default: canonical form,
        `[n, block_tokens, *shape]`."""
        values = self.read(blocks, len(blocks) * self.block_tokens)
        return tuple(value.to(HOST, copy=True).unflatten(0, (len(blocks), self.block_tokens)) for value in values)

    def load(self, blocks: torch.Tensor, stored: tuple[torch.Tensor, ...]) -> None:
        """(optional) Put what `export` returned into `[n]` blocks (any numbers). Default: takes canonical form.

        Raises:
            UsageError: the shapes do not fit this layout.
        """
        self._check_shapes(stored, [(len(blocks), self.block_tokens, *shape) for shape in self.request.entry_shapes])
        self.write(self._slots_of(blocks), *(value.flatten(0, 1).to(blocks.device) for value in stored))

    def _check_shapes(self, stored: Sequence[torch.Tensor], want: Sequence[tuple[int, ...]]) -> None:
        """Raise UsageError if tensors to load have other shapes than those of this layout's blocks."""
        have = [tuple(value.shape) for value in stored]
        if have != want:
            raise UsageError(
                f"KV layout {self.layout} cannot load tensors of shapes {have}.",
                there_is=f"shapes {want}",
                remedy="load only what the same layout exported",
            )

    def _slots_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Every slot of `[n]` blocks in order, int64 `[n * block_tokens]`."""
        offsets = torch.arange(self.block_tokens, device=blocks.device)
        return (blocks.long()[:, None] * self.block_tokens + offsets).flatten()


@dataclass(frozen=True)
class KVLayout:
    """A way to lay out a layer's cache in memory. Pure description: only `build` allocates.

    Args:
        name: unique, stated by kernels in `When.kv_layouts` ("paged_64", "toy_hnbd_32").
        block_tokens: tokens per block. What is built for an entry of several tokens (`KVRequest.rate`) has
            `KVRequest.entries_per_block` entries a block.
        build: `(request, blocks, dtype, device)` -> `LayerKV`; allocates.
        bytes_per_block: `(request, dtype)` -> bytes of one block of one layer, including padding and scales.
        kv_dtype: the registered KV dtype it stores ("auto" is the plan's dtype; "fp8", "int8", "int4", "k8v4").
        tolerance: largest error of a stored entry relative to the largest one, in addition to the plan's dtype.
        span: slots that are written in order, as the tokens of a sequence are: writing the first of a span anew leaves
            the others undefined until they are written, too. It divides `block_tokens`.
        has_static_scales: entries have scales a layer, which `LayerKV.with_scales` sets; else they are computed when a
            token is written, if there are any.
    """

    name: str
    block_tokens: int
    build: Callable[[KVRequest, int, torch.dtype, torch.device], LayerKV] = field(compare=False)
    bytes_per_block: Callable[[KVRequest, torch.dtype], int] = field(compare=False)
    kv_dtype: str = "auto"
    tolerance: float = 0.0
    span: int = 1
    has_static_scales: bool = False

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return math.ceil(tokens / self.block_tokens)

    def find_dependents(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots that may change when some are written: themselves, and the spans of which the first one is among
        them. `[n]` to `[m]`, with repetitions."""
        firsts = slots[slots % self.span == 0]
        return torch.cat((slots, (firsts[:, None] + torch.arange(self.span, device=slots.device)).flatten()))


Layouts = Mapping[KVRequest, KVLayout]
"""The layout chosen for each distinct request of a model; all have the same `block_tokens`."""


class HybridCache(NamedTuple):
    """The caches of a layer in which attention and a recurrence stand side by side."""

    kv: LayerKV
    states: StateCache


class Selection:
    """The positions that sparse attention reads in a step: the layer that chooses them sets them, and layers after it
    may read the same ones. All layers of a model have one object.

    Attributes: `positions`, int32 `[T, K]` as the op `index_select` returns them; None before the first step.

    Args:
        positions: of the step, if they are known already.
    """

    __slots__ = ("positions",)

    def __init__(self, positions: torch.Tensor | None = None) -> None:
        self.positions = positions


class IndexedCache(NamedTuple):
    """The caches of a layer with sparse attention: `index_keys` are those by which the layer chooses the tokens whose
    entries it reads in `kv`; None where it reads what another layer chose. Both lie in the same blocks.
    """

    kv: LayerKV
    index_keys: LayerKV | None
    selection: Selection


ConvertKV = Callable[[LayerKV, int], LayerKV]
"""What a layer keeps, and the number of its block table -> what stands for it."""


class CachePart(NamedTuple):
    """What a layer keeps of tokens, and the number of the block table in which it lies."""

    kv: LayerKV
    table: int = 0


class CompressorCache(NamedTuple):
    """What a compressor keeps: `rows` of the last tokens, from which it makes `entries`, one for several tokens."""

    rows: CachePart
    entries: CachePart

    def list_parts(self) -> list[CachePart]:
        """All parts, in order."""
        return list(self)

    def convert(self, convert_kv: ConvertKV) -> CompressorCache:
        """The same parts with other caches, made in order."""
        return CompressorCache(*(part._replace(kv=convert_kv(*part)) for part in self))


class CompressedCache(NamedTuple):
    """The caches of a layer that reads a window of tokens and compressed entries of all before.

    Fields: `window` the entries of the last tokens; `compressed` the compressor of what attention reads; `index_keys`
    that of those by which the layer chooses among compressed entries; None where it reads all of them.
    """

    window: CachePart
    compressed: CompressorCache
    index_keys: CompressorCache | None = None

    def list_parts(self) -> list[CachePart]:
        """All parts, in order."""
        return [self.window, *self.compressed, *(self.index_keys or ())]

    def convert(self, convert_kv: ConvertKV) -> CompressedCache:
        """The same parts with other caches, made in order."""
        window = self.window._replace(kv=convert_kv(*self.window))
        compressed = self.compressed.convert(convert_kv)
        return CompressedCache(
            window, compressed, None if self.index_keys is None else self.index_keys.convert(convert_kv)
        )


def make_compressed_cache(parts: Sequence[CachePart]) -> CompressedCache:
    """The cache of a layer from its parts, in the order of `CompressedCache.list_parts`."""
    window, rows, entries, *index = parts
    return CompressedCache(window, CompressorCache(rows, entries), CompressorCache(*index) if index else None)


LayerCache = LayerKV | StateCache | HybridCache | IndexedCache | CompressorCache | CompressedCache | None
"""What a layer is called with: entries of tokens, states of sequences, both, entries with an index, entries of a window
with compressed ones, or nothing. Parts in tables of their own have the numbers of these."""


class LayerPlace(NamedTuple):
    """A layer's cache, and the number of the block table in which the layer sees the step."""

    cache: LayerCache
    table: int = 0


@dataclass(frozen=True)
class KVCache:
    """The caches of all layers of a model: decoder layer i uses `layers[i]`, or `by_layer[i]` where there is one.

    Args:
        layers: one `LayerKV` per layer that has one; several per layer that keeps more of each token than entries.
        blocks: number of blocks in each layer; the smallest one where they differ (`pools`).
        block_tokens: tokens per block, the same for every layer.
        extra: not used by Inferplane; what a backend's `build_kv_cache` put there in 0.1. It ends with the next minor
            release: keep such objects on a `LayerKV`, or in its `once`.
        tables: number of the block table of each layer: layer i reads `batch.for_table(tables[i])`. Empty: all layers
            read the batch itself.
        by_layer: what each decoder layer is called with, where some layers keep states or nothing; their `LayerKV` are
            those in `layers`, in order. Empty: every layer has one `LayerKV` and nothing else.
        pools: number of blocks in the layers of each pool (`inferplane.kvcache.tables`); empty: there is one, and each
            layer has `blocks`.
    """

    layers: tuple[LayerKV, ...]
    blocks: int
    block_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)
    tables: tuple[int, ...] = ()
    by_layer: tuple[LayerPlace, ...] = ()
    pools: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.extra:
            warn_of_old_name("KVCache.extra", "an attribute of its LayerKV objects", stacklevel=4)

    @property
    def num_tables(self) -> int:
        """Number of block tables that a sequence has."""
        return max(self.tables, default=0) + 1

    def list_pools(self) -> tuple[int, ...]:
        """Number of blocks of each pool."""
        return self.pools or (self.blocks,)

    def list_tables(self) -> tuple[int, ...]:
        """The number of each layer's block table."""
        return self.tables or (0,) * len(self.layers)

    def storages(self) -> list[LayerKV]:
        """A cache for each distinct memory: layers in different block tables may share one (`LayerKV.share`)."""
        return [*{id(layer.shares or layer): layer.shares or layer for layer in self.layers}.values()]

    def list_states(self) -> list[StateCache]:
        """The states of each layer that keeps some, in order."""
        found = (cache.states if isinstance(cache, HybridCache) else cache for cache, _ in self.by_layer)
        return [cache for cache in found if isinstance(cache, StateCache)]

    def convert(
        self, convert_kv: Callable[[LayerKV, int], LayerKV], convert_states: Callable[[StateCache], StateCache]
    ) -> KVCache:
        """The same places with other caches in them.

        Args:
            convert_kv: a layer's entries and the number of its block table -> the other's.
            convert_states: a layer's states -> the other's.
        """
        layers = tuple(map(convert_kv, self.layers, self.list_tables()))
        others: dict[int, Any] = {id(old): new for old, new in zip(self.layers, layers)}
        others |= {id(old): convert_states(old) for old in self.list_states()}
        selection = Selection()

        def convert_place(place: LayerPlace) -> LayerPlace:
            cache: Any = place.cache
            if isinstance(cache, HybridCache):
                return place._replace(cache=HybridCache(*(others[id(part)] for part in cache)))
            if isinstance(cache, IndexedCache):
                keys = None if cache.index_keys is None else others[id(cache.index_keys)]
                return place._replace(cache=IndexedCache(others[id(cache.kv)], keys, selection))
            if isinstance(cache, (CompressorCache, CompressedCache)):
                return place._replace(cache=cache.convert(lambda kv, table: others[id(kv)]))
            return place._replace(cache=others.get(id(cache)))

        return replace(self, layers=layers, by_layer=tuple(map(convert_place, self.by_layer)))
