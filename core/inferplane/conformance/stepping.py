"""Running a bound model step after step, in every way in which prompts can be cut into steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.binding import Options, Plan, PlanSettings, bind, link
from inferplane.conformance.subject import Subject
from inferplane.kvcache import paged_layout
from inferplane.ops import CausalLM, Draw, Embedding, MoERoute
from inferplane.types import HOST, Features, KVCache, KVLayout, KVRequest, QTensor
from inferplane.types.batch import FEW_TOKENS, Query, make_batch

Schedule = Callable[[int, int, int], int]
"""`(sequence, tokens done, tokens in all)` -> tokens of its next step."""

SCHEDULES: Mapping[str, Schedule] = {
    "whole_prompt": lambda sequence, done, total: total,
    "chunks_of_7": lambda sequence, done, total: 7,
    "token_by_token": lambda sequence, done, total: 1,
    # One sequence goes by single tokens while others bring drafts or long chunks, and they change places on the way.
    "ragged": lambda sequence, done, total: (1, 11, 4, 25)[(sequence + done // 12) % 4],
}

CANONICAL_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Bound:
    """A model bound somewhere, with its cache.

    Args:
        plan: its decisions.
        steps: step kind -> bound model.
        cache: enough blocks for what is run.
        device: torch device of its batches.
    """

    plan: Plan
    steps: Mapping[Any, Callable[..., Any]]
    cache: KVCache
    device: str


def draw_weights(
    model: CausalLM, dtype: torch.dtype, seed: int = 0, *, steady_routes: bool = False
) -> dict[int, torch.Tensor | QTensor]:
    """Random canonical weights on the host for every weight of a model, by the weight's id.

    Args:
        model: the tree.
        dtype: of plain weights.
        seed: any integer.
        steady_routes: spread the routers' correction biases so far that rounding cannot change which experts a token
            goes to. Otherwise a near tie, decided otherwise in a narrow dtype, makes a few rows' logits incomparable.
    """
    draw = Draw(seed, dtype)
    weights = {id(w): draw.weight(w) for w in {id(w): w for _, w in model.weights()}.values()}
    for _, op in model.sites():
        if steady_routes and isinstance(op, MoERoute) and op.bias is not None:
            # Powers of two: neither two experts nor two pairs of them, which rank groups, lie less than 3 apart, and
            # scores (of one or two experts, each below 1) cannot make that up.
            weights[id(op.bias)] = 3.0 * 2.0 ** torch.tensor(draw.permutation(op.bias.shape[0]))
    return weights


def plan_for(subject: Subject, model: CausalLM, dtype: torch.dtype, kv_dtype: str = "auto") -> Plan:
    """The device's own plan for a model, as a user would get it who asks for `kv_dtype`."""
    state = subject.state
    settings = PlanSettings(subject.name, dtype, state.arch if state else "", subject.features, assumed=state is None)
    offers = lambda r: [x for x in subject.layouts(r, dtype) if x.kv_dtype == kv_dtype]  # noqa: E731
    return bind(model, subject.kernels, settings, offers)


def on_device(
    subject: Subject,
    model: CausalLM,
    dtype: torch.dtype,
    weights: Mapping[int, torch.Tensor | QTensor],
    tokens: int,
    kv_dtype: str = "auto",
) -> Bound:
    """The model bound to the device's kernels, with a cache for `tokens` tokens of each of a few sequences."""
    subject.open()
    plan = plan_for(subject, model, dtype, kv_dtype)
    device = subject.backend.torch_device_indexed
    requests = _requests(model)
    blocks = _blocks(tokens, plan.layouts[requests[0]])
    packed = {}
    for i, names in plan.packings.items():
        full = weights[i].to(device)
        for name, packing in names.items():
            packed[i, name] = packing.fn(full)
    cache = subject.backend.build_kv_cache(requests, plan.layouts, blocks, dtype)
    return Bound(plan, link(plan, packed), cache, device)


def on_references(model: CausalLM, weights: Mapping[int, torch.Tensor | QTensor], tokens: int) -> Bound:
    """The same tree on the host, in float32, every op's own body: what the device is compared with.

    Bodies widen weights as they use them, so those stay as they are, but for the embedding's, whose rows are the first
    activations.
    """
    layout = paged_layout(CANONICAL_BLOCK_TOKENS)
    settings = PlanSettings("references", torch.float32, features=Features(), max_repacked_fraction=None)
    plan = bind(model, [], settings, lambda request: [layout], options=Options())
    wide = {id(op.weight) for _, op in model.sites() if isinstance(op, Embedding)}
    packed = {}
    for i, names in plan.packings.items():
        full = weights[i]
        if i in wide and isinstance(full, torch.Tensor):
            full = full.float()
        for name, packing in names.items():
            packed[i, name] = packing.fn(full)
    device = torch.device(HOST)
    layers = tuple(layout.build(r, _blocks(tokens, layout), torch.float32, device) for r in _requests(model))
    return Bound(plan, link(plan, packed), KVCache(layers, _blocks(tokens, layout), layout.block_tokens), HOST)


def _requests(model: CausalLM) -> list[KVRequest]:
    return [layer.attn.kv_requests()[0] for layer in model.layers]


SEQUENCES = 3


def _blocks(tokens: int, layout: KVLayout) -> int:
    return SEQUENCES * layout.blocks_for(tokens) + 1


def run(bound: Bound, prompts: Sequence[Sequence[int]], schedule: Schedule) -> list[torch.Tensor]:
    """Logits after every token of each prompt.

    Args:
        bound: the model.
        prompts: at most three, each within the cache's size.
        schedule: how prompts are cut into steps; all sequences share each step.

    Returns:
        float32 `[tokens, vocab]` on the host for each prompt.
    """
    size, tables = bound.cache.block_tokens, _tables(bound, prompts)
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
    return [torch.cat(parts) for parts in out]


def last_step(
    bound: Bound, prompts: Sequence[Sequence[int]], counts: Sequence[int], wanted: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and hidden states of a step over the last tokens of prompts whose others are cached; `run` came first.

    Args:
        bound: the model.
        prompts: those that `run` ran.
        counts: tokens of each that the step takes.
        wanted: of these, how many of the last want logits; None: all.

    Returns:
        float32 `[rows that want them, vocab]` and `[tokens, width]` on the host.
    """
    queries = [
        Query(prompt[-count:], len(prompt) - count, table, some)
        for prompt, count, table, some in zip(prompts, counts, _tables(bound, prompts), wanted, strict=True)
    ]
    batch = make_batch(queries, block_tokens=bound.cache.block_tokens, device=bound.device)
    with torch.inference_mode():
        logits, hidden = bound.steps[batch.kind](batch, bound.cache)
    return logits.to(HOST).float(), hidden.to(HOST).float()


def _tables(bound: Bound, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each prompt's blocks: handed out from the end, round the sequences, so that no table is a run of numbers."""
    size = bound.cache.block_tokens
    free = list(range(bound.cache.blocks))
    tables: list[list[int]] = [[] for _ in prompts]
    for place in range(max(math.ceil(len(p) / size) for p in prompts)):
        for table, prompt in zip(tables, prompts, strict=True):
            if place * size < len(prompt):
                table.append(free.pop())
    return tables
