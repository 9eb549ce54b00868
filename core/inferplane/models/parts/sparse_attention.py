"""Latent attention over the tokens that a lightning indexer chooses (DeepSeek Sparse Attention)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from inferplane import ops
from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts.attention import latent_attention
from inferplane.models.parts.layers import norm_output_quant
from inferplane.types import PLAIN, Weight

KEY_EPS = 1e-6
"""Added to the variance of index keys; no config has it."""


def sparse_latent_attention(
    build: Build, *, interleave_index: bool, is_shared: Callable[[int], bool] = lambda i: False
) -> Callable[[int, str], ops.SparseMLABlock]:
    """Return a function that builds a layer's sparse latent attention from the layer's number and the attention's name.

    All ranks have the whole indexer, so that they choose the same tokens without a message.

    Args:
        build: its config gives the sizes of latent attention, and `index_n_heads`, `index_head_dim`, `index_topk`.
        interleave_index: whether rotary positions of the indexer turn adjacent entries, not those half of the rotated
            part apart, where `indexer_rope_interleave` does not say it. Those of attention turn adjacent entries.
        is_shared: whether a layer reads what the layer before it chose, by its number.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UsageError: the ranks cannot share the heads.
    """
    config, attention = build.config, latent_attention(build)
    width, rank, rotated = (config.size(n) for n in ("hidden_size", "q_lora_rank", "qk_rope_head_dim"))
    heads, dim, top = (config.size(n) for n in ("index_n_heads", "index_head_dim", "index_topk"))
    dims = ops.IndexDims(heads, dim, rotated, top)
    if dims.dim < rotated:
        raise CheckpointError(
            f"{config.name}: index_head_dim = {dim} is less than the qk_rope_head_dim = {rotated} entries of a head "
            "that are rotated.",
            remedy="correct the entries, or fetch the file again",
        )
    if is_shared(0):
        raise CheckpointError(
            f"{config.name}: the first layer has no indexer, and no layer before it chooses tokens.",
            remedy="correct the list of indexers, or fetch the file again",
        )
    given = config.get("indexer_rope_interleave")
    interleaved = interleave_index if given is None else config.flag("indexer_rope_interleave")

    def indexer(name: str, table: Weight) -> ops.LightningIndexer:
        rope = ops.Rope(table, interleaved)
        weights = build.router(f"{name}.weights_proj", dims.heads, width)
        if weights.weight.format == PLAIN:  # published in float32, or read as if it were
            weights = replace(weights, weight=replace(weights.weight, dtype=torch.float32))
        norm, bias = (Weight((f"{name}.k_norm.{part}",), (dims.dim,)) for part in ("weight", "bias"))
        return ops.LightningIndexer(
            wq_b=build.linear(f"{name}.wq_b", rows=dims.heads * dims.dim, columns=rank),
            wk=build.linear(f"{name}.wk", rows=dims.dim, columns=width),
            k_norm=ops.LayerNorm(norm, KEY_EPS, bias),
            weights_proj=weights,
            rope=ops.PartialRope(rope, rotated) if rotated < dims.dim else rope,
            write=ops.IndexKeyWrite(dims.request),
            select=ops.IndexSelect(dims, dims.request),
            dims=dims,
            spread=ops.RotateIndexKeys(dim & -dim) if build.rotates_index_keys and dim % 2 == 0 else None,
        )

    def block(i: int, name: str) -> ops.SparseMLABlock:
        plain = attention(i, name)
        assert plain.q_a is not None, "a config without q_lora_rank was refused"
        latents, scale = plain.dims.request, plain.expanded.scale
        own = None if is_shared(i) else indexer(f"{name}.indexer", plain.rope.table)
        readers = [plain.q_b.weight, *([] if own is None else [own.wq_b.weight])]
        return ops.SparseMLABlock(
            q_a=plain.q_a,
            q_b=plain.q_b,
            kv_a=plain.kv_a,
            enter=replace(plain.enter, output_quant=norm_output_quant(*readers)),
            rope=plain.rope,
            indexer=own,
            expanded=ops.SparseMLAExpanded(plain.expanded.kv_b, plain.dims, scale, latents, top),
            absorbed=ops.SparseMLAAbsorbed(plain.absorbed.kv_b, plain.dims, scale, latents, top),
            o=plain.o,
            dims=plain.dims,
            reduce=plain.reduce,
        )

    return block
