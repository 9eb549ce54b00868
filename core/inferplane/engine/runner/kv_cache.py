"""The cache of a model: what each layer keeps, the layouts that it can have, and how long a sequence may be in the
memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import NamedTuple

import torch

from inferplane.binding import Plan
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import CapacityError, UsageError, warn
from inferplane.kvcache import (
    STATIC_DTYPES,
    STATIC_SUFFIX,
    PoolShape,
    StatePool,
    TablePlan,
    blocks_held,
    bytes_of_tables,
    list_kv_dtypes,
    paged_layout,
    static_layout,
)
from inferplane.kvcache.int4 import DTYPES as INT4_DTYPES
from inferplane.kvcache.tables import COMPRESSOR_ROWS, INDEX_KEYS, SHARED_KV
from inferplane.ops import CausalLM, Op
from inferplane.types import (
    Backend,
    CachePart,
    HybridCache,
    IndexedCache,
    KVCache,
    KVLayout,
    KVRequest,
    LayerCache,
    LayerKV,
    LayerPlace,
    Selection,
    StateCache,
    StateRequest,
)
from inferplane.types.kv import make_compressed_cache

DEFAULT_BLOCK_TOKENS = 64
SIMILAR = {"q8_0": "int8", "fp8_e4m3": "fp8", **dict.fromkeys(("q4_0", "q4_1"), "int4")}
SIMILAR |= dict.fromkeys(("f16", "bf16", "float16", "bfloat16"), "auto")
"""`kv_cache_dtype` of llama.cpp, Ollama and vLLM -> the one here."""
KV_SHARE = 0.3
"""Share of the free device memory that the cache may take by default."""


def block_tokens_of(plan: Plan) -> int:
    """Tokens per KV block of a plan. Where no layer keeps entries, blocks only count a sequence's tokens."""
    return next((layout.block_tokens for layout in plan.layouts.values()), DEFAULT_BLOCK_TOKENS)


def kv_layouts_for(
    backend: Backend,
    request: KVRequest,
    dtype: torch.dtype,
    options: RunnerOptions,
    name: str,
    has_scales: Callable[[str], bool] = bool,
) -> Sequence[KVLayout]:
    """The layouts that the cache of one kind of layer may have: those of the device with the KV dtype and the block
    size of the options. Binding then picks one that the attention kernels read.

    Index keys, by which tokens are chosen, have a scale a token and the dtype of `index_key_dtype`, or at least 8 bits.
    So have entries that stand for several tokens; rows of compressors are in the plan's dtype.

    Args:
        backend: of the device; core's paged layouts if it has none of its own.
        request: the entries that a layer stores.
        dtype: of the plan.
        options: `kv_cache_dtype`, and `block_tokens` if the model drafts for another.
        name: of the model, for the error.
        has_scales: whether the model has static scales for a KV dtype; left out: for all. Without them layouts of
            integers with static scales are left out; FP8 has a scale of 1.

    Raises:
        UsageError: no layout has the KV dtype, or the block size of the model that this model drafts for; the only ones
            need static scales that the model lacks.
    """
    known = list(backend.kv_layouts(request, dtype)) or [
        paged_layout(DEFAULT_BLOCK_TOKENS, kv_dtype) for kv_dtype in list_kv_dtypes(request)
    ]
    kv_dtype = options.kv_cache_dtype.removesuffix(STATIC_SUFFIX)
    kv_dtype = "auto" if request.kind in COMPRESSOR_ROWS else kv_dtype
    has_own_scales = request.kind in (INDEX_KEYS, SHARED_KV, *COMPRESSOR_ROWS)
    kv_dtype = "int8" if has_own_scales and kv_dtype in INT4_DTYPES else kv_dtype
    if request.kind == INDEX_KEYS:
        kv_dtype = {"auto": kv_dtype, "none": "auto"}.get(options.index_key_dtype, options.index_key_dtype)
    fitting = [x for x in known if x.kv_dtype == kv_dtype]
    if has_own_scales:
        portable = [paged_layout(known[0].block_tokens, kv_dtype)] if kv_dtype in list_kv_dtypes(request) else []
        fitting = [x for x in fitting if not x.has_static_scales] or portable
    elif kv_dtype != options.kv_cache_dtype:
        own = [x for x in fitting if x.has_static_scales]
        portable = [static_layout(known[0].block_tokens, kv_dtype)] if kv_dtype in STATIC_DTYPES else []
        fitting = own or portable
    if fitting and kv_dtype != "fp8" and not has_scales(kv_dtype):
        fitting = [x for x in fitting if not x.has_static_scales]
        if not fitting:
            raise UsageError(
                f"kv_cache_dtype = {options.kv_cache_dtype!r} on device {backend.name!r} needs static scales, and "
                f"{name} has none for {kv_dtype}.",
                remedy=f"calibrate some: `inferplane quantize {name} --kv-cache {kv_dtype} --data TEXTS --out FOLDER`",
            )
    block_tokens = options.block_tokens
    if fitting and block_tokens is not None:
        fitting = [x for x in fitting if x.block_tokens == block_tokens]
        if not fitting:
            raise UsageError(
                f"{name} drafts for a model with KV blocks of {block_tokens} tokens.",
                there_is=f"blocks of {', '.join(sorted({str(x.block_tokens) for x in known}))} for it",
                remedy="use a draft model whose cache has blocks of that size, or another method",
            )
    if not fitting:
        similar = SIMILAR.get(options.kv_cache_dtype.lower(), "")
        raise UsageError(
            f"kv_cache_dtype = {options.kv_cache_dtype!r} on device {backend.name!r}.",
            there_is=", ".join(sorted({x.kv_dtype for x in known})),
            remedy=f"perhaps {similar} was meant" if similar in {x.kv_dtype for x in known} else "",
        )
    return fitting


