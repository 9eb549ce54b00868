"""Which KV layouts are on offer for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from inferplane.plugin import KVLayout, KVRequest, LayerKV, paged_layout
from inferplane_npu.kvcache import (
    BLOCK_TOKENS,
    INT8_ALIGNMENT,
    INT8_LARGEST,
    LATENT,
    LATENT_ND_128,
    LATENT_NZ_128,
    ND_128,
    ND_128_INT8,
    NZ,
    NZ_128,
    ROTARY,
    NpuInt8KV,
    NpuKV,
)
from inferplane_npu.sparse_caches import (
    INDEX_DIM,
    INDEX_INT8_128,
    INDEX_ND_128,
    LATENT_TILES_128,
    NpuIndexKV,
    NpuInt8IndexKV,
    NpuTiledLatentKV,
    count_row_bytes,
)

HALF_STEP = 0.5 / INT8_LARGEST
"""Error of an entry in int8, relative to the largest one with its scale."""
HALF_SCALE_STEP = 2.0**-11
"""Error of a scale in float16, relative to itself."""


def _layout(
    name: str, cache: Callable[..., LayerKV], entry_bytes: Callable[[KVRequest, torch.dtype], int], error: float = 0.0
) -> KVLayout:
    """One whose blocks have so many bytes a token; with an error, its entries are in int8."""

    def build(request: KVRequest, blocks: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return cache(request, blocks, name, dtype, device)

    def bytes_per_block(request: KVRequest, dtype: torch.dtype) -> int:
        return BLOCK_TOKENS * entry_bytes(request, dtype)

    return KVLayout(name, BLOCK_TOKENS, build, bytes_per_block, "int8" if error else "auto", error)


def _count_plain_bytes(request: KVRequest, dtype: torch.dtype) -> int:
    return request.entries * dtype.itemsize


def _count_int8_bytes(request: KVRequest, dtype: torch.dtype, *, scales: int, scale_bytes: int) -> int:
    return request.entries + scales * request.heads * scale_bytes


PLAIN = {name: _layout(name, NpuKV, _count_plain_bytes) for name in (ND_128, NZ_128, LATENT_ND_128, LATENT_NZ_128)} | {
    INDEX_ND_128: _layout(INDEX_ND_128, NpuIndexKV, _count_plain_bytes)
}
KV_INT8 = _layout(ND_128_INT8, NpuInt8KV, partial(_count_int8_bytes, scales=2, scale_bytes=4), HALF_STEP)
INDEX_INT8 = _layout(
    INDEX_INT8_128, NpuInt8IndexKV, partial(_count_int8_bytes, scales=1, scale_bytes=2), HALF_STEP + HALF_SCALE_STEP
)
LATENT_TILES = _layout(LATENT_TILES_128, NpuTiledLatentKV, lambda request, dtype: count_row_bytes(dtype), HALF_STEP)


def layouts(request: KVRequest) -> tuple[KVLayout, ...]:
    """Every layout on offer for one kind of layer: the vendor's where it has one, core's otherwise, and those in int8.

    Which of the vendor's is taken is decided by the kernels: on the 310P those that read NZ are accepted, elsewhere
    those that read ND. Heads that the vendor's attention does not read in int8 have core's int8 alone. Of layouts that
    no kernel reads the first one is taken, so latents in tiles are the last: only sparse attention reads them.
    """
    int8 = paged_layout(BLOCK_TOKENS, "int8")
    if request.kind == "mla" and request.dim == LATENT + ROTARY:
        return PLAIN[LATENT_ND_128], PLAIN[LATENT_NZ_128], int8, LATENT_TILES
    if request == KVRequest("index_keys", 1, INDEX_DIM, rope=request.rope):
        return PLAIN[INDEX_ND_128], int8, INDEX_INT8
    if request.kind != "gqa":
        return paged_layout(BLOCK_TOKENS), int8
    fits = request.dim == request.v_dim and request.dim % INT8_ALIGNMENT == 0
    quantized = (KV_INT8, int8) if fits else (int8,)
    if request.heads * request.dim % NZ or request.heads * request.v_dim % NZ:
        return PLAIN[ND_128], *quantized
    return PLAIN[ND_128], PLAIN[NZ_128], *quantized
