"""How much memory a model will take, and what fits beside it, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferplane.engine.runner.kv_cache import Room
from inferplane.engine.runner.model_runner import KV_SHARE, Runner

SCHEMA = 1
LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class Estimate:
    """Bytes of a model on a device.

    Args:
        weights: all weights in all their packings; the larger of several copies included.
        copies: of these, second and further packings of a weight.
        workspace: what a step holds beside weights and cache. An estimate: the residual stream, the widest
            intermediate result twice over, and the logits three times over, for the largest step.
        block: one block of the KV cache, all layers together.
        block_tokens: tokens in a block.
        memory: what there is in all; None when it is not known.
        max_batch: sequences in a step.
        model_positions: tokens of a sequence that the model allows.
        window: the most last tokens that any layer attends to; None: all.
        step_tokens: tokens in a step.
        whole_windows: of a block's bytes, those of layers with a window that keep all tokens, because other layers of
            the model attend to all (docs/decisions/0013).
    """

    weights: int
    copies: int
    workspace: int
    block: int
    block_tokens: int
    memory: int | None
    max_batch: int
    model_positions: int
    window: int | None = None
    step_tokens: int = 0
    whole_windows: int = 0

    @property
    def kv_token(self) -> float:
        """Bytes of the cache for a token."""
        return self.block / self.block_tokens

    @property
    def left(self) -> int | None:
        """Bytes that weights and workspace leave for the cache; negative when not even they fit."""
        return None if self.memory is None else self.memory - self.weights - self.workspace

    def blocks(self, kv_bytes: int) -> int:
        """Blocks in a cache of so many bytes."""
        return max(0, kv_bytes) // self.block

    def longest(self, kv_bytes: int) -> int:
        """Tokens of the longest sequence in such a cache; 0 when there is no room for a block."""
        blocks = self.blocks(kv_bytes)
        room = Room(blocks, self.block_tokens, self.block, kv_bytes, self.window)
        return room.longest(self.model_positions, asked=False) if blocks else 0

    def sequences(self, tokens: int, kv_bytes: int) -> int:
        """Sequences of so many tokens that such a cache holds at a time."""
        blocks, need = self.blocks(kv_bytes), -(-tokens // self.block_tokens)
        if self.window is not None:  # the rest is given back meanwhile; in a small cache steps are smaller
            step = max(1, min(self.step_tokens, (blocks - 1) * self.block_tokens - self.window))
            need = min(need, -(-(self.window + step) // self.block_tokens) + 1)
        return blocks // need

    @property
    def default_kv_bytes(self) -> int | None:
        """The cache that `LLM` takes when it is not told: a share of what the weights leave, and no more than the
        largest batch of the longest sequences can use.
        """
        if self.memory is None:
            return None
        most = self.max_batch * -(-self.model_positions // self.block_tokens) * self.block
        return max(0, min(int((self.memory - self.weights) * KV_SHARE), most))

    @property
    def fits(self) -> bool | None:
        """Whether a block of the cache has room beside weights and workspace; None where the memory is not known."""
        return None if self.left is None else self.left >= self.block

    def lengths(self) -> list[int]:
        """Lengths to tell about: powers of two that the model allows, and its own limit."""
        return [*(n for n in LENGTHS if n < self.model_positions), self.model_positions]

    def data(self) -> dict[str, Any]:
        """JSON-ready, schema 1 (docs/schemas/estimate.json)."""
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "weight_bytes": self.weights,
            "copy_bytes": self.copies,
            "workspace_bytes": self.workspace,
            "kv_block_bytes": self.block,
            "kv_block_tokens": self.block_tokens,
            "kv_token_bytes": self.kv_token,
            "kv_window": self.window,
            "kv_whole_windows_bytes": self.whole_windows,
            "memory_bytes": self.memory,
            "fits": self.fits,
            "max_batch": self.max_batch,
            "model_positions": self.model_positions,
            "caches": [],
        }
        for kind, kv_bytes in (("default", self.default_kv_bytes), ("most", self.left)):
            if kv_bytes is not None:
                fits = {str(n): self.sequences(n, kv_bytes) for n in self.lengths()}
                found = {"kind": kind, "kv_cache_bytes": max(0, kv_bytes), "max_model_len": self.longest(kv_bytes)}
                out["caches"].append({**found, "sequences": fits})
        return out


def estimate(runner: Runner, memory: int | None, max_step_tokens: int) -> Estimate:
    """What a bound model will take.

    Args:
        runner: bound, not necessarily loaded.
        memory: bytes of the device; None when they are not known.
        max_step_tokens: tokens in a step.
    """
    plan, model = runner.plan, runner.model
    vocab, hidden = model.embed.weight.shape
    widths = [w.shape[-2] for w in plan.weights.values() if len(w.shape) > 1 and vocab not in w.shape]
    item = runner.dtype.itemsize
    windowed = 0 if runner.window is not None else runner.block_bytes(windowed=True)
    activations = max_step_tokens * (4 * hidden + 2 * max(widths, default=hidden)) * item
    logits = 3 * min(runner.options.max_batch, max_step_tokens) * vocab * 4
    return Estimate(
        weights=plan.weight_bytes,
        copies=sum(plan.copied_bytes().values()),
        workspace=activations + logits,
        block=runner.block_bytes(),
        block_tokens=next(iter(plan.layouts.values())).block_tokens,
        memory=memory,
        max_batch=runner.options.max_batch,
        model_positions=runner.max_model_len,
        window=runner.window,
        step_tokens=max_step_tokens,
        whole_windows=windowed,
    )
