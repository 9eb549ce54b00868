"""Sequences at different phases share steps, as an engine under load has them."""

from __future__ import annotations

import random

import torch

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.model_runner import Runner
from inferplane.kvcache import StatePool, blocks_held
from inferplane.types import StateCache, StateSlots
from inferplane.types.batch import FEW_TOKENS, Query, make_batch

COUNTS = (1, 1, 2, 7, 8, 9, 20, 40)
"""Tokens of a sequence in a step."""


def check_same_answers(
    llm: LLM, every: list[list[int]], params: list[SamplingParams], alone: list[list[int]], *, preempts: bool
) -> dict[str, float]:
    """Prompts together, then in another order with prefixes in the cache, get the tokens that each gets alone, and
    nothing stays in use; the engine's counters.

    Args:
        preempts: the cache holds so few blocks that sequences are preempted; else prefixes must have been found.
    """
    order = list(range(len(every)))
    for again in range(2):
        got = llm.generate([every[i] for i in order], [params[i] for i in order])
        assert [r.token_ids for r in got] == [alone[i] for i in order], again
        random.Random(again).shuffle(order)
    stats = llm.engine.stats()
    assert stats["num_preemptions_total" if preempts else "prefix_cache_hits_total"] > 0
    assert llm.engine.pools.used == 0
    llm.engine.pools.check()
    return stats


def ragged(runner: Runner, many: list[list[int]]) -> tuple[list[torch.Tensor], set[tuple[str, bool, bool]]]:
    """Logits after every token of each prompt, in scattered blocks of a cache that was full of NaN; kinds of steps.

    A kind is the batch's, and whether it has sequences with few and with many tokens.
    """
    cache = runner.cache
    assert cache is not None
    slots: list[StateSlots | None] = [None] * len(many)
    if cache.list_states():
        states = StatePool(len(many))
        cache = runner.cache = cache.convert(lambda kv, _: kv, lambda old: unwritten(old, states.slots))
        slots = [states.allocate() for _ in many]
    for layer in cache.layers:
        for entry in layer.entries:  # type: ignore[attr-defined]
            entry.fill_(float("nan"))
    draw = random.Random(5)  # of the steps, which do not depend on the cache's size
    pools = [random.Random(6).sample(range(total), total) for total in cache.list_pools()]
    tables = [tables_of(runner, len(ids), pools) for ids in many]
    done: list[int] = [0] * len(many)
    got: list[list[torch.Tensor]] = [[] for _ in many]
    kinds = set()
    while live := [i for i, ids in enumerate(many) if done[i] < len(ids)]:
        chosen = [(i, min(draw.choice(COUNTS), len(many[i]) - done[i])) for i in live]
        chosen = sorted(draw.sample(chosen, draw.randint(1, len(chosen))), key=lambda c: c[1] > FEW_TOKENS)
        queries = [
            Query(many[i][done[i] : done[i] + n], done[i], tables[i][0], more_blocks=tables[i][1:], state=slots[i])
            for i, n in chosen
        ]
        batch = make_batch(queries, block_tokens=cache.block_tokens, device="cpu")
        logits, hidden = runner.run(batch)
        assert hidden.shape[0] == sum(n for _, n in chosen)
        for (i, n), rows in zip(chosen, logits.split([n for _, n in chosen])):
            got[i].append(rows)
            done[i] += n
            if (pair := slots[i]) is not None:
                slots[i] = StateSlots(pair.write, pair.read)
        kinds.add((batch.kind, batch.few is not None, batch.many is not None))
    return [torch.cat(rows) for rows in got], kinds


def tables_of(runner: Runner, tokens: int, pools: list[list[int]]) -> list[list[int]]:
    """Blocks of a sequence in each table, taken from the pools. Of pools behind the first it takes what it holds at a
    time, and uses blocks again that it would release."""
    plan, made = runner.tables, []
    for window, number in zip(plan.windows, plan.list_pools()):
        count = blocks_held([window if number else None], tokens, max(COUNTS), runner.block_tokens)
        own = [pools[number].pop() for _ in range(count)]
        made.append([own[i % count] for i in range(-(-tokens // runner.block_tokens))])
    return made


def unwritten(states: StateCache, slots: int) -> StateCache:
    """States like these for as many slots, full of NaN."""
    tensors = [t.new_full((slots, *t.shape[1:]), float("nan")) for t in states.tensors]
    return states.copy_with(slots=slots, tensors=tuple(tensors))
