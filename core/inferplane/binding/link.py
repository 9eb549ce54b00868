"""Turns a plan and packed weights into the callables of the hot path.

A bound op is `types.MethodType(kernel, view)`: calling it costs one bound-method call, without closures. A view
is a plain object with the op's field names: weights in the kernel's packing, child views or bound
children, and the static fields.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inferplane.binding.choice import Choice
from inferplane.binding.plan import Plan
from inferplane.binding.resolver import check_parameters
from inferplane.errors import KernelError, in_words
from inferplane.ops import Linear, Op
from inferplane.ops.linear import OLD_LINEAR
from inferplane.renamed import old_attributes
from inferplane.types import CANONICAL, Kernel, StepKind, Weight
from inferplane.types.scratch import Scratch
from inferplane.types.weight import OLD_OUTPUT_QUANT

Packed = Mapping[tuple[int, str], Any]
"""`(id of a weight, packing label)` -> the packed weight."""


@old_attributes(OLD_OUTPUT_QUANT)
class View(Scratch):
    """The first argument of a kernel or a body: the op's fields by name, and `once(key, make)`.

    Attributes: `kernel`, the kernel it was made for, None for a body; `prepared`, what the kernel's `prepare` returned;
    `body`, of a kernel that inlines its children: the op's body over the same bound children.
    """

    kernel: Kernel | None = None
    prepared: Any = None
    body: Callable[..., Any]

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():  # not by __dict__: see `Scratch.once`
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@old_attributes(OLD_LINEAR)
class LinearView(View):
    """The view of a `Linear`, which can be read by the names of plugin API 1.0 too."""


class NumberedView(View):
    """The view of an op whose items are numbered (`Op.numbered`): a sequence of them.

    Kernels of a whole model that were written when a model had a tuple of layers read them so.
    """

    def __init__(self, numbered: str) -> None:
        self.numbered = numbered

    def __len__(self) -> int:
        return len(getattr(self, self.numbered))

    def __iter__(self) -> Iterator[Any]:
        return iter(getattr(self, self.numbered))

    def __getitem__(self, index: Any) -> Any:
        return getattr(self, self.numbered)[index]


def view_of(bound: Callable[..., Any]) -> View:
    """Return the view of a bound op of `link`.

    In the view of a body, children are bound ops: `view_of(step).sample(logits, ...)`.
    """
    view: View = bound.__self__  # type: ignore[attr-defined]
    return view


Around = Callable[[Op, Callable[..., Any]], Callable[..., Any]]
"""From an op and its bound body to what is called in its place."""


def bind_body(op: Op, value_of: Callable[[Weight], Any], around: Around | None = None) -> Callable[..., Any]:
    """Bind an op and all ops below to their own bodies, without a plan.

    Args:
        op: the root.
        value_of: a weight's value, as the bodies read it.
        around: may put another function in the place of a bound body, to observe its calls.
    """
    view = _empty_view(op)
    for path, value in op.items():
        if isinstance(value, Weight):
            value = value_of(value)
        elif isinstance(value, Op):
            value = bind_body(value, value_of, around)
        _set_field(view, op, path, value)
    bound: Callable[..., Any] = types.MethodType(type(op).__call__, view)
    return bound if around is None else around(op, bound)


AroundSite = Callable[[str, Op, Callable[..., Any]], Callable[..., Any]]
"""From a site, its op and the bound op to what the ops above call in its place."""


def link_observed(plan: Plan, packed: Packed, kind: StepKind, around: AroundSite) -> Callable[..., Any]:
    """Bind the root op for one step kind, with other functions in the places of bound ops, to observe their calls.

    What a kernel runs inside its own call is not seen, nor is the root, which is returned as it is bound.

    Args:
        plan: the kernels chosen for all sites.
        packed: as of `link`.
        kind: of the steps.
        around: called for each op that is bound by itself, those below before those above.

    Raises:
        KernelError: as `link`.
    """
    return _Linker(plan, packed, kind, around).bind(plan.model, plan.choices[kind])


def link(plan: Plan, packed: Packed) -> dict[StepKind, Callable[..., Any]]:
    """Bind the root op for each step kind.

    Args:
        plan: the kernels chosen for all sites.
        packed: every weight in every packing that the plan needs.

    Raises:
        KernelError: a kernel's module cannot be imported, its parameters are wrong, or its `prepare` raised.
    """
    return {kind: _Linker(plan, packed, kind).bind(plan.model, choice) for kind, choice in plan.choices.items()}


class _Linker:
    def __init__(self, plan: Plan, packed: Packed, kind: StepKind, around: AroundSite | None = None) -> None:
        self.plan, self.packed, self.kind, self.around = plan, packed, kind, around
        self.functions: dict[int, Callable[..., Any]] = {}
        self.prepared: dict[int, Any] = {}

    def bind(self, op: Op, choice: Choice, site: str = "") -> Callable[..., Any]:
        kernel = choice.kernel
        if kernel is not None and not choice.binds_children:
            return self.method(kernel, self.view(op, choice, kernel, ""), op, choice)
        view, inlining = _empty_view(op), _empty_view(op)
        for path, value in op.items():
            child_view = None
            if isinstance(value, Weight):
                value = self.packed[id(value), self.plan.packing(op, value, CANONICAL, self.kind, "unserved").label]
            elif isinstance(value, Op):
                child, below = value, f"{site}.{path}" if site else path
                value = self.bind(child, choice.children[path], below)
                child_view = view_of(value) if kernel is not None and kernel.find_inlined(path) else None
                value = value if self.around is None else self.around(below, child, value)
            _set_field(view, op, path, value)
            _set_field(inlining, op, path, value if child_view is None else child_view)
        body = op.variants[choice.variant] if choice.variant else type(op).__call__
        if kernel is None:
            return types.MethodType(body, view)
        inlining.body = types.MethodType(body, view)
        return self.method(kernel, inlining, op, choice)

    def method(self, kernel: Kernel, view: View, op: Op, choice: Choice) -> Callable[..., Any]:
        view.kernel, view.prepared = kernel, self.prepare(op, choice)
        return types.MethodType(self.function(kernel), view)

    def view(self, op: Op, choice: Choice, kernel: Kernel, prefix: str) -> View:
        view = _empty_view(op)
        for path, value in op.items():
            if isinstance(value, Weight):
                packing = kernel.packs.get(prefix + path, CANONICAL)
                stored = self.plan.packing(op, value, packing, self.kind, choice.dequantize, below=bool(prefix))
                value = self.packed[id(value), stored.label]
            elif isinstance(value, Op):
                value = self.view(value, choice, kernel, f"{prefix}{path}.")
            _set_field(view, op, path, value)
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
                    f"Kernel {kernel.name}: prepare raised {in_words(error)}.",
                    remedy=f"pin another provider for {kernel.op!r}",
                ) from error
        return self.prepared[id(choice)]


def _empty_view(op: Op) -> View:
    if op.numbered:
        return NumberedView(op.numbered)
    return LinearView() if isinstance(op, Linear) else View()


def _set_field(view: View, op: Op, path: str, value: Any) -> None:
    name, dot, _ = path.partition(".")
    if path.isdigit():
        name, dot = op.numbered, "."
    if dot:  # one item of a tuple of ops
        value = (*getattr(view, name, ()), value)
    setattr(view, name, value)
