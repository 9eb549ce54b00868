"""Runs a bound model step by step, with several ways of dividing prompts into steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferplane.binding import Options, Plan, PlanSettings, bind, link
from inferplane.conformance.subject import Subject
from inferplane.engine.runner.kv_cache import list_requests, place_caches
from inferplane.kvcache import StatePool, paged_layout
from inferplane.ops import CausalLM, Draw, Embedding, MoERoute
from inferplane.types import HOST, Features, KVCache, KVLayout, KVRequest, QTensor
from inferplane.types.batch import FEW_TOKENS, Query, make_batch

Schedule = Callable[[int, int, int], int]
"""`(sequence, tokens done, tokens in all)` -> tokens of its next step."""

SCHEDULES: Mapping[str, Schedule] = {
    "whole_prompt": lambda sequence, done, total: total,
    "chunks_of_7": lambda sequence, done, total: 7,
    "token_by_token": lambda sequence, done, total: 1,
    # Each sequence alternates between single tokens, drafts and long chunks, each at another time.
    "ragged": lambda sequence, done, total: (1, 11, 4, 25)[(sequence + done // 12) % 4],
}

CANONICAL_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Bound:
    """A model bound somewhere, with its cache.

    Args:
        plan: its plan.
        steps: step kind -> bound model.
        cache: its KV cache, large enough for the prompts.
        device: torch device of its batches.
    """

    plan: Plan
    steps: Mapping[Any, Callable[..., Any]]
    cache: KVCache
    device: str


def draw_weights(
    model: CausalLM, dtype: torch.dtype, seed: int = 0, *, steady_routes: bool = False
) -> dict[int, torch.Tensor | QTensor]:
    """Draw a random canonical value on the host for each weight of a model, by the weight's id.

    Args:
        model: the tree.
        dtype: of plain weights.
        seed: any integer.
        steady_routes: spread the routers' correction biases, so that rounding cannot change the experts of a token.
            Otherwise a near tie, which a narrow dtype may decide differently, makes a few rows of logits incomparable.
    """
    draw = Draw(seed, dtype)
    weights = {id(w): draw.weight(w) for w in {id(w): w for _, w in model.weights()}.values()}
    for _, op in model.sites():
        if steady_routes and isinstance(op, MoERoute) and op.bias is not None:
            # Powers of two: the biases of two experts, and the sums of two pairs, which rank groups, differ by at least
            # 3. The scores of one or two experts, each below 1, cannot compensate that.
            weights[id(op.bias)] = 3.0 * 2.0 ** torch.tensor(draw.permutation(op.bias.shape[0]))
    return weights


def plan_for(subject: Subject, model: CausalLM, dtype: torch.dtype, kv_dtype: str = "auto") -> Plan:
    """The plan for a model on the device, as a user gets it with this `kv_dtype`."""
    state = subject.state
    settings = PlanSettings(subject.name, dtype, state.arch if state else "", subject.features, assumed=state is None)
    layouts = lambda r: [x for x in subject.layouts(r, dtype) if x.kv_dtype == kv_dtype]  # noqa: E731
    return bind(model, subject.kernels, settings, layouts)


def on_device(
    subject: Subject,
    model: CausalLM,
    dtype: torch.dtype,
    weights: Mapping[int, torch.Tensor | QTensor],
    tokens: int,
    kv_dtype: str = "auto",
) -> Bound:
    """Bind the model to the device's kernels, with a cache for `SEQUENCES` sequences of `tokens` tokens."""
    subject.open()
    plan = plan_for(subject, model, dtype, kv_dtype)
    device = subject.backend.torch_device_indexed
    requests = _requests(model)
    blocks = _blocks(tokens, plan.layouts[requests[0]])
    packed = plan.pack(lambda i: weights[i].to(device))
    cache = subject.backend.build_kv_cache(requests, plan.layouts, blocks, dtype)
    return Bound(plan, link(plan, packed), _with_states(model, cache, dtype, device), device)


