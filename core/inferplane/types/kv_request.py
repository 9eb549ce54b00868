"""What a layer keeps of each token, by kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from inferplane.errors import UsageError

EntryShapes = Callable[["KVRequest"], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class KVKind:
    """What a layer keeps per token, by name. A plugin adds a kind with `register_kv_kind`.

    Args:
        name: the value of `KVRequest.kind`.
        entry_shapes: request -> shape of one token's row in each tensor that `LayerKV.write` takes and `read` returns.
    """

    name: str
    entry_shapes: EntryShapes


KV_KINDS: dict[str, KVKind] = {
    # K and V of each KV head.
    "gqa": KVKind("gqa", lambda request: ((request.heads, request.dim), (request.heads, request.v_dim))),
    # One latent vector and one rotated key part for all heads, in one row.
    "mla": KVKind("mla", lambda request: ((request.dim,),)),
    # One entry for all heads, which is key and value.
    "shared_kv": KVKind("shared_kv", lambda request: ((request.dim,),)),
    # What a compressor makes entries from, of attention and of an indexer.
    "compressor_rows": KVKind("compressor_rows", lambda request: ((request.dim,),)),
    "index_rows": KVKind("index_rows", lambda request: ((request.dim,),)),
    # The key by which an indexer finds the tokens that sparse attention reads: one head, so one scale a token.
    "index_keys": KVKind("index_keys", lambda request: ((request.heads, request.dim),)),
}
"""Every kind by name."""


def register_kv_kind(kind: KVKind) -> None:
    """Add a kind of cache, so that layers may request it by name.

    Raises:
        UsageError: another kind has this name.
    """
    if KV_KINDS.setdefault(kind.name, kind) != kind:
        raise UsageError(f"A KV kind named {kind.name!r} is registered already.", remedy="choose another name")


@dataclass(frozen=True)
class KVRequest:
    """What one layer keeps in its cache for each token.

    Args:
        kind: a name of `KV_KINDS`: "gqa" (K and V per KV head), "mla" (one latent vector and one rotated key part for
            all heads), "shared_kv" (one entry for all heads, which is key and value), "index_keys" (one key of an
            indexer), "compressor_rows" and "index_rows" (what a compressor makes entries or index keys from), or a kind
            that a plugin registers.
        heads: KV heads (1 for all kinds but "gqa").
        dim: entries per head in K ("mla": `kv_lora_rank + qk_rope_head_dim`).
        v_dim: entries per head in V (0 for "mla": V is part of the latent).
        window: attention reads only this many last tokens; None: all.
        rope: "mla" and "shared_kv": the last entries of a row, which are rotated; 0: not known.
        rate: one entry stands for so many tokens: entry i for those from `i * rate`. It lies in the block of the last
            of them, and is stored when that one is computed. An entry of several tokens has no window.
    """

    kind: str
    heads: int
    dim: int
    v_dim: int = 0
    window: int | None = None
    rope: int = 0
    rate: int = 1

    @property
    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one token's row in each tensor that `LayerKV.write` takes and `read` returns.

        Raises:
            UsageError: no kind has this name.
        """
        kind = KV_KINDS.get(self.kind)
        if kind is None:
            raise UsageError(
                f"KV kind {self.kind!r} is unknown.",
                there_is=", ".join(sorted(KV_KINDS)),
                remedy="register it with register_kv_kind",
            )
        return kind.entry_shapes(self)

    @property
    def entries(self) -> int:
        """Numbers kept per token: the sum of the sizes of `entry_shapes`."""
        return sum(math.prod(shape) for shape in self.entry_shapes)

    def entries_per_block(self, block_tokens: int) -> int:
        """Number of entries that a block has memory for; one where an entry stands for more tokens than a block.

        Args:
            block_tokens: tokens of a sequence that a block is for.

        Raises:
            UsageError: the entries of a block do not begin with it.
        """
        if block_tokens > self.rate and block_tokens % self.rate:
            raise UsageError(
                f"One entry for {self.rate} tokens in blocks of {block_tokens} tokens.",
                remedy=f"use blocks of a multiple of {self.rate} tokens, or of fewer",
            )
        return max(1, block_tokens // self.rate)

    def blocks_before_window(self, query_tokens: int, tokens: int, block_tokens: int) -> int:
        """Number of leading blocks of a sequence that none of its queries sees; they may be released already.

        Args:
            query_tokens: the last `query_tokens` tokens of the sequence are queries.
            tokens: length of the sequence.
            block_tokens: tokens per block.
        """
        if self.window is None:
            return 0
        return max(0, tokens - query_tokens + 1 - self.window) // block_tokens
