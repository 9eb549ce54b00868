"""Steps over a prompt, and logits after every token of it, without sampling: for evaluation."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import torch

from inferplane.engine.loop.engine import Engine
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.errors import CapacityError, UsageError
from inferplane.types import HOST, Batch
from inferplane.types.batch import Query, make_batch


def prompt_logits(engine: Engine, prompt: Sequence[int], chunk_tokens: int | None = None) -> torch.Tensor:
    """Run the model over a prompt in steps of its own, and return the logits after every token: float32
    `[tokens, vocab]` on the host. Requests that run are not touched; the prefix cache is not used.

    Args:
        engine: its model runs, in free blocks of its cache, which are released at the end.
        prompt: token ids.
        chunk_tokens: tokens per step; None takes the engine's.

    Raises:
        UsageError, CapacityError: as for `Engine.add`.
    """
    with closing(prompt_steps(engine, prompt, chunk_tokens)) as steps:
        return torch.cat([engine.runner.run(batch)[0].to(HOST) for batch in steps])


def prompt_steps(
    engine: Engine, prompt: Sequence[int], chunk_tokens: int | None = None
) -> Generator[Batch, None, None]:
    """The steps of `prompt_logits`. Each is to be run before the next one is taken; the blocks are released at the
    end, or when the iterator is closed.

    Args:
        engine, prompt, chunk_tokens: as of `prompt_logits`.

    Raises:
        UsageError, CapacityError: as for `Engine.add`.
    """
    engine.check(prompt)
    scheduler, limits = engine.scheduler, engine.scheduler.limits
    if chunk_tokens is not None and chunk_tokens < 1:
        raise UsageError(f"chunk_tokens = {chunk_tokens}.", there_is="values of 1 and more")
    if len(prompt) > limits.max_model_len:
        raise CapacityError(
            f"A prompt of {len(prompt)} tokens exceeds the {'cache' if limits.limited_by_cache else 'model'}'s "
            f"{limits.max_model_len}.",
            remedy=f"shorten it, or {limits.length_remedy}",
        )
    step = min(chunk_tokens or limits.max_num_batched_tokens, scheduler.max_chunk_tokens(len(prompt)))
    tables = scheduler.tables
    sequence = Request("prompt_logits", list(prompt), SamplingParams(max_tokens=1))
    if scheduler.states is not None:
        sequence.state = scheduler.states.allocate()
        if sequence.state is None:
            raise CapacityError(
                f"All {scheduler.states.total} sequences that have slots for states are running.",
                remedy="wait until one ends, or raise max_num_seqs",
            )
    try:
        for start in range(0, len(prompt), step):
            ids = list(prompt[start : start + step])
            taken = tables.extend(sequence, start + len(ids)) if start else tables.admit(sequence, (), step)
            if not taken:
                raise CapacityError(
                    f"A prompt of {len(prompt)} tokens needs more KV blocks than are free.",
                    there_is=f"{engine.pools.available} available of {engine.pools.total}",
                    remedy="run fewer or shorter sequences at once, or give the cache more memory",
                )
            blocks, *more_blocks = tables.first_blocks(sequence, start + len(ids))
            query = Query(ids, start, blocks, None, more_blocks, sequence.state)
            yield make_batch([query], block_tokens=engine.cache.block_tokens, device=engine.device)
            sequence.computed += len(ids)
            if scheduler.states is not None and sequence.state is not None:
                sequence.state = scheduler.states.advance(sequence.state)
            tables.release_out_of_window(sequence)
    finally:
        scheduler.release(sequence)