@dataclass(frozen=True)
class CacheMemory:
    """The number and size of a cache's blocks, and its memory budget; computes how long a sequence may be in it.

    Args:
        blocks: number of blocks of each pool. block_tokens: tokens per block. pools: what their blocks hold.
        budget_bytes: maximum size of the cache.
        option: the option that sizes the cache, "kv_cache_bytes" or "kv_cache_tokens", for messages.
    """

    blocks: Sequence[int]
    block_tokens: int
    pools: Sequence[PoolShape]
    budget_bytes: int
    option: str = "kv_cache_bytes"

    def max_sequence_tokens(self, limit: int, *, explicit_length: bool, explicit_budget: bool = False) -> int:
        """How many tokens a sequence may have in this cache: `limit`, or fewer if the blocks do not hold that many.
        Where all layers have a window, a sequence needs only blocks for the windows, so `limit` may exceed the cache.

        Args:
            limit: the number of tokens that the model allows, or `max_model_len`.
            explicit_length: max_model_len was set by the user; a shorter maximum is an error.
            explicit_budget: the cache's size was set by the user; warn if it shortens sequences.

        Raises:
            CapacityError: the budget holds no block, or not the explicit length.
        """
        limit_bytes = self._count_bytes(self._max_blocks(limit))
        size, enough = self._sizes(limit)
        have = f"{sum(self.blocks)} KV blocks of {self._describe_bytes()} bytes"
        if min(self.blocks) < 1:
            raise CapacityError(
                f"One KV block takes {self._describe_bytes()} bytes; the cache may take {self.budget_bytes}.",
                remedy=f"raise kv_cache_bytes, for example to {limit_bytes}: {limit} tokens take so many bytes",
            )
        if self._holds(limit):
            return limit
        if explicit_length:
            raise CapacityError(
                f"max_model_len = {limit} needs {sum(self._max_blocks(limit))} KV blocks of {self._describe_bytes()} "
                "bytes.",
                there_is=f"{self.budget_bytes} bytes for {sum(self.blocks)}",
                remedy=f"lower max_model_len, or pass {self.option}={enough}",
            )
        longest, high = 0, limit - 1
        while longest < high:  # longer sequences need more blocks
            middle = (longest + high + 1) // 2
            longest, high = (middle, high) if self._holds(middle) else (longest, middle - 1)
        if not longest:
            tables = sum(len(shape.windows) for shape in self.pools)
            raise CapacityError(
                f"A sequence has {tables} block tables; the cache has {sum(self.blocks)} KV blocks.",
                remedy=f"raise kv_cache_bytes, for example to {limit_bytes}: {limit} tokens take so many bytes",
            )
        if explicit_budget:
            warn(
                f"{self.option} = {size} holds {have}: sequences have at most {longest} of the model's {limit} tokens. "
                f"To do: raise {self.option}, for example to {enough}."
            )
        return longest

    def _sizes(self, tokens: int) -> tuple[int, int]:
        """The size of this cache and that of one which holds a sequence of `tokens` tokens, as the option counts it."""
        blocks = self._max_blocks(tokens)
        if self.option == "kv_cache_bytes":
            return self.budget_bytes, self._count_bytes(blocks)
        wave = bytes_of_tables(self.pools) / self.block_tokens  # a block of each table for so many tokens
        counts = (self._count_bytes(self.blocks), self._count_bytes(blocks)) if wave else (0, 0)
        return int(counts[0] / max(wave, 1e-9)), int(counts[1] / max(wave, 1e-9))

    def _max_blocks(self, tokens: int) -> list[int]:
        """The largest numbers of blocks that a sequence holds at a time, if steps are as small as they may be."""
        return [blocks_held(shape.windows, tokens, 1, self.block_tokens) for shape in self.pools]

    def _holds(self, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens fits alone."""
        return all(need <= have for need, have in zip(self._max_blocks(tokens), self.blocks))

    def _count_bytes(self, blocks: Sequence[int]) -> int:
        return sum(count * shape.block_bytes for count, shape in zip(blocks, self.pools))

    def _describe_bytes(self) -> str:
        return " and ".join(str(shape.block_bytes) for shape in self.pools)


@dataclass(frozen=True)
class CachePlan:
    """Sizes of a runner's caches.

    Args:
        blocks: number of blocks of each pool. budget_bytes: what all caches together may take.
        max_model_len: maximum number of tokens of a sequence in them.
    """

    blocks: tuple[int, ...]
    budget_bytes: int
    max_model_len: int


class LayerRequests(NamedTuple):
    """What a layer keeps of each token, and of each sequence; None: nothing.

    Args:
        kv: the entries that attention reads. states: of sequences.
        index_keys: those by which the layer chooses what attention reads.
        is_sparse: whether attention reads what this layer or one before it chose.
        compressed: what it keeps beside `kv` to read compressed entries, in the order of `CompressedCache`.
    """

    kv: KVRequest | None
    states: StateRequest | None
    index_keys: KVRequest | None = None
    is_sparse: bool = False
    compressed: tuple[KVRequest, ...] = ()

    @property
    def keeps_entries_only(self) -> bool:
        """Whether it keeps entries of tokens and nothing else, as in a model of attention that reads all of them."""
        return self.kv is not None and self.states is None and not self.is_sparse and not self.compressed

    @property
    def of_tokens(self) -> tuple[KVRequest, ...]:
        """All that it keeps of each token."""
        return tuple(request for request in (self.kv, self.index_keys, *self.compressed) if request is not None)


def list_requests(layers: Iterable[Op]) -> list[LayerRequests]:
    """What each of some layers keeps."""
    return [_requests_of(layer) for layer in layers]


def _requests_of(layer: Op) -> LayerRequests:
    if any(op.has_compressed_attention for _, op in layer.sites()):
        kv, *compressed = layer.kv_requests()
        return LayerRequests(kv, next(iter(layer.state_requests()), None), compressed=tuple(compressed))
    kv, index_keys, *_ = (*layer.kv_requests(), None, None)
    is_sparse = any(op.has_sparse_attention for _, op in layer.sites())
    return LayerRequests(kv, next(iter(layer.state_requests()), None), index_keys, is_sparse)


def build_pools(
    tables: TablePlan,
    requests: Sequence[KVRequest],
    blocks: Sequence[int],
    block_tokens: int,
    build: Callable[[Sequence[KVRequest], int], KVCache],
) -> KVCache:
    """The cache of entries, whose layers share storages as their tables allow.

    Args:
        tables: of the layers. requests: of the same layers.
        blocks: number of blocks of each pool. block_tokens: tokens per block.
        build: `(requests, blocks) -> KVCache`, a pool's storages; not called without requests.
    """
    parts = zip(tables.storages_by_pool(), blocks)
    built = [build(storages, count) if storages else KVCache((), count, block_tokens) for storages, count in parts]
    made = built[0] if len(built) == 1 else KVCache((), min(blocks), block_tokens, pools=tuple(blocks))
    if tables.num_tables == 1:
        return made
    of_pool = [iter(each.layers) for each in built]
    storages = [next(of_pool[pool]) for pool in tables.list_storage_pools()]
    stored = (storages[storage] for storage in tables.storage_of)
    layers = tuple(kv if kv.request == request else kv.share(request) for kv, request in zip(stored, requests))
    return replace(made, layers=layers, tables=tables.table_of)


def place_caches(
    requests: Sequence[LayerRequests],
    kv: Sequence[LayerKV],
    tables: Sequence[int],
    num_sequences: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerPlace, ...]:
    """What each layer is called with. Allocates the states.

    Args:
        requests: of all layers.
        kv: the caches of the layers that keep entries, in order; index keys follow a layer's entries.
        tables: numbers of their block tables.
        num_sequences: largest number of sequences that have states at a time.
        dtype: of the plan. device: of the states.
    """
    slots, left, selection = StatePool(num_sequences).slots, iter(zip(kv, tables)), Selection()

    def place(request: LayerRequests) -> LayerPlace:
        own, table = (None, 0) if request.kv is None else next(left)
        if request.is_sparse and own is not None:
            return LayerPlace(
                IndexedCache(own, None if request.index_keys is None else next(left)[0], selection), table
            )
        if request.compressed and own is not None:
            parts = (next(left) for _ in request.compressed)
            return LayerPlace(make_compressed_cache([CachePart(own, table), *starmap(CachePart, parts)]))
        states = None if request.states is None else StateCache(request.states, slots, dtype, device)
        cache: LayerCache = own or states
        return LayerPlace(HybridCache(own, states) if own is not None and states is not None else cache, table)

    return tuple(map(place, requests))


def count_slot_bytes(requests: Iterable[LayerRequests], dtype: torch.dtype) -> int:
    """Bytes of one slot of states in all layers, where `dtype` is the plan's."""
    return sum(request.states.count_bytes(dtype) for request in requests if request.states is not None)


def count_budget(options: RunnerOptions, free_bytes: int, block_tokens: int, pools: Sequence[PoolShape]) -> int:
    """Bytes that a cache may take: those of `kv_cache_tokens` or `kv_cache_bytes`, else a share of what is free.

    Args:
        options: of the model.
        free_bytes: of memory beside weights and states.
        block_tokens: tokens per block.
        pools: what blocks hold; each block table of a sequence has a block for the same tokens.

    Raises:
        CapacityError: `kv_cache_tokens` take more than is free.
    """
    if options.kv_cache_tokens is None:
        return int(free_bytes * KV_SHARE) if options.kv_cache_bytes is None else options.kv_cache_bytes
    wave_bytes = bytes_of_tables(pools)
    budget = -(-options.kv_cache_tokens // block_tokens) * wave_bytes
    if budget > free_bytes:
        raise CapacityError(
            f"kv_cache_tokens = {options.kv_cache_tokens} takes {budget} bytes.",
            there_is=f"{free_bytes} bytes beside the weights",
            remedy=f"lower kv_cache_tokens (BLOCK_BS), to {free_bytes // wave_bytes * block_tokens} at most",
        )
    return budget


def check_memory(state_bytes: int, num_sequences: int, free_bytes: int) -> None:
    """Raise CapacityError if the states of all sequences do not fit in the free memory.

    Args:
        state_bytes: of the states, in all slots. num_sequences: that they are for.
        free_bytes: of memory beside the weights.
    """
    if state_bytes > free_bytes:
        raise CapacityError(
            f"The states of {num_sequences} sequences take {state_bytes} bytes.",
            there_is=f"{free_bytes} bytes beside the weights",
            remedy=f"lower max_num_seqs: each sequence takes {state_bytes // num_sequences} bytes",
        )


def check_options(model: CausalLM, options: RunnerOptions, name: str) -> None:
    """Refuse options that do not work with states of sequences.

    Args:
        model: bound with the options. name: of its files, for errors.

    Raises:
        UsageError: it would draft for another model, or a layer behind it would draft.
    """
    if not model.state_requests():
        return
    if options.block_tokens is not None:
        raise UsageError(
            f"{name} has recurrent layers, so it cannot draft for another model.",
            remedy="use a draft model without recurrent layers, or method='ngram'",
        )
    if options.has_draft_layer:
        raise UsageError(
            f"{name} has recurrent layers, so no layer behind it can draft.",
            remedy="use method='ngram', or 'draft_model' with a model without recurrent layers",
        )
