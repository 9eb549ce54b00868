"""Which sizes of decode steps are captured: few enough for memory, close enough that padding costs little time.

A step of n sequences runs in the smallest captured size that holds it, at the cost of the larger size. The ops' own
costs say how much that is: bytes to move, and operations that count as bytes (`BALANCE`). From 1 upwards, the next size
is the largest that costs at most `padding` more than a step with one sequence more than the size before. A capture
keeps its inputs and results; while all captures together need more than their memory (`MEMORY_SHARE`), `padding` is
doubled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inferplane.binding import Plan
from inferplane.engine.runner.kv_cache import block_tokens_of
from inferplane.engine.runner.options import RunnerOptions
from inferplane.ops import CausalLM, StreamEmbedding, Workload

PADDING = 1 / 8
"""Maximum share of a step's time that padding adds, where memory allows."""
BALANCE = 200.0
"""Operations that take as long as moving a byte: by their data sheets some 150 to 300 on accelerators in 16-bit
formats."""
MEMORY_SHARE = 0.05
"""Maximum share of the memory beside the cache that captures take."""
MAX_PADDING = 64.0
"""Padding beyond which one size is used for every step."""


class Size(NamedTuple):
    """Of a bucket: sequences, and the maximum number of query tokens of each."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class Buckets:
    """The sizes of steps to capture.

    Args:
        sequences: numbers of sequences, rising; the last is the maximum of a step.
        tokens: query tokens of each sequence, rising.
        padding: maximum share of a step's time that padding adds.
        nbytes: inputs and results of all captures.
    """

    sequences: tuple[int, ...]
    tokens: tuple[int, ...] = (1,)
    padding: float = PADDING
    nbytes: int = 0

    def smallest_for(self, sequences: int, tokens: int) -> Size | None:
        """The smallest captured size that holds `sequences` sequences with up to `tokens` query tokens each; None:
        there is none, and the step runs eagerly.
        """
        count = next((n for n in self.sequences if n >= sequences), None)
        width = next((n for n in self.tokens if n >= tokens), None)
        return None if count is None or width is None else Size(count, width)

    def data(self) -> dict[str, Any]:
        """The sizes as JSON-ready data, for `explain`."""
        return {
            "sequences": list(self.sequences),
            "tokens": list(self.tokens),
            "padding": round(self.padding, 4),
            "nbytes": self.nbytes,
        }


def bucket_sizes(
    plan: Plan, options: RunnerOptions, max_model_len: int, free_bytes: int | None = None, num_tables: int = 1
) -> Buckets:
    """Choose the sizes of decode steps to capture for a plan, by the rule in this module; nothing is captured here.

    Costs leave out reading the cache, and are those of the widest step: with drafts, `1 + num_drafts` rows per
    sequence. With drafts each number of sequences is captured twice, for 1 row and for `1 + num_drafts` rows per
    sequence. One size, the maximum, remains even if it does not fit the memory.

    Args:
        plan: its model's ops say what a step costs.
        options: with the maximum numbers of sequences per step, and of drafts per sequence.
        max_model_len: tokens of the longest sequence, which a capture's block tables must hold; it makes captures
            larger, and has no influence on costs.
        free_bytes: memory beside weights and cache, of which captures may take `MEMORY_SHARE`; None: not known, so
            there is no limit.
        num_tables: block tables of a sequence.
    """
    model, dtype = plan.model, plan.settings.dtype
    assert isinstance(model, CausalLM)
    width = math.ceil(max_model_len / block_tokens_of(plan)) * num_tables
    budget_bytes = None if free_bytes is None else int(free_bytes * MEMORY_SHARE)
    tokens = sorted({1, 1 + options.num_drafts})
    return choose_sizes(
        step_cost(model, dtype), capture_bytes(model, dtype, width), budget_bytes, options.max_num_seqs, tokens
    )


def step_cost(model: CausalLM, dtype: torch.dtype) -> Callable[[int], float]:
    """A function of the number n of rows that returns the cost of a decode step in bytes: those moved, without the
    cache, plus its operations divided by `BALANCE`.
    """

    def cost(rows: int) -> float:
        """Bytes moved, and operations counted as bytes, of a step with `rows` rows."""
        found = model.cost(Workload(rows, dtype=dtype))
        return found.nbytes + found.flops / BALANCE

    return cost


def capture_bytes(model: CausalLM, dtype: torch.dtype, width: int) -> Callable[[Size], int]:
    """A function of a size that returns the bytes a capture of that size keeps: ids, positions, slots, lengths, logits,
    hidden states, and block tables of `width` blocks per sequence in all. `dtype` is that of the hidden states.
    """
    streams = model.embed.streams if model.returns_streams and isinstance(model.embed, StreamEmbedding) else 1
    row = 3 * 8 + 4 * model.vocab + dtype.itemsize * model.embed.weight.shape[1] * streams
    return lambda size: size.sequences * (size.tokens * row + 4 * (width + 2))


def choose_sizes(
    cost: Callable[[int], float],
    nbytes: Callable[[Size], int],
    budget_bytes: int | None,
    max_num_seqs: int,
    tokens: Sequence[int] = (1,),
) -> Buckets:
    """Choose the sizes for steps of up to `max_num_seqs` sequences, as described in the module. If one size is left, it
    is returned even if it exceeds the budget.

    Args:
        cost: of a step with n rows, in any unit; must not fall as n rises.
        nbytes: of a capture of a size.
        budget_bytes: for all captures together; None: unlimited.
        max_num_seqs: maximum number of sequences, and the last size.
        tokens: numbers of query tokens per sequence to capture, rising; costs count with the last.
    """
    padding = PADDING
    while True:
        sizes = _sizes_within(cost, padding, max_num_seqs, tokens[-1])
        total = sum(nbytes(Size(n, t)) for n in sizes for t in tokens)
        if budget_bytes is None or total <= budget_bytes or len(sizes) == 1:
            return Buckets(tuple(sizes), tuple(tokens), padding, total)
        padding = padding * 2 if padding < MAX_PADDING else float("inf")


def _sizes_within(cost: Callable[[int], float], padding: float, max_num_seqs: int, tokens: int) -> list[int]:
    """Numbers of sequences, rising to `max_num_seqs`, that each cost at most `padding` more than the smallest step that
    they are used for. Sequences have `tokens` rows.
    """
    sizes: list[int] = []
    while not sizes or sizes[-1] < max_num_seqs:
        least = sizes[-1] + 1 if sizes else 1
        max_cost = (1 + padding) * cost(least * tokens)
        low, high = least, max_num_seqs
        while low < high:  # costs rise with the number of rows
            middle = (low + high + 1) // 2
            low, high = (middle, high) if cost(middle * tokens) <= max_cost else (low, middle - 1)
        sizes.append(low)
    return sizes
