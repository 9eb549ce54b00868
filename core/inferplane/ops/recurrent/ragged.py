"""How recurrences run over a ragged step: token by token, or sequence by sequence in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from inferplane.ops.draw import Draw, Sequences
from inferplane.types import HOST, Batch
from inferplane.types.batch import Query, make_batch

Rows = Sequence[torch.Tensor]
"""Tensors whose dim 0 is tokens."""
Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(state [B, ...], *inputs [B, ...]) -> (y [B, ...], state)`: one token of each sequence."""
Span = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(state [...], before, *inputs [n, ...]) -> (y [n, ...], state)`: n tokens of one sequence, `before` tokens after
its start."""

CHUNK_TOKENS = 64
"""Tokens per chunk. Chunks begin at multiples of this in the sequence, wherever a prompt is cut."""
SAMPLE_BLOCK_TOKENS = 16


def run_ragged(
    batch: Batch, rows: Rows, state: torch.Tensor, step: Step, span: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a recurrence over all sequences of a step: those with few query tokens by `step`, the others by `span`.

    Args:
        batch: the step.
        rows: the recurrence's inputs, `[T, ...]` each.
        state: `[B, ...]`; the states of sequences without tokens before the step are not read.
        step: one token of several sequences.
        span: all tokens of one sequence.

    Returns:
        The results `[T, ...]` (zeros in padded rows), and the states after the step `[B, ...]`. Padded sequences have
        their states unchanged. `state` itself is not changed.
    """
    few, many = batch.split()
    results, states, row, sequence = [], [], 0, 0
    for part, run in ((few, step), (many, span)):
        if part is None:
            continue
        n, b = part.tokens, part.seq_lens.shape[0]
        mine = [t[row : row + n] for t in rows]
        scan = _run_tokens if run is step else _run_sequences
        y, after = scan(part, mine, state[sequence : sequence + b], run)
        results.append(y)
        states.append(after)
        row, sequence = row + n, sequence + b
    return (results[0], states[0]) if len(results) == 1 else (torch.cat(results), torch.cat(states))


def _run_tokens(batch: Batch, rows: Rows, state: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over sequences side by side: as many steps as the longest has query tokens. It never waits for a
    device."""
    total = batch.tokens
    starts, stops = batch.query_start[:-1].long(), batch.query_start[1:].long()
    at = starts + torch.arange(batch.max_query_tokens, device=starts.device)[:, None]
    index = at.clamp(max=total - 1)
    live = (at < stops) & (batch.slots[index] >= 0)  # [steps, B]
    state = _start(batch, state, live.sum(0))
    # To look costs nothing on the host; elsewhere it would wait for the device.
    all_live = live.device.type == HOST and bool(live.all())
    out: torch.Tensor | None = None
    for i in range(batch.max_query_tokens):
        y, after = step(state, *(t[index[i]] for t in rows))
        if out is None:
            out = y.new_zeros(total + 1, *y.shape[1:])  # the last row takes what padded rows compute
        out[torch.where(live[i], at[i], total)] = y
        state = after if all_live else torch.where(_widen(live[i], state), after, state)
    assert out is not None
    return out[:total], state


def _run_sequences(batch: Batch, rows: Rows, state: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over one sequence after another."""
    lens = batch.lens()
    counts = [b - a for a, b in zip(lens.query_start, lens.query_start[1:])]
    before = [total - n for total, n in zip(lens.seq_lens, counts)]
    state = _start(batch, state, batch.query_start[1:] - batch.query_start[:-1]).clone()
    results = []
    for i, n in enumerate(counts):
        a = lens.query_start[i]
        y, state[i] = span(state[i], before[i], *(t[a : a + n] for t in rows))
        results.append(y)
    return torch.cat(results), state


def _start(batch: Batch, state: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The states `[B, ...]`, zeros for sequences all of whose tokens are among the step's `counts` `[B]`."""
    lens = batch.host_lens
    if lens is not None and all(n > b - a for n, a, b in zip(lens.seq_lens, lens.query_start, lens.query_start[1:])):
        return state
    begins = (batch.seq_lens > 0) & (batch.seq_lens == counts)
    return torch.where(_widen(begins, state), torch.zeros_like(state), state)


def _widen(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flags `[B]` in a shape that broadcasts over `like` `[B, ...]`."""
    return flags.view(-1, *[1] * (like.ndim - 1))


def each_chunk(before: int, tokens: int, size: int = CHUNK_TOKENS) -> Iterator[slice]:
    """The rows of each chunk among `tokens` tokens that come after `before` others; chunks end at multiples of
    `size` of the sequence."""
    start = 0
    while start < tokens:
        stop = min(tokens, start + size - (before + start) % size)
        yield slice(start, stop)
        start = stop


def draw_batch(draw: Draw, sequences: Sequences, *, states: bool = False) -> Batch:
    """A step over these sequences without a cache of tokens, for samples; `states`: with slots of their states."""
    size, queries, first = SAMPLE_BLOCK_TOKENS, [], 0
    for new, before in sequences:
        count = -(-(new + before) // size)
        ids = [int(i) for i in torch.randint(0, 97, (new,), generator=draw.generator)]
        queries.append(Query(ids, before, range(first, first + count)))
        first += count
    batch = make_batch(queries, block_tokens=size, device=draw.device)
    return batch.with_states(draw.state_slots(len(sequences))) if states else batch
