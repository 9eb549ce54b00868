"""Tile sizes and launch options of the portable kernels. A backend passes those that suit its hardware."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch


class Counters:
    """Zeros by device, in which programs count themselves in (`split_reduction.py`) and which they leave as zeros.

    All launches of one op share them, so these must run one after another, as those of a model do on its stream.
    """

    MIN_COUNT = 4096

    def __init__(self) -> None:
        self._held: dict[torch.device, list[torch.Tensor]] = {}

    def of(self, device: torch.device, count: int) -> torch.Tensor:
        """At least `count` counters, int32 zeros on the device; made anew only if there are too few. Earlier ones stay
        alive, since captured steps go on using them.
        """
        held = self._held.setdefault(device, [])
        if not held or held[-1].numel() < count:
            held.append(torch.zeros(max(count, self.MIN_COUNT), dtype=torch.int32, device=device))
        return held[-1]


@dataclass(frozen=True)
class Launch:
    """How one attention kernel is divided into programs.

    Args:
        rows: query rows per program; a power of two, at least 16.
        keys: tokens of the cache per loop iteration; a power of two, at least 16.
        warps: warps per program.
        stages: software pipeline depth.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2

    def for_dtype(self, dtype: torch.dtype) -> Launch:
        """The same sizes for activations of `dtype`: float32 takes half the keys, so that a tile has as many bytes."""
        return self if dtype.itemsize <= 2 else Launch(self.rows, max(16, self.keys // 2), self.warps, 1)

    def for_width(self, dim: int) -> Launch:
        """The same sizes for heads of `dim` entries: beyond 128 half the rows, so that results stay in registers."""
        return self if dim <= 128 else replace(self, rows=max(16, self.rows // 2))


@dataclass(frozen=True)
class Tiles:
    """Sizes of all kernels but the matrix products; a backend sets those that suit its hardware.

    Args:
        decode: attention of few query tokens over K and V.
        prefill: attention of many query tokens.
        mla: attention of few query tokens over latents.
        sparse: attention over chosen latents; rows are heads of one token.
        index: scores of an indexer; rows are the most tokens whose queries meet a tile of keys.
        chunk_tokens: fewest tokens in a split of a sequence's cache.
        splits: most splits of a sequence. How a sequence is split depends on its own length alone, so that its result
            does not depend on the rest of the batch.
        ahead: launch kernels before the one in front of them has ended (`dependent_launch.py`).
        programs: programs that fill the device; where there are fewer tokens, what they read is split.
        select_tokens: scores of a row that one program counts when the largest are chosen.
    """

    decode: Launch = Launch(16, 64, 4, 2)
    prefill: Launch = Launch(64, 64, 4, 2)
    mla: Launch = Launch(16, 32, 4, 2)
    sparse: Launch = Launch(16, 32, 4, 2)
    index: Launch = Launch(16, 64, 4, 2)
    chunk_tokens: int = 512
    splits: int = 32
    ahead: bool = False
    programs: int = 128
    select_tokens: int = 8192
    counters: Counters = field(default_factory=Counters, init=False, repr=False, compare=False)

    def prepare(self, op: Any, ctx: Any) -> Tiles:
        """The function that kernels with `Tiles` name as `Kernel.prepare`: returns a copy with counters of its own for
        each op, so that ops share none. Its arguments are not used.
        """
        return replace(self)


MIN_COLUMNS_PER_SPLIT = 512
"""Fewest columns of K in a part of a split product."""


@dataclass(frozen=True)
class Product:
    """How a matrix product is divided into programs: rows and columns of the result per program, its warps and pipeline
    depth.
    """

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Products:
    """Sizes of the matrix products by their number of rows; a backend sets those that suit its hardware.

    Args:
        few: for at most 16 rows.
        some: for at most 64 rows.
        many: for more.
        experts: for more than 16 rows per expert, in programs that hold two results.
        programs: programs that fill the device; products with fewer tiles are split along K.
        fp8: the device multiplies FP8 numbers.
        ahead: as in `Tiles`.
    """

    few: Product = Product(16, 32, 4, 3)
    some: Product = Product(64, 64, 4, 2)
    many: Product = Product(64, 128, 4, 2)
    experts: Product = Product(64, 64, 8, 2)
    programs: int = 128
    fp8: bool = False
    ahead: bool = False
    counters: Counters = field(default_factory=Counters, init=False, repr=False, compare=False)

    def choose(self, rows: int) -> Product:
        """The division of a product whose result has `rows` rows."""
        return self.few if rows <= 16 else self.some if rows <= 64 else self.many

    def choose_for_experts(self, rows: int) -> Product:
        """The division of a grouped product with `rows` rows per expert, or of a gated product with `rows` rows."""
        return self.few if rows <= 16 else self.experts

    def splits(self, product: Product, rows: int, columns: int, depth: int) -> int:
        """Into how many parts K (`depth` columns) is split, so that a product of few tiles fills the device; 1 where
        the tiles of `rows` times `columns` results alone do. A part has at least `MIN_COLUMNS_PER_SPLIT` columns.
        """
        tiles = -(-rows // product.rows) * -(-columns // product.columns)
        return max(1, min(self.programs // tiles, depth // MIN_COLUMNS_PER_SPLIT))

    def prepare(self, op: Any, ctx: Any) -> Products:
        """The function that kernels with `Products` name as `Kernel.prepare`: returns a copy with counters of its own
        for each op, so that ops share none. Its arguments are not used.
        """
        return replace(self)
