"""From decisions and packed weights to the callables that the hot path holds.

A bound op is `types.MethodType(kernel, view)`: calling it costs one bound-method call, and nothing is captured in
closures. A view is a plain object with the op's field names: weights in the kernel's packing, child views or bound
children, and the static fields.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from inferplane.binding.choice import Choice
from inferplane.binding.plan import Plan
from inferplane.binding.resolver import check_parameters
from inferplane.errors import KernelError
from inferplane.ops import Op
from inferplane.types import CANONICAL, Kernel, StepKind, Weight
from inferplane.types.scratch import Scratch

Packed = Mapping[tuple[int, str], Any]
"""`(id of a weight, packing name)` -> what the kernel reads."""


class Chained(tuple[Any, ...]):
    """Bound layers that one function runs in turn; `chain(x, residual, batch, caches)` calls it."""

    chain: Callable[..., Any]


class View(Scratch):
    """What a kernel or a body sees as its first argument: the op's fields by name, `prepared`, `once(key, make)`."""

    prepared: Any = None
    whole: Callable[..., Any] | None = None
    """Of a model: what its layers' kernels offer (`Kernel.whole`)."""


def link(plan: Plan, packed: Packed) -> dict[StepKind, Callable[..., Any]]:
    """The bound root for each step kind.

    Args:
        plan: the decisions.
        packed: every weight in every packing that the plan needs.

    Raises:
        KernelError: a kernel's module cannot be imported, its parameters are wrong, or its `prepare` raised.
    """
    return {kind: _Linker(plan, packed, kind).bind(plan.model, choice) for kind, choice in plan.choices.items()}


class _Linker:
    def __init__(self, plan: Plan, packed: Packed, kind: StepKind) -> None:
        self.plan, self.packed, self.kind = plan, packed, kind
        self.functions: dict[int, Callable[..., Any]] = {}
        self.prepared: dict[int, Any] = {}

    def bind(self, op: Op, choice: Choice) -> Callable[..., Any]:
        if choice.kernel is not None:
            view = self.view(op, choice, choice.kernel, "")
            view.prepared = self.prepare(op, choice)
            return types.MethodType(self.function(choice.kernel), view)
        view = View()
        for path, value in op.items():
            if isinstance(value, Weight):
                value = self.packed[id(value), self.plan.packing(op, value, CANONICAL, self.kind, "unserved").name]
            elif isinstance(value, Op):
                value = self.bind(value, choice.children[path])
            _put(view, path, value)
        for name in {path.partition(".")[0] for path in choice.children if "." in path}:
            _chain(view, name, [c.kernel for path, c in choice.children.items() if path.startswith(f"{name}.")])
        body = op.variants[choice.variant] if choice.variant else type(op).__call__
        return types.MethodType(body, view)

    def view(self, op: Op, choice: Choice, kernel: Kernel, prefix: str) -> View:
        view = View()
        for path, value in op.items():
            if isinstance(value, Weight):
                packing = kernel.packs.get(prefix + path, CANONICAL)
                stored = self.plan.packing(op, value, packing, self.kind, choice.dequantize, below=bool(prefix))
                value = self.packed[id(value), stored.name]
            elif isinstance(value, Op):
                value = self.view(value, choice, kernel, f"{prefix}{path}.")
            _put(view, path, value)
        return view

    def function(self, kernel: Kernel) -> Callable[..., Any]:
        found = self.functions.get(id(kernel))
        if found is None:
            if isinstance(kernel.target, str):
                check_parameters(kernel)
            found = self.functions[id(kernel)] = kernel.function()
        return found

    def prepare(self, op: Op, choice: Choice) -> Any:
        kernel = choice.kernel
        if kernel is None or kernel.prepare is None:
            return None
        if id(choice) not in self.prepared:
            try:
                self.prepared[id(choice)] = kernel.prepare(op, self.plan.resolvers[self.kind].ctx)
            except Exception as error:
                raise KernelError(
                    f"Kernel {kernel.name}: prepare raised {type(error).__name__}: {error}.",
                    remedy=f"pin another provider for {kernel.op!r}",
                ) from error
        return self.prepared[id(choice)]


def _chain(view: View, name: str, kernels: list[Kernel | None]) -> None:
    """Mark a tuple of bound ops whose kernels share a chain, and the model that they are of."""
    chains = {None if kernel is None else kernel.chain for kernel in kernels}
    chain = chains.pop()
    if chains or chain is None:
        return
    if len(wholes := {kernel.whole for kernel in kernels if kernel is not None}) == 1:
        view.whole = wholes.pop()  # not bound to the view: nothing may keep itself alive
    bound = Chained(getattr(view, name))
    views = tuple(layer.__self__ for layer in bound)
    bound.chain = types.MethodType(chain, views)
    setattr(view, name, bound)


def _put(view: View, path: str, value: Any) -> None:
    name, dot, _ = path.partition(".")
    if dot:  # an entry of a tuple of ops
        value = (*getattr(view, name, ()), value)
    setattr(view, name, value)
