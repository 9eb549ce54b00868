"""How much memory a model takes, and how long sequences may be in the rest, before anything is loaded."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inferplane.binding import Plan
from inferplane.engine.runner.kv_cache import KV_SHARE, CacheMemory
from inferplane.engine.runner.planned_model import PlannedModel
from inferplane.engine.runner.sizes.activations import count_activation_bytes, count_logit_bytes
from inferplane.engine.runner.sizes.sizing import Sizing, Traffic
from inferplane.errors import CapacityError, InferplaneError
from inferplane.kvcache import PoolShape, blocks_held, bytes_of_tables, divide_budget, widest_window
from inferplane.types import PLAIN
from inferplane.units import format_bytes

SCHEMA = 1
SMALLER = ("weight_only_int8", "a8w8", "a8w8_fp8", "weight_only_int4")
"""Quantizations that are tried where a model is too large for a device; one that is no smaller than one before it, as
where the device's kernels do not read it, is not named."""
LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class FormatShare:
    """What the weights of one format take.

    Args:
        format: a weight format, or a dtype.
        parameters: number of entries.
        nbytes: entries and scales, in all packings.
    """

    format: str
    parameters: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits of a parameter, with its part of the scales."""
        return 8 * self.nbytes / max(1, self.parameters)


@dataclass(frozen=True)
class Estimate:
    """Bytes that a model takes on a device.

    Args:
        weights: all weights in all their packings; the larger of several copies included.
        copies: of these, second and further packings of a weight.
        workspace: memory of the largest step beside weights and cache, an estimate (`activations`).
        pools: of the KV cache's blocks, with the bytes of a block in all storages; what a draft model keeps included.
        block_tokens: tokens per block.
        memory: the device's memory; None when it is not known.
        max_num_seqs: maximum number of sequences in a step.
        model_positions: maximum number of tokens of a sequence in the model.
        window: the widest attention window of the layers, in tokens; None: a layer attends to all tokens.
        step_tokens: maximum number of tokens in a step.
        table_layers: number of layers of each block table, by pool; a layer may have several tables.
        cached_layers: number of layers that have any.
        unreleased_window: of a block's bytes, those of layers with a window that keep all tokens, because they share
            the table of layers that attend to all.
        state_sequence: what recurrent layers keep of a sequence, whatever its length; 0: there are no such layers.
        devices: number of devices that share the model; all bytes are those of one of them.
        devices_needed: number of such devices on which the model fits if it does not fit here; None: unknown, or none.
        draft_weights: of the weights, those of what drafts alone.
        draft_block: of a block, what drafts alone.
        formats: what the weights of each format take, the largest first; without constants, as rotary tables are.
    """

    weights: int
    copies: int
    workspace: int
    pools: tuple[PoolShape, ...]
    block_tokens: int
    memory: int | None
    max_num_seqs: int
    model_positions: int
    window: int | None = None
    step_tokens: int = 0
    table_layers: tuple[int, ...] = ()
    cached_layers: int = 0
    unreleased_window: int = 0
    state_sequence: int = 0
    devices: int = 1
    devices_needed: int | None = None
    draft_weights: int = 0
    draft_block: int = 0
    formats: tuple[FormatShare, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The widest attention window of the layers of each block table of a sequence, by pool."""
        return tuple(window for pool in self.pools for window in pool.windows)

    @property
    def kv_token(self) -> float:
        """Bytes of the cache per token, while no window has passed it."""
        return self.min_kv_bytes / self.block_tokens

    @property
    def min_kv_bytes(self) -> int:
        """Bytes of the smallest cache in which a sequence can run: a block for each of its block tables."""
        return bytes_of_tables(self.pools)

    @property
    def block(self) -> int:
        """Bytes of one block of each pool."""
        return sum(pool.block_bytes for pool in self.pools)

    @property
    def left(self) -> int | None:
        """Bytes left for the cache beside weights, workspace and states; negative if these do not fit."""
        return None if self.memory is None else self.memory - self.weights - self.workspace - self.states

    @property
    def states(self) -> int:
        """Bytes of the states of as many sequences as a step may have."""
        return self.max_num_seqs * self.state_sequence

    @property
    def max_kv_bytes(self) -> int:
        """Bytes of the blocks that the largest batch of the longest sequences can use."""
        most = ((p.max_blocks(self.model_positions, self.max_num_seqs, self.block_tokens), p) for p in self.pools)
        return sum(count * pool.block_bytes for count, pool in most)

    def blocks(self, kv_bytes: int) -> tuple[int, ...]:
        """The number of blocks of each pool in a cache of `kv_bytes`; blocks without entries take no memory."""
        if len(self.pools) == 1 and self.block:
            return (max(0, kv_bytes) // self.block,)
        return divide_budget(self.pools, kv_bytes, self.block_tokens, self.model_positions, self.max_num_seqs)

    def size(self, kv_bytes: int, traffic: Traffic | None = None) -> Sizing:
        """The source system's settings for a cache of `kv_bytes`."""
        if len(self.pools) == 1:
            tokens = self.blocks(kv_bytes)[0] // len(self.pools[0].windows) * self.block_tokens
        else:  # as `kv_cache_tokens` counts: a block of every table for each
            tokens = max(0, kv_bytes) // self.min_kv_bytes * self.block_tokens
        return Sizing(tokens, self.model_positions, traffic)

    def max_sequence_tokens(self, kv_bytes: int) -> int:
        """Tokens of the longest sequence in a cache of `kv_bytes`, at most what the model allows; 0 if it holds no
        block.
        """
        blocks = self.blocks(kv_bytes)
        memory = CacheMemory(blocks, self.block_tokens, self.pools, kv_bytes)
        enough = kv_bytes >= self.min_kv_bytes
        return memory.max_sequence_tokens(self.model_positions, explicit_length=False) if enough else 0

    def sequences(self, tokens: int, kv_bytes: int) -> int:
        """How many sequences of `tokens` tokens a cache of `kv_bytes` holds at a time."""
        if kv_bytes < self.min_kv_bytes:
            return 0
        found = min(self._sequences_in(pool, n, tokens) for pool, n in zip(self.pools, self.blocks(kv_bytes)))
        return min(found, self.max_num_seqs) if self.state_sequence else found

    def _sequences_in(self, pool: PoolShape, blocks: int, tokens: int) -> int:
        held, most = (blocks_held(pool.windows, tokens, n, self.block_tokens) for n in (1, max(1, self.step_tokens)))
        if blocks < held:
            return 0
        # A step's tokens are one sequence's at most, which then holds more of its windows; in a small cache less.
        return 1 + (blocks - min(blocks, most)) // held

    @property
    def default_kv_bytes(self) -> int | None:
        """The default size of the cache: a share of the memory beside the weights, and no more than the largest batch
        of the longest sequences can use.
        """
        if self.memory is None:
            return None
        return max(0, min(int((self.memory - self.weights - self.states) * KV_SHARE), self.max_kv_bytes))

    @property
    def fits(self) -> bool | None:
        """Whether the smallest cache fits beside weights, workspace and states; None if the memory is not known."""
        return None if self.left is None else self.left >= self.min_kv_bytes

    def lengths(self) -> list[int]:
        """Lengths to report: powers of two that the model allows, and its own limit."""
        return [*(n for n in LENGTHS if n < self.model_positions), self.model_positions]

    def data(self, traffic: Traffic | None = None) -> dict[str, Any]:
        """The estimate as JSON-ready data, schema 1 (docs/schemas/estimate.json), with the numbers of sequences by
        length in the default and in the largest cache, and the settings for requests of `traffic`.
        """
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "weight_bytes": self.weights,
            "formats": [
                {"format": f.format, "parameters": f.parameters, "bytes": f.nbytes, "bits": f.bits}
                for f in self.formats
            ],
            "copy_bytes": self.copies,
            "workspace_bytes": self.workspace,
            "draft_weight_bytes": self.draft_weights,
            "kv_block_bytes": self.block,
            "draft_kv_block_bytes": self.draft_block,
            "kv_block_tokens": self.block_tokens,
            "kv_token_bytes": self.kv_token,
            "kv_window": self.window,
            "kv_whole_windows_bytes": self.unreleased_window,
            "kv_tables": [{"window": w, "layers": n} for w, n in zip(self.windows, self.table_layers)],
            "kv_pools": [{"tables": len(p.windows), "block_bytes": p.block_bytes} for p in self.pools],
            "state_sequence_bytes": self.state_sequence,
            "memory_bytes": self.memory,
            "devices": self.devices,
            "fits": self.fits,
            "devices_needed": self.devices_needed,
            "max_batch": self.max_num_seqs,
            "model_positions": self.model_positions,
            "caches": [],
        }
        for kind, kv_bytes in (("default", self.default_kv_bytes), ("most", self.left)):
            if kv_bytes is not None:
                fits = {str(n): self.sequences(n, kv_bytes) for n in self.lengths()}
                length = self.max_sequence_tokens(kv_bytes)
                found = {"kind": kind, "kv_cache_bytes": max(0, kv_bytes), "max_model_len": length}
                out["caches"].append({**found, "sequences": fits, **self.size(kv_bytes, traffic).data()})
        return out


