"""Attention of one KV head over a window, and over compressed entries beside it (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferplane import ops
from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts.layers import layer_kinds
from inferplane.models.reading.config import Config, is_number
from inferplane.models.rope import rope_table
from inferplane.types import PLAIN, KVRequest, Shard, Weight

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens that a compressed entry stands for, where the config does not say it."""
OLDER_RATES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
"""Entries of older configs, which count before `compress_rates`, as in transformers."""


@dataclass(frozen=True)
class SharedKVNames:
    """Names of the weights below the attention.

    Args:
        q_a, q_norm, q_b: of the queries' projection. kv, kv_norm: of the entries'. o_a, o_b: of the output's.
        sinks: of the heads' sinks.
        compressor: of the compressor; values, gates, bias, norm: of its parts.
        indexer: of the indexer, whose compressor has the same names; index_q, index_weights: of its own parts.
    """

    q_a: str = "wq_a"
    q_norm: str = "q_norm"
    q_b: str = "wq_b"
    kv: str = "wkv"
    kv_norm: str = "kv_norm"
    o_a: str = "wo_a"
    o_b: str = "wo_b"
    sinks: str = "attn_sink"
    compressor: str = "compressor"
    values: str = "wkv"
    gates: str = "wgate"
    bias: str = "ape"
    norm: str = "norm"
    indexer: str = "indexer"
    index_q: str = "wq_b"
    index_weights: str = "weights_proj"


PUBLISHED = SharedKVNames()
"""The names in published checkpoints, in which transformers writes them too."""


def compression_kinds(config: Config, entry: str = "compress_ratios") -> list[str]:
    """The kind of each layer's attention: `layer_types`, or what `compress_ratios` says, a number of tokens an entry.

    Raises:
        CheckpointError: it is not a list with one of these for each layer.
        UnsupportedModelError: a layer has another kind.
    """
    layers, found = config.size("num_hidden_layers"), config.get(entry)
    if config.get("layer_types") is not None or found is None:
        left_out = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(layers)]
        return layer_kinds(config, (SLIDING, SPARSE, HEAVY), left_out)
    names = {0: SLIDING, 4: SPARSE, 128: HEAVY}
    if not isinstance(found, list) or len(found) < layers:
        raise CheckpointError(
            f"{config.name}: {entry} is not a list of {layers} numbers, one a layer.",
            remedy="correct the entry, or fetch the file again",
        )
    for number in found[:layers]:
        config.check(entry, number, tuple(names))
    return [names[number] for number in found[:layers]]


def rotary_settings(config: Config, kind: str) -> dict[str, Any]:
    """The rotary settings of layers within a window ("main"), or of those with compressed entries ("compress").

    Where the config has one object for all, its scaling is that of "compress", with the base `compress_rope_theta`.
    A YaRN table has a factor of 1 unless the config states another.

    Raises:
        CheckpointError: the settings are not a mapping.
    """
    context = {"max_position_embeddings": config.get("max_position_embeddings")}
    if config.has_rotary_kinds:
        found = config.rotary(kind=kind)
    elif kind == "main":
        found = {"rope_type": "default", "rope_theta": config.number("rope_theta", 10000.0)}
    else:
        found = {**config.rotary(), "rope_theta": config.number("compress_rope_theta", 160000.0)}
    found.pop("partial_rotary_factor", None)
    return {**context, **({"attention_factor": 1.0} if found["rope_type"] == "yarn" else {}), **found}


