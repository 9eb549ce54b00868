"""Tile sizes and launch options of the portable kernels. A backend passes those that suit its hardware."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch


class Counters:
    """Zeros, by device, in which the programs of a launch are counted (`arrivals.py`) and which they leave as zeros.

    One op's launches share them, so these must follow each other, as those of one model do on its stream.
    """

    LEAST = 4096

    def __init__(self) -> None:
        self._held: dict[torch.device, list[torch.Tensor]] = {}

    def of(self, device: torch.device, count: int) -> torch.Tensor:
        """At least `count` of them, int32. Those handed out before stay alive: recorded steps go on using them."""
        held = self._held.setdefault(device, [])
        if not held or held[-1].numel() < count:
            held.append(torch.zeros(max(count, self.LEAST), dtype=torch.int32, device=device))
        return held[-1]


@dataclass(frozen=True)
class Launch:
    """How one attention kernel is cut into programs.

    Args:
        rows: query rows of a tile; at least 16, a power of two.
        keys: tokens of the cache a loop turn; a power of two, at least 16.
        warps: warps a program.
        stages: software pipeline depth.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2

    def for_dtype(self, dtype: torch.dtype) -> Launch:
        """The same for activations of `dtype`: wide ones take half the keys, so that a tile keeps its bytes."""
        return self if dtype.itemsize <= 2 else Launch(self.rows, max(16, self.keys // 2), self.warps, 1)


@dataclass(frozen=True)
class Tiles:
    """What a backend may set.

    Args:
        decode: attention of few query tokens over K and V.
        prefill: attention of many query tokens.
        mla: attention of few query tokens over latents.
        chunk_tokens: least tokens of a split of a sequence's cache.
        ahead: launch kernels before the one in front of them has ended (`ahead.py`).
        splits: most splits of a sequence. How a sequence is split depends on its own length alone, so that its result
            does not depend on the rest of the batch.
    """

    decode: Launch = Launch(16, 64, 4, 2)
    prefill: Launch = Launch(64, 64, 4, 2)
    mla: Launch = Launch(16, 32, 4, 2)
    chunk_tokens: int = 512
    splits: int = 32
    ahead: bool = False
    counters: Counters = field(default_factory=Counters, init=False, repr=False, compare=False)

    def prepare(self, op: Any, ctx: Any) -> Tiles:
        """`Kernel.prepare` of every kernel that takes tiles: a copy, with counters of its own."""
        return replace(self)


LEAST_COLUMNS = 512
"""Columns that a part of a split product has at least."""


@dataclass(frozen=True)
class Product:
    """One way to cut a product into programs: rows and columns of the result a program, its warps, its pipeline."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Products:
    """What a backend may set.

    Args:
        few: at most 16 rows.
        some: at most 64 rows.
        many: more.
        experts: more than 16 rows an expert, in programs that hold two results.
        programs: programs that fill the device; smaller products are split along K.
        fp8: the device multiplies FP8 numbers.
        ahead: as of `Tiles`.
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
        """For so many rows."""
        return self.few if rows <= 16 else self.some if rows <= 64 else self.many

    def of_experts(self, rows: int) -> Product:
        """For so many rows an expert."""
        return self.few if rows <= 16 else self.experts

    def splits(self, product: Product, rows: int, columns: int, depth: int) -> int:
        """Parts of K: 1 where the tiles alone fill the device."""
        tiles = -(-rows // product.rows) * -(-columns // product.columns)
        return max(1, min(self.programs // tiles, depth // LEAST_COLUMNS))

    def prepare(self, op: Any, ctx: Any) -> Products:
        """`Kernel.prepare` of every kernel that multiplies: a copy, with counters of its own."""
        return replace(self)