def estimate(runner: PlannedModel, memory: int | None, max_num_batched_tokens: int) -> Estimate:
    """Estimate the memory of a bound model, from shapes alone: nothing is loaded or allocated.

    Args:
        runner: bound, not necessarily loaded.
        memory: bytes of the device; None when they are not known.
        max_num_batched_tokens: maximum number of tokens in a step, which sizes its intermediate results.
    """
    plan = runner.plan
    tables = runner.tables
    activations = count_activation_bytes(runner, max_num_batched_tokens)
    draft, drafters = runner.draft, runner.describe_drafters()
    return Estimate(
        weights=plan.weight_bytes + (0 if draft is None else draft.plan.weight_bytes),
        copies=sum(plan.count_copied_bytes().values()),
        workspace=activations + count_logit_bytes(runner, max_num_batched_tokens),
        pools=tuple(runner.describe_pools()),
        block_tokens=runner.block_tokens,
        memory=memory,
        max_num_seqs=runner.options.max_num_seqs,
        model_positions=runner.max_model_len,
        window=widest_window(tables.windows),
        step_tokens=max_num_batched_tokens,
        table_layers=tables.count_layers(),
        cached_layers=sum(request.kv is not None for request in runner.layer_requests()),
        unreleased_window=runner.count_unreleased_bytes(),
        state_sequence=runner.count_state_bytes(),
        devices=runner.options.ranks,
        draft_weights=sum(drafter["weight_bytes"] for drafter in drafters),
        draft_block=sum(drafter["kv_block_bytes"] for drafter in drafters),
        formats=count_formats(plan),
    )