def on_references(model: CausalLM, weights: Mapping[int, torch.Tensor | QTensor], tokens: int) -> Bound:
    """Bind the same tree to reference bodies in float32 on the host: the expected result for the device.

    Bodies widen weights when they use them, so weights keep their dtype; only the embedding's weight is widened here,
    because its rows are the first activations.
    """
    layout = paged_layout(CANONICAL_BLOCK_TOKENS)
    settings = PlanSettings("references", torch.float32, features=Features(), max_repacked_fraction=None)
    plan = bind(model, [], settings, lambda request: [layout], options=Options())
    wide = {id(op.weight) for _, op in model.sites() if isinstance(op, Embedding)}

    def widened(i: int) -> torch.Tensor | QTensor:
        value = weights[i]
        return value.float() if i in wide and isinstance(value, torch.Tensor) else value

    device = torch.device(HOST)
    blocks = _blocks(tokens, layout)
    layers = tuple(layout.build(r, blocks, torch.float32, device) for r in _requests(model))
    cache = _with_states(model, KVCache(layers, blocks, layout.block_tokens), torch.float32, HOST)
    return Bound(plan, link(plan, plan.pack(widened)), cache, HOST)


def _requests(model: CausalLM) -> list[KVRequest]:
    return [request for layer in list_requests(model.layers) for request in layer.of_tokens]


SEQUENCES = 3


def _with_states(model: CausalLM, cache: KVCache, dtype: torch.dtype, device: str) -> KVCache:
    """The cache with states for `SEQUENCES` sequences, if layers keep any, or nothing."""
    requests, tables = list_requests(model.layers), cache.list_tables()
    if all(request.keeps_entries_only for request in requests):
        return cache
    return replace(cache, by_layer=place_caches(requests, cache.layers, tables, SEQUENCES, dtype, torch.device(device)))


def _blocks(tokens: int, layout: KVLayout) -> int:
    return SEQUENCES * layout.blocks_for(tokens) + 1


def run(bound: Bound, prompts: Sequence[Sequence[int]], schedule: Schedule) -> list[torch.Tensor]:
    """Return the logits after every token of each prompt.

    Args:
        bound: the model.
        prompts: at most `SEQUENCES`, each within the cache's size.
        schedule: divides prompts into steps; all sequences share each step.

    Returns:
        float32 `[tokens, vocab]` on the host for each prompt.
    """
    size, tables, pool = bound.cache.block_tokens, _tables(bound, prompts), StatePool.of(bound.cache)
    slots = [None if pool is None else pool.allocate() for _ in prompts]
    done = [0] * len(prompts)
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    with torch.inference_mode():
        while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
            live = [i for i, p in enumerate(prompts) if done[i] < len(p)]
            counts = {i: min(schedule(i, done[i], len(prompts[i])), len(prompts[i]) - done[i]) for i in live}
            live.sort(key=lambda i: counts[i] > FEW_TOKENS)
            queries = [
                Query(
                    prompts[i][done[i] : done[i] + counts[i]],
                    done[i],
                    tables[i][: math.ceil((done[i] + counts[i]) / size)],
                    state=slots[i],
                )
                for i in live
            ]
            batch = make_batch(queries, block_tokens=size, device=bound.device)
            logits = bound.steps[batch.kind](batch, bound.cache)[0].to(HOST)
            start = 0
            for i in live:
                out[i].append(logits[start : start + counts[i]])
                start += counts[i]
                done[i] += counts[i]
                if pool is not None and (held := slots[i]) is not None:
                    slots[i] = pool.advance(held)
    return [torch.cat(parts) for parts in out]


def last_step(
    bound: Bound, prompts: Sequence[Sequence[int]], counts: Sequence[int], logit_rows: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and hidden states of a step over the last tokens of prompts. Call `run` before: it fills the cache.
    Layers may keep no states, which cannot return to an earlier token.

    Args:
        bound: the model.
        prompts: the prompts of that `run`.
        counts: number of tokens of each prompt in the step.
        logit_rows: number of last tokens of each prompt that get logits; None: all.

    Returns:
        float32 `[rows with logits, vocab]` and `[tokens, width]` on the host.
    """
    queries = [
        Query(prompt[-count:], len(prompt) - count, table, rows)
        for prompt, count, table, rows in zip(prompts, counts, _tables(bound, prompts), logit_rows, strict=True)
    ]
    batch = make_batch(queries, block_tokens=bound.cache.block_tokens, device=bound.device)
    with torch.inference_mode():
        logits, hidden = bound.steps[batch.kind](batch, bound.cache)
    return logits.to(HOST).float(), hidden.to(HOST).float()


def _tables(bound: Bound, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Block tables: block numbers descend, and sequences take one each in rotation, so no table is consecutive."""
    size = bound.cache.block_tokens
    free = list(range(bound.cache.blocks))
    tables: list[list[int]] = [[] for _ in prompts]
    for block in range(max(math.ceil(len(p) / size) for p in prompts)):
        for table, prompt in zip(tables, prompts, strict=True):
            if block * size < len(prompt):
                table.append(free.pop())
    return tables