def count_rotated(config: Config, share: Any = None) -> int:
    """The last entries of a head that are rotated: `qk_rope_head_dim`, or a share of the head.

    Args:
        config: has `head_dim`.
        share: of a head; None: `partial_rotary_factor`, if the config does not state the number.

    Raises:
        CheckpointError: the share is not above 0 and up to 1, or a head has fewer entries.
    """
    dim, size = config.size("head_dim"), config.get("qk_rope_head_dim")
    share = config.get("partial_rotary_factor") if share is None and size is None else share
    if share is None:
        size = config.size("qk_rope_head_dim", dim // 8)
    elif not is_number(share) or not 0 < share <= 1:
        raise CheckpointError(
            f"{config.name}: partial_rotary_factor is {share!r}, not a share above 0 and up to 1.",
            remedy="correct the entry, or fetch the file again",
        )
    else:
        size = int(dim * share)
    if size > dim:
        raise CheckpointError(
            f"{config.name}: {size} entries are rotated of a head, which has head_dim = {dim}.",
            remedy="correct the entries, or fetch the file again",
        )
    return size


def find_rate(config: Config, kind: str) -> int:
    """Tokens that a compressed entry of a kind of layer stands for: `compress_rate_csa` and `compress_rate_hca` of
    older configs, or `compress_rates`, or those of published models.

    Raises:
        CheckpointError: it is not a number above 0.
    """
    if config.get(OLDER_RATES[kind]) is not None:
        return config.size(OLDER_RATES[kind])
    rates = config.get("compress_rates")
    rates = {} if rates is None else rates
    rate = rates.get(kind, RATES[kind]) if isinstance(rates, Mapping) else rates
    if not isinstance(rates, Mapping) or not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
        raise CheckpointError(
            f"{config.name}: compress_rates has {rate!r} for {kind}, not a number of tokens.",
            remedy="correct the entry, or fetch the file again",
        )
    return rate


def shared_kv_attention(
    build: Build, *, names: SharedKVNames = PUBLISHED
) -> Callable[[int, str], ops.SharedKVBlock | ops.CompressedBlock]:
    """Return a function that builds a layer's attention of one KV head from the layer's number and the attention's
    name: within a window, or beside it over compressed entries too, all of them or those that an indexer chooses.
    Layers behind the model, which draft, attend within the window alone.

    All ranks have the compressors and the indexer whole, so that they choose the same entries without a message.

    Args:
        build: its config gives `num_attention_heads`, `head_dim`, `q_lora_rank`, `o_groups`, `o_lora_rank`,
            `sliding_window`, the rotated entries (`count_rotated`), the rotation (`rotary_settings`), the kinds of
            layers (`compression_kinds`) and their rates (`find_rate`); with an indexer `index_n_heads`,
            `index_head_dim` and `index_topk`.
        names: of the weights below the attention.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads, or their groups.
    """
    config = build.config
    width, rank, dim = (config.size(n) for n in ("hidden_size", "q_lora_rank", "head_dim"))
    all_heads, all_groups, inner = (config.size(n) for n in ("num_attention_heads", "o_groups", "o_lora_rank"))
    if all_heads % all_groups:
        raise CheckpointError(
            f"{config.name}: num_attention_heads = {all_heads} cannot be divided into o_groups = {all_groups} equal "
            "groups.",
            remedy="correct the entries, or fetch the file again",
        )
    heads, groups = build.local_size("num_attention_heads", all_heads), build.local_size("o_groups", all_groups)
    size, window, first = count_rotated(config), config.size("sliding_window"), build.placement.tp_rank * groups
    kinds = compression_kinds(config)
    tables = {kind: rope_table(rotary_settings(config, kind), size, build.positions) for kind in ("main", "compress")}
    ropes = {kind: ops.TailRope(ops.Rope(table, True), size) for kind, table in tables.items()}

    def group(name: str, number: int) -> ops.Linear:
        shard = Shard(0, first + number, all_groups)
        return build.linear(name, rows=inner, columns=all_heads // all_groups * dim, shards=(shard,))

    def compressor(name: str, dims: ops.CompressorDims) -> ops.Compressor:
        bias = Weight((f"{name}.{names.bias}",), (dims.rate, dims.series), torch.float32)
        parts = (f"{name}.{names.values}", f"{name}.{names.gates}")
        return ops.Compressor(
            build.linear(*parts, rows=2 * dims.series, columns=width),
            ops.EntryWrite(dims.rows),
            ops.CompressAndWrite(
                ops.CompressRows(bias, dims, dims.rows),
                build.rms_norm(f"{name}.{names.norm}", dims.dim),
                ropes["compress"],
                ops.EntryWrite(dims.entries),
                dims,
                ops.RotateIndexKeys(dims.dim & -dims.dim) if dims.of_index and build.rotates_index_keys else None,
            ),
        )

    def indexer(name: str, rate: int) -> ops.CompressedIndexer:
        index_heads, index_dim, top = (config.size(n) for n in ("index_n_heads", "index_head_dim", "index_topk"))
        if size > index_dim:
            raise CheckpointError(
                f"{config.name}: {size} entries are rotated of an indexer's head of index_head_dim = {index_dim}.",
                remedy="correct the entries, or fetch the file again",
            )
        own, dims = (
            ops.IndexDims(index_heads, index_dim, size, top),
            ops.CompressorDims(index_dim, rate, True, size, True),
        )
        weights = build.router(f"{name}.{names.index_weights}", own.heads, width)
        if weights.weight.format == PLAIN:  # read as if it were published in float32
            weights = replace(weights, weight=replace(weights.weight, dtype=torch.float32))
        keys = compressor(f"{name}.{names.compressor}", dims)
        return ops.CompressedIndexer(
            compressor=keys,
            wq_b=build.linear(f"{name}.{names.index_q}", rows=own.heads * own.dim, columns=rank),
            weights_proj=weights,
            rope=ropes["compress"],
            select=ops.IndexSelect(own, dims.entries, rate),
            dims=own,
            spread=keys.compress.spread,
        )

    def compressed(plain: ops.SharedKVBlock, kind: str, name: str) -> ops.CompressedBlock:
        """The same block, with compressed entries."""
        rate, chooses = find_rate(config, kind), kind == SPARSE
        dims = ops.CompressorDims(dim, rate, chooses, size)
        own = indexer(f"{name}.{names.indexer}", rate) if chooses else None
        few, many = (
            ops.CompressedAttention(
                heads, each.scale, each.kv, dims.entries, each.sinks, own.dims.top if own else 0, each.queries
            )
            for each in (plain.few, plain.many)
        )
        same = {field: getattr(plain, field) for field in plain.fields() if field not in ("few", "many")}
        main = compressor(f"{name}.{names.compressor}", dims)
        return ops.CompressedBlock(**same, compressor=main, indexer=own, few=few, many=many)

    def block(i: int, name: str) -> ops.SharedKVBlock | ops.CompressedBlock:
        kind = kinds[i] if i < len(kinds) else SLIDING
        request = KVRequest("shared_kv", 1, dim, window=window, rope=size)
        rope = ropes["main" if kind == SLIDING else "compress"]
        sinks = Weight((f"{name}.{names.sinks}",), (heads,), torch.float32, shard=build.shard(0))
        few, many = (ops.SharedKVAttention(heads, dim**-0.5, request, sinks, queries) for queries in ("few", "many"))
        kv_norm = build.rms_norm(f"{name}.{names.kv_norm}", dim)
        q_norm = ops.weightless_norm(dim, kv_norm.eps)
        plain = ops.SharedKVBlock(
            q_a=build.linear(f"{name}.{names.q_a}", rows=rank, columns=width),
            q_a_norm=build.rms_norm(f"{name}.{names.q_norm}", rank),
            q_b=build.linear(f"{name}.{names.q_b}", rows=heads * dim, columns=rank, axis=0),
            kv=build.linear(f"{name}.{names.kv}", rows=dim, columns=width),
            enter=ops.SharedKVNormRopeWrite(q_norm, kv_norm, rope, ops.EntryWrite(request)),
            few=few,
            many=many,
            unrotate=ops.TailRope(rope.rope, size, inverse=True),
            o_a=ops.GroupedLinear(tuple(group(f"{name}.{names.o_a}", number) for number in range(groups))),
            o_b=build.linear(f"{name}.{names.o_b}", rows=width, columns=groups * inner, axis=1),
            heads=heads,
            reduce=build.reduce(),
        )
        return plain if kind == SLIDING else compressed(plain, kind, name)

    return block