def count_formats(plan: Plan) -> tuple[FormatShare, ...]:
    """What the weights of each format take in memory, the largest first; dequantized ones count as what they become."""
    parameters: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for i, packings in plan.packings.items():
        weight = plan.weights[i]
        if not weight.parts:
            continue
        is_plain = weight.format == PLAIN or all(packing.dequantized for packing in packings.values())
        dtype = str(weight.dtype or plan.settings.dtype).removeprefix("torch.")
        format = dtype if is_plain else weight.format
        parameters[format] += math.prod(weight.shape)
        nbytes[format] += sum(plan.nbytes(weight, name) for name in packings)
    return tuple(FormatShare(name, parameters[name], size) for name, size in nbytes.most_common())


def check_fit(model: PlannedModel, free_bytes: int, plan_with: Callable[..., PlannedModel]) -> None:
    """Refuse a model whose weights alone are larger than a device's free memory, before any is read.

    Args:
        model: bound to the device, not loaded.
        free_bytes: of the device.
        plan_with: binds the model with other options.

    Raises:
        CapacityError: it does not fit; the message has what it takes in 16 bits and with each of `SMALLER`.
    """
    needed, device = model.plan.weight_bytes, model.backend.name
    if needed <= free_bytes:
        return
    sizes: list[tuple[dict[str, str], int]] = []
    is_chosen = model.options.quantization is not None or model.files.exported is not None
    if not is_chosen and model.files.config.get("quantization_config") is None:
        narrow = {"dtype": "bfloat16"} if model.dtype.itemsize > 2 else {}
        for changes in (narrow, *({**narrow, "quantization": scheme} for scheme in SMALLER)):
            with contextlib.suppress(InferplaneError):  # the device has no kernels for it
                size = plan_with(**changes).plan.weight_bytes if changes else needed
                sizes += [(changes, size)] if size < min([needed, *(size for _, size in sizes)]) else []
    command = f"inferplane estimate {model.files.name} --device {device}"
    fitting = next((changes for changes, size in sizes if size <= free_bytes), None)
    if fitting is not None:
        flags = " ".join(f"--{name} {value}" for name, value in fitting.items())
        options = ", ".join(f"{name}='{value}'" for name, value in fitting.items())
        remedy = f"pass {options}, which fits (`{command} {flags}` has the details)"
    else:
        remedy = f"choose a smaller model, or several devices: `{command}` says how many"
    raise CapacityError(
        f"{model.files.name} is too large: its weights take {format_bytes(needed)} on {device}, which has "
        f"{format_bytes(free_bytes)} free.",
        there_is="; ".join(f"{' with '.join(c.values())} takes {format_bytes(size)}" for c, size in sizes),
        remedy=remedy,
    )
