"""How long a sequence may be in a cache of so many blocks."""

from __future__ import annotations

from dataclasses import dataclass

from inferplane.errors import CapacityError, warn


@dataclass(frozen=True)
class Room:
    """A cache: how many blocks of what size, what they cost, and what the cache may take.

    Args:
        blocks: how many. block_tokens: tokens a block. block_bytes: bytes a block, all layers together.
        budget_bytes: what the cache may take.
        window: the most last tokens that any layer attends to; None: all.
    """

    blocks: int
    block_tokens: int
    block_bytes: int
    budget_bytes: int
    window: int | None

    def longest(self, most_tokens: int, *, asked: bool, told: bool = False) -> int:
        """The most tokens of a sequence, of `most_tokens` that the model allows or somebody asked for.

        Args:
            most_tokens: see above. asked: somebody did; less will not do.
            told: somebody said what the cache may take; he hears of it when that makes sequences shorter.

        Raises:
            CapacityError: there is no room for one block, or not for what was asked for.
        """
        if self.blocks < 1:
            raise CapacityError(
                f"One KV block takes {self.block_bytes} bytes; the cache may take {self.budget_bytes}.",
                remedy=f"raise kv_cache_bytes: {self.block_tokens} tokens take {self.block_bytes}",
            )
        held = most_tokens  # at once: with a window, blocks before it are given back
        if self.window is not None:
            held = min(held, self.window + 2 * self.block_tokens)
        if self.blocks * self.block_tokens >= held:
            return most_tokens
        if asked:
            raise CapacityError(
                f"max_model_len = {most_tokens} needs {-(-held // self.block_tokens)} KV blocks of {self.block_bytes} "
                "bytes.",
                there_is=f"{self.budget_bytes} bytes for {self.blocks}",
                remedy="lower max_model_len, or raise kv_cache_bytes",
            )
        if told:
            warn(
                f"kv_cache_bytes = {self.budget_bytes} holds {self.blocks} KV blocks of {self.block_bytes} bytes: "
                f"sequences have at most {self.blocks * self.block_tokens} of the model's {most_tokens} tokens. To do: "
                "raise kv_cache_bytes."
            )
        return self.blocks * self.block_tokens
