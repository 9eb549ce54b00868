"""Which sizes of decode steps are recorded: few enough for memory, close enough that padding costs little time.

A step of n sequences runs in the smallest recorded size that holds it, and pays for the larger one. What that costs
is told by the ops' own costs: bytes to move, and operations at so many a byte (`BALANCE`). From 1 upwards, the next
size is the largest that costs at most `padding` more than a step with one sequence more than the size before. A record
keeps its inputs and results; where all of them together need more than the memory set aside (`MEMORY_SHARE`), `padding`
is doubled until they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inferplane.binding import Plan
from inferplane.engine.runner.options import RunnerOptions
from inferplane.ops import CausalLM, Workload

PADDING = 1 / 8
"""Share of a step's time that padding may add, where memory allows."""
BALANCE = 200.0
"""Operations that count as much as moving a byte: where accelerators are balanced between the two in 16-bit formats, by
their data sheets some 150 to 300."""
MEMORY_SHARE = 0.05
"""Share of the memory that the cache leaves free that records may take."""
LOOSEST = 64.0
"""Padding beyond which one size serves every step."""


class Size(NamedTuple):
    """Of a bucket: sequences, and query tokens that each of them may bring."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class Buckets:
    """The sizes of steps to record.

    Args:
        sequences: numbers of sequences, rising; the last is the most that a step has.
        tokens: query tokens of each sequence, rising.
        padding: share of a step's time that padding adds at most.
        nbytes: inputs and results of all of them.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...] = (1,)
    padding: float = PADDING
    nbytes: int = 0

    def holding(self, sequences: int, tokens: int) -> Size | None:
        """The smallest that holds so many sequences with up to so many tokens each; None: none does."""
        count = next((n for n in self.sequences if n >= sequences), None)
        width = next((n for n in self.tokens if n >= tokens), None)
        return None if count is None or width is None else Size(count, width)

    def data(self) -> dict[str, Any]:
        """For `explain`."""
        return {
            "sequences": list(self.sequences),
            "tokens": list(self.tokens),
            "padding": round(self.padding, 4),
            "nbytes": self.nbytes,
        }


def sizes_for(plan: Plan, options: RunnerOptions, max_model_len: int, free_bytes: int | None = None) -> Buckets:
    """The sizes for a plan.

    Args:
        plan: its model's ops tell what a step costs.
        options: the most sequences of a step, and drafts of a sequence.
        max_model_len: tokens of the longest sequence.
        free_bytes: memory beside weights and cache; None: not known.
    """
    model, dtype = plan.model, plan.settings.dtype
    assert isinstance(model, CausalLM)
    width = math.ceil(max_model_len / next(iter(plan.layouts.values())).block_tokens)
    budget_bytes = None if free_bytes is None else int(free_bytes * MEMORY_SHARE)
    tokens = sorted({1, 1 + options.drafts})
    return choose(step_cost(model, dtype), record_bytes(model, dtype, width), budget_bytes, options.max_batch, tokens)


def step_cost(model: CausalLM, dtype: torch.dtype) -> Callable[[int], float]:
    """What a decode step with so many rows costs, in bytes moved; caches left out, of which padding reads nothing."""

    def cost(rows: int) -> float:
        found = model.cost(Workload(rows, dtype=dtype))
        return found.nbytes + found.flops / BALANCE

    return cost


def record_bytes(model: CausalLM, dtype: torch.dtype, width: int) -> Callable[[Size], int]:
    """Bytes that a record of a size keeps: ids, positions, slots, block tables of `width`, logits and hidden states."""
    row = 3 * 8 + 4 * model.vocab + dtype.itemsize * model.embed.weight.shape[1]
    return lambda size: size.sequences * (size.tokens * row + 4 * (width + 2))


def choose(
    cost: Callable[[int], float],
    nbytes: Callable[[Size], int],
    budget_bytes: int | None,
    max_batch: int,
    tokens: Sequence[int] = (1,),
) -> Buckets:
    """The sizes for steps of up to `max_batch` sequences, as the module tells.

    Args:
        cost: of a step with so many rows, in any unit.
        nbytes: that a record of a size keeps.
        budget_bytes: for all records; None: not known, so it binds nothing.
        max_batch: most sequences.
        tokens: query tokens a sequence that are recorded, rising.
    """
    padding = PADDING
    while True:
        sizes = _within(cost, padding, max_batch, tokens[-1])
        total = sum(nbytes(Size(n, t)) for n in sizes for t in tokens)
        if budget_bytes is None or total <= budget_bytes or len(sizes) == 1:
            return Buckets(tuple(sizes), tuple(tokens), padding, total)
        padding = padding * 2 if padding < LOOSEST else float("inf")


def _within(cost: Callable[[int], float], padding: float, max_batch: int, tokens: int) -> list[int]:
    """Sizes of which each costs at most `padding` more than the least that it serves."""
    sizes: list[int] = []
    while not sizes or sizes[-1] < max_batch:
        least = sizes[-1] + 1 if sizes else 1
        most = (1 + padding) * cost(least * tokens)
        low, high = least, max_batch
        while low < high:  # costs rise with the number of rows
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(middle * tokens) <= most else (low, middle - 1)
        sizes.append(low)
    return sizes
