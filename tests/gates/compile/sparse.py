"""Calls of kernels of sparse latent attention at DeepSeek-V3.2's sizes, by name, as in `specimens.py`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from inferplane.kernels.triton import Tiles
from inferplane.ops import IndexDims
from tests.gates.compile.specimens import V3, cache, empty, specimen, step

INDEX = IndexDims(64, 128, 64, 2048)


@specimen("layer_norm")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import layer_norm

    layer_norm(SimpleNamespace(weight=empty(128), bias=empty(128), eps=1e-6, offset=0.0), empty(4, 128))


@specimen("partial_rope")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.kv_write import partial_rope

    rope = SimpleNamespace(table=empty(64, 2, 32, dtype=torch.float32), interleaved=False)
    partial_rope(SimpleNamespace(rope=rope, size=64), empty(4, 64, 128), torch.zeros(4, dtype=torch.int64))


@specimen("rotate_index_keys")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.sparse.index_scores import rotate_index_keys

    rotate_index_keys(SimpleNamespace(block=128), empty(4, 64, 128))


@specimen("index_key_write_fp8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.kv_write import index_key_write

    index_key_write(SimpleNamespace(), empty(2, 1, 128), step(1, 8), cache(INDEX.request, "fp8"))


@specimen("index_select")
def _(tiles: Tiles) -> None:
    _select(tiles, "auto")


@specimen("index_select_fp8")
def _(tiles: Tiles) -> None:
    _select(tiles, "fp8")


def _select(tiles: Tiles, kind: str) -> None:
    from inferplane.kernels.triton.sparse.index_scores import score_keys
    from inferplane.kernels.triton.sparse.selection import index_select

    op, batch = SimpleNamespace(dims=INDEX, prepared=tiles), step(1, 8000)
    rows, keys = (empty(2, 64, 128), empty(2, 64, dtype=torch.float32)), cache(INDEX.request, kind)
    if kind == "auto":
        index_select(op, *rows, batch, keys)
    else:
        score_keys(op, *rows, batch, keys, range(2), 8016)


@specimen("sparse_mla")
def _(tiles: Tiles) -> None:
    _attend(tiles, "auto")


@specimen("sparse_mla_fp8")
def _(tiles: Tiles) -> None:
    _attend(tiles, "fp8")


def _attend(tiles: Tiles, kind: str) -> None:
    from inferplane.kernels.triton.sparse.attention import sparse_mla_absorbed

    op = SimpleNamespace(kv_b=empty(16 * 256, 512), dims=V3, scale=1.0, prepared=tiles)
    rows = empty(2, 16, 128), empty(2, 16, 64), empty(2, 2048, dtype=torch.int32)
    sparse_mla_absorbed(op, *rows, step(1, 8000), cache(V3.request, kind))
