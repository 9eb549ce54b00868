"""Tile sizes and launch options of the portable kernels. A backend passes those that suit its hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
        splits: most splits of a sequence. How a sequence is split depends on its own length alone, so that its result
            does not depend on the rest of the batch.
    """

    decode: Launch = Launch(16, 64, 4, 2)
    prefill: Launch = Launch(64, 64, 4, 2)
    mla: Launch = Launch(16, 32, 4, 2)
    chunk_tokens: int = 512
    splits: int = 32

    def prepare(self, op: Any, ctx: Any) -> Tiles:
        """`Kernel.prepare` of every kernel that takes tiles."""
        return self
