"""A loaded model whose bound ops are observed: the calls of each site in a step, unit by unit, and calls again with
another model's inputs.

A unit is the embedding, a layer, the last norm or the head. Where a kernel runs all layers, or the whole model, in one
call, it is a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from inferplane.binding import view_of
from inferplane.binding.link import link_observed
from inferplane.engine import LLM
from inferplane.errors import UnsupportedModelError
from inferplane.ops import Op
from inferplane.ops.op import as_tuple
from inferplane.types import Batch, KVCache

HEAD_ROWS = 128
"""Rows of logits that are made at a time: a vocabulary has up to 262,144 tokens."""
ROOT, EMBED, STACK, NORM, HEAD = "", "embed", "layers", "norm", "head"


@dataclass(frozen=True)
class Call:
    """A call of a bound op.

    Args:
        arguments: what it was called with; tensors are copies.
        results: what it returned, as a tuple; tensors are copies.
    """

    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class BoundSite:
    """An op that is bound by itself.

    Args:
        op: the op. bound: what its site calls.
        kernel: what runs there, as `explain` has it.
    """

    op: Op
    bound: Callable[..., Any]
    kernel: str


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class ObservedModel:
    """A model's own bound ops, with their weights and its cache, in steps of prompts.

    Args:
        model: the loaded model.

    Attributes: `sites`, a site -> what is bound there; `model`, the tree of ops; `fused`, a site whose kernel runs hot
    ops in its call, and which is not hot itself -> the kernel.

    Raises:
        UnsupportedModelError: several ranks share the model.
        KernelError: as of `binding.link`.
    """

    def __init__(self, model: LLM) -> None:
        runner = model.runner
        if runner.ranks is not None:
            raise UnsupportedModelError(
                f"{runner.files.name} is shared by several ranks, so its layers cannot run alone.",
                remedy="run it in one process",
            )
        assert runner.cache is not None
        self.engine, self.model, self.cache, self.dtype = model.engine, runner.model, runner.cache, runner.dtype
        self.sites: dict[str, BoundSite] = {}
        self.fused: dict[str, str] = {}
        self._calls: dict[str, list[Call]] = {}
        self._observed: set[str] = set()
        choices = {}
        for site, op, choice in runner.plan.sites("mixed"):
            choices[site] = choice
            if not (choice.binds_children or op.hot) and any(below.hot for path, below in op.sites() if path):
                self.fused[site] = choice.label
        self._choices = choices
        root = link_observed(runner.plan, runner.loaded.packed, "mixed", self._around)
        self._parts = self._find_parts(ROOT, root)
        self._root = self._around(ROOT, runner.model, root)
        stack = None if self._parts is None else self._find_parts(STACK, self.sites[STACK].bound)
        self._layers: Sequence[Callable[..., Any]] | None = None if stack is None else stack.layers

    def _around(self, site: str, op: Op, bound: Callable[..., Any]) -> Callable[..., Any]:
        self.sites[site] = BoundSite(op, bound, self._choices[site].label)
        observed, calls = self._observed, self._calls  # not `self`, which would hold the weights in a circle

        def call(*arguments: Any) -> Any:
            if site not in observed:
                return bound(*arguments)
            given = tuple(map(_copy, arguments))
            result = bound(*arguments)
            calls.setdefault(site, []).append(Call(given, tuple(map(_copy, as_tuple(result)))))
            return result

        return call

    def _find_parts(self, site: str, bound: Callable[..., Any]) -> Any:
        """The view with the children of an op as bound functions; None if a kernel runs them in its own call. A kernel
        that inlines some has the body beside it, with equal results (`Kernel.inlines`)."""
        choice = self._choices[site]
        if not choice.binds_children:
            return None
        view = view_of(bound)
        return view if choice.kernel is None else view_of(view.body)

    @property
    def units(self) -> list[str]:
        """Sites of the units, in order."""
        if self._parts is None:
            return [ROOT]
        layers = [STACK] if self._layers is None else [f"{STACK}.{i}" for i in range(len(self._layers))]
        return [EMBED, *layers, NORM, HEAD]

    def begin(self, batch: Batch, sites: Collection[str]) -> ObservedStep:
        """Begin a step over a prompt, of which the calls of these sites are observed."""
        return ObservedStep(self, batch, sites)

    def observe(self, run: Callable[[], Any], sites: Collection[str]) -> tuple[Any, dict[str, list[Call]]]:
        """Run something, and return what it returns and the calls of some sites, those below before those above."""
        self._calls.clear()
        self._observed.update(sites)
        try:
            result = run()
        finally:
            self._observed.clear()
        found = dict(self._calls)
        self._calls.clear()
        return result, found

    def call_again(self, site: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Call a site's bound op, observing nothing; the results as a tuple."""
        return as_tuple(self.sites[site].bound(*arguments))


@dataclass
class ObservedStep:
    """A step that runs unit by unit.

    Args:
        of: the model.
        batch: the step.
        sites: those whose calls are observed.
    """

    of: ObservedModel
    batch: Batch
    sites: Collection[str]
    _state: tuple[Any, Any] = field(default=(None, None))

    def run(self, unit: str) -> Iterator[dict[str, list[Call]]]:
        """Run the next unit; yields the calls of its sites, of the head for some rows at a time."""
        of, (x, residual) = self.of, self._state
        parts, cache, batch = of._parts, of.cache, self.batch
        if unit == HEAD:
            for rows in torch.arange(batch.tokens, device=batch.ids.device).split(HEAD_ROWS):
                some = replace(batch, logit_rows=rows)
                yield of.observe(partial(parts.head, x, some), self.sites)[1]
            return
        if unit == ROOT:
            run = partial(of._root, batch, cache)
        elif unit == EMBED:
            run = partial(parts.embed, batch.ids)
        elif unit == STACK:
            run = partial(parts.layers, x, residual, batch, cache)
        elif unit == NORM:
            run = partial(parts.norm, x, residual)
        else:
            assert of._layers is not None
            number = int(unit.rpartition(".")[2])
            held, table = _place_of(cache, number)
            run = partial(of._layers[number], x, residual, batch.for_table(table), held)
        result, calls = of.observe(run, self.sites)
        x, residual = result if isinstance(result, tuple) else (result, None)
        self._state = _copy(x), _copy(residual)  # what the sites are called with again may overwrite their results
        yield calls


def _place_of(cache: KVCache, number: int) -> tuple[Any, int]:
    """What a layer is called with, and the number of its block table, as `DecoderStack` says."""
    if cache.by_layer:
        held, table = cache.by_layer[number]
        return held, table
    return cache.layers[number], cache.tables[number] if cache.tables else 0
