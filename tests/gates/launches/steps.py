"""What a decode step launches, in order: `python -m tests.gates.launches.steps [SEQUENCES]`.

The plan of a whole model is bound offline and run on tensors without contents.
Triton's kernels are taken down where they would be launched, torch's operators by a dispatch mode. Nothing is
computed, so models of any size run; what a library launches inside of one operator is not seen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from inferplane.binding import link, view_of
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.capture import Size, padding_batch
from inferplane.engine.sampling import batch_rows as rows
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.speculate import SpeculativeConfig
from inferplane.engine.speculate.captured.captured_steps import InputBucket
from inferplane.engine.speculate.captured.verify_and_draft import CaptureForm, VerifyAndDraft
from inferplane.ops.formats import FORMATS
from inferplane.plugins import host
from inferplane.types import PLAIN, KVCache, QTensor, Weight
from inferplane.types.qtensor import scale_shape

META = "meta"
PRODUCTS = ("_product", "_grouped", "_attend", "_absorbed", "mm", "addmm", "bmm")
"""Kernels that multiply matrices, attention among them."""
NO_KERNEL = (
    "view", "_unsafe_view", "t", "transpose", "split", "split_with_sizes", "slice", "select", "expand", "unsqueeze",
    "squeeze", "permute", "unbind", "detach", "as_strided", "alias", "empty", "new_empty", "empty_like",
    "empty_strided", "_reshape_alias", "lift_fresh", "unfold",
)  # fmt: skip
"""Operators that look at memory in another way, or ask for some."""


class Taken(TorchDispatchMode):
    """Takes down operators that launch something, and Triton's kernels, in the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._run = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
            self.names.append(function.__name__)

        JITFunction.run = run  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        JITFunction.run = self._run  # type: ignore[method-assign]
        return super().__exit__(*error)


@dataclass(frozen=True)
class Between:
    """What is launched between two products."""

    first: str
    kernels: tuple[str, ...]
    second: str

    def __str__(self) -> str:
        return f"{self.first} > {', '.join(self.kernels) or '-'} > {self.second}"


def planned(config: dict[str, Any], **options: Any) -> Runner:
    """A model bound to an assumed Hopper GPU in bfloat16."""
    chosen = RunnerOptions(dtype="bfloat16", arch="sm90a", **options)
    return Runner.plan_only(ModelFiles(config), host(), "cuda", chosen)


CONTEXT, BLOCKS = 4096, 130
"""Tokens of a sequence, and blocks of the caches, which hold nothing."""


def step(runner: Runner, sequences: int, tokens: int = 1) -> list[str]:
    """Kernels of one decode step of so many sequences, each with so many tokens."""
    bound, cache = _bound(runner)
    batch = padding_batch(Size(sequences, tokens), CONTEXT // cache.block_tokens, cache.block_tokens, META)
    return _taken(lambda: bound(batch, cache))


def drafting(runner: Runner, sequences: int, tokens: int = 1) -> list[str]:
    """Kernels of the drafting layer over a step's rows, logits wanted of each sequence's last; with one token, over a
    chain's.
    """
    bound, cache = _bound(runner)
    layer, kv = view_of(bound).mtp[0], cache.layers[-1]
    last = torch.arange(sequences, device=META) if tokens > 1 else None
    batch = padding_batch(Size(sequences, tokens), CONTEXT // cache.block_tokens, cache.block_tokens, META)
    hidden = torch.empty(batch.tokens, runner.model.embed.weight.shape[1], dtype=runner.dtype, device=META)
    return _taken(lambda: layer(hidden, replace(batch, logit_rows=last), kv))


def cycle(runner: Runner, sequences: int, drafts: int, kinds: tuple[int, ...] = (rows.GREEDY,)) -> list[str]:
    """Kernels of a step with so many drafts a sequence, of its verification, and of as many drafts behind it: what one
    record launches.
    """
    bound, cache = _bound(runner)
    layer, kv = view_of(bound).mtp[0], cache.layers[-1]
    sampler = Sampler(view_of(bound).sample, runner.model.vocab, META)
    config = SpeculativeConfig("mtp", drafts)
    whole = VerifyAndDraft(lambda b: bound(b, cache), lambda b, h: layer(h, b, kv), sampler, config, cache.block_tokens)
    width = CONTEXT // cache.block_tokens
    inputs = InputBucket.of(Size(sequences, 1 + drafts), width, cache.block_tokens, META, cache.num_tables).inputs
    return _taken(lambda: whole(inputs, CaptureForm(drafts, kinds)))


def _bound(runner: Runner) -> tuple[Any, KVCache]:
    """The decode step on weights without contents, and a cache."""
    plan = runner.plan
    packed = {
        (i, name): packing.fn(_contents(plan.weights[i], plan.settings.dtype))
        for i, packings in plan.packings.items()
        for name, packing in packings.items()
    }
    device = torch.device(META)
    block_tokens = next(iter(plan.layouts.values())).block_tokens
    layers = tuple(plan.layouts[r].build(r, BLOCKS, runner.dtype, device) for r in runner.kv_requests())
    return link(plan, packed)["decode"], KVCache(layers, BLOCKS, block_tokens)


def _taken(call: Callable[[], Any]) -> list[str]:
    with Taken():  # as before recording: counters are made
        call()
    with Taken() as taken:
        call()
    return taken.names


def _contents(weight: Weight, dtype: torch.dtype) -> Any:
    if weight.format == PLAIN:
        return torch.empty(weight.shape, dtype=weight.dtype or dtype, device=META)
    kind, bits, (rows, columns) = FORMATS[weight.format]
    block = (rows, columns or weight.shape[-1])
    scale = torch.empty(scale_shape(weight.shape, block), device=META)
    return QTensor(torch.empty(weight.shape, dtype=kind, device=META), scale, block=block, bits=bits)


def between(names: list[str]) -> Iterator[Between]:
    """Pair by pair of products that follow each other."""
    first, kernels = None, []
    for name in names:
        if name not in PRODUCTS:
            kernels.append(name)
            continue
        if first is not None:
            yield Between(first, tuple(kernels), name)
        first, kernels = name, []


def main(sequences: str = "1") -> None:
    """Every model's steps as they are bound: each distinct pair of products, and how often it comes."""
    from tests.gates.launches.models import DRAFTING, MODELS

    for label, make in MODELS.items():
        names = step(make(), int(sequences))
        print(f"{label}, {sequences} sequences: {len(names)} launches")
        for pair, times in Counter(map(str, between(names))).items():
            print(f"  {times:4} x {pair}")
    for label, make in DRAFTING.items():
        runner, n = make(), int(sequences)
        for drafts in (1, 3):
            parts = [len(step(runner, n, 1 + drafts)), len(drafting(runner, n, 1 + drafts)), len(drafting(runner, n))]
            apart = parts[0] + parts[1] + (drafts - 1) * parts[2]
            for name, kinds in (("greedy", (rows.GREEDY,)), ("sampled", (rows.PLAIN,))):
                names = cycle(runner, n, drafts, kinds)
                print(
                    f"{label}, {n} sequences, {drafts} drafts, {name}: {len(names)} launches, {apart} of the networks"
                )


if __name__ == "__main__":
    main(*sys.argv[1:])
