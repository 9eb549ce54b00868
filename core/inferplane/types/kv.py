"""The KV cache as kernels and references see it. The engine owns block numbers, the backend owns what lies in them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from inferplane.types.scratch import Scratch

KVKind = Literal["gqa", "mla"]


@dataclass(frozen=True)
class KVRequest:
    """What one layer must remember about each token.

    Args:
        kind: "gqa" (K and V per KV head) or "mla" (one latent vector and one rotated key part for all heads).
        heads: KV heads (1 for "mla").
        dim: entries per head in K ("mla": `kv_lora_rank + qk_rope_head_dim`).
        v_dim: entries per head in V (0 for "mla": V is part of the latent).
        window: only this many last tokens are attended to; None: all.
    """

    kind: KVKind
    heads: int
    dim: int
    v_dim: int = 0
    window: int | None = None

    @property
    def entries(self) -> int:
        """Numbers kept a token: `heads * (dim + v_dim)`."""
        return self.heads * (self.dim + self.v_dim)

    def blocks_before_window(self, query_tokens: int, tokens: int, block_tokens: int) -> int:
        """How many leading blocks of a sequence none of its queries sees: they may have been given back.

        Args:
            query_tokens: the last `query_tokens` of the sequence ask.
            tokens: length of the sequence.
            block_tokens: tokens a block.
        """
        if self.window is None:
            return 0
        return max(0, tokens - query_tokens + 1 - self.window) // block_tokens


class LayerKV(Scratch, ABC):
    """One layer's cache, supplied by whoever owns its layout. Reference bodies use only `write` and `read`.

    A slot is `block * block_tokens + offset`. Attributes: `layout` (the name that kernels state in
    `When.kv_layouts`), `block_tokens`, `request`. A kernel keeps what it computes once a cache in `once(key, make)`.
    """

    layout: str
    block_tokens: int
    request: KVRequest

    @abstractmethod
    def write(self, slots: torch.Tensor, *values: torch.Tensor) -> None:
        """Store one token a row.

        Args:
            slots: `[T]`; rows with slot -1 are ignored.
            values: "gqa": K `[T, heads, dim]` and V `[T, heads, v_dim]`; "mla": one `[T, dim]`.
        """

    @abstractmethod
    def read(self, table: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
        """The first `tokens` tokens of a sequence in canonical form, as attention sees them (dequantized).

        Args:
            table: the sequence's block table `[blocks]`.
            tokens: how many to return.

        Returns:
            "gqa": K `[tokens, heads, dim]`, V `[tokens, heads, v_dim]`; "mla": one `[tokens, dim]`. The results may be
            views: use them before the next `write`.
        """

    @abstractmethod
    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks inside this layer: `[n]` block numbers to `[n]` block numbers."""

    @abstractmethod
    def export(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Blocks as stored (values and scales), each `[n, ...]` on the host, for `load` of the same layout."""

    @abstractmethod
    def load(self, blocks: torch.Tensor, stored: tuple[torch.Tensor, ...]) -> None:
        """Put what `export` returned into `[n]` blocks (any numbers).

        Raises:
            UsageError: the shapes are not those of this layout.
        """


@dataclass(frozen=True)
class KVLayout:
    """A way to lay out a layer's cache. Pure description: nothing is allocated until `build`.

    Args:
        name: unique, stated by kernels in `When.kv_layouts` ("paged_64", "toy_hnbd_32").
        block_tokens: tokens a block.
        build: `(request, blocks, dtype, device)` -> `LayerKV`; allocates.
        bytes_per_block: `(request, dtype)` -> bytes of one block of one layer, padding and scales included.
        kv_dtype: the registered KV dtype it stores ("auto" is the plan's dtype; "fp8", "int8").
        tolerance: largest error of a stored entry relative to the largest one, on top of the plan's dtype.
    """

    name: str
    block_tokens: int
    build: Callable[[KVRequest, int, torch.dtype, torch.device], LayerKV] = field(compare=False)
    bytes_per_block: Callable[[KVRequest, torch.dtype], int] = field(compare=False)
    kv_dtype: str = "auto"
    tolerance: float = 0.0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return math.ceil(tokens / self.block_tokens)


Layouts = Mapping[KVRequest, KVLayout]
"""The layout chosen for each distinct request of a model; all have the same `block_tokens`."""


@dataclass(frozen=True)
class KVCache:
    """All layers of a model: `layers[i]` serves decoder layer i.

    Args:
        layers: one `LayerKV` a layer.
        blocks: blocks each layer holds.
        block_tokens: tokens a block, the same for every layer.
    """

    layers: tuple[LayerKV, ...]
    blocks: int
    block_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)
