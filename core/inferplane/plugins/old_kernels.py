"""Kernels of plugin API 1.0 that run all layers or a whole model: `Kernel.chain` and `Kernel.whole`, for one minor.

A chain becomes a kernel of "decoder_stack", and what stands beside it for a model's step a kernel of "causal_lm". Both
inline the layers' kernels, so they are used where every layer is bound to a kernel with the same chain, as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from inferplane.renamed import NewName, old_attributes
from inferplane.types import Batch, Kernel, KVCache

LAYER = "decoder_layer"
StackFunction = Callable[..., Any]


@old_attributes({"chain": NewName("run_all", warns=False)})
class BoundLayers(tuple[Any, ...]):
    """A model's bound layers as plugin API 1.0 had them; `chain(x, residual, batch, caches)` runs all."""

    run_all: Callable[..., Any]


@old_attributes({"whole": NewName("run_model", warns=False)})
class OldModelView:
    """A model's view as plugin API 1.0 had it: `layers` is a tuple of bound layers, the other fields are bound ops.

    Args:
        view: of a kernel of "causal_lm" that inlines its stack.
        stack_function: runs the layers.
    """

    def __init__(self, view: Any, stack_function: StackFunction) -> None:
        from inferplane.binding.link import view_of  # only for models that are bound

        bound = view_of(view.body)
        self.embed, self.norm, self.head, self.sample = bound.embed, bound.norm, bound.head, bound.sample
        self.mtp, self.gather = bound.mtp, bound.gather
        self.layers = BoundLayers(view_of(view.layers.body).layers)
        views = tuple(view.layers.layers)
        self.layers.run_all = types.MethodType(stack_function, views)
        functions = {layer.kernel.model_function for layer in views}
        self.run_model: Callable[..., Any] | None = functions.pop() if len(functions) == 1 else None


def with_stack_kernels(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels, and after them what the chains of layers become."""
    by_function: dict[StackFunction, list[Kernel]] = {}
    for kernel in kernels:
        if kernel.op == LAYER and kernel.stack_function is not None:
            by_function.setdefault(kernel.stack_function, []).append(kernel)
    return [*kernels, *(kernel for function, layers in by_function.items() for kernel in _kernels_of(function, layers))]


def _kernels_of(stack_function: StackFunction, layers: Sequence[Kernel]) -> list[Kernel]:
    """The kernels that a chain of these layers becomes.

    Their rank is the highest of the layers, so that the layers one by one are never preferred to them. What the layers
    declare holds for them too: they are bound only together with such layers.
    """
    provider, rank = layers[0].provider, max(kernel.rank for kernel in layers)
    options: dict[str, Any] = {"rank": rank, "capture_safe": True, "batch_invariant": True}

    def decoder_stack(view: Any, x: Any, residual: Any, batch: Batch, cache: KVCache) -> Any:
        if not _runs(view, stack_function):
            return view.body(x, residual, batch, cache)
        return stack_function(tuple(view.layers), x, residual, batch, cache.layers)

    decoder_stack.__name__ = getattr(stack_function, "__name__", "chain")
    names = tuple(kernel.name for kernel in layers)
    stack = Kernel("decoder_stack", provider, decoder_stack, inlines={"*": names}, **options)
    functions = [kernel.model_function for kernel in layers if kernel.model_function is not None]
    if not functions:
        return [stack]

    def causal_lm(view: Any, batch: Batch, cache: KVCache) -> Any:
        model: OldModelView | None = view.once("inferplane.old_model", _old_model, view, stack_function)
        done = None if model is None or model.run_model is None else model.run_model(model, batch, cache)
        if done is None:
            return view.body(batch, cache)
        logits, hidden = done
        return (logits if view.gather is None else view.gather(logits)), hidden

    causal_lm.__name__ = getattr(functions[0], "__name__", "whole")
    return [stack, Kernel("causal_lm", provider, causal_lm, inlines={"layers": (stack.name,)}, **options)]


def _runs(stack: Any, stack_function: StackFunction) -> bool:
    """Whether every layer of a stack's view is bound to a kernel with this function; others may have the same name."""
    return bool(stack.once(("inferplane.runs", stack_function), _all_have, stack.layers, stack_function))


def _all_have(layers: Sequence[Any], stack_function: StackFunction) -> bool:
    return len(layers) > 0 and all(layer.kernel.stack_function is stack_function for layer in layers)


def _old_model(view: Any, stack_function: StackFunction) -> OldModelView | None:
    return OldModelView(view, stack_function) if _runs(view.layers, stack_function) else None
