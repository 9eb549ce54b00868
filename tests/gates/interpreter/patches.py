"""Triton's interpreter puts its own functions into `triton.language` before each launch, and again before each call of
one compiled function by another, of which a launch has thousands. This does it once a launch, and looks only once for
what there is to replace. It also computes each addition, subtraction and product of whole numbers twice, to compare the
two, and then, unless its debugging is on, drops what it has found: this leaves that out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from inferplane.kernels.triton import rowwise


def quicken() -> None:
    """Once a process, before a kernel runs."""
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[Any] = set()

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtin(package: Any, *builder_and_scope: Any) -> None:
        for name, member in builtins_of(package):
            interpreter._patch_attr(package, name, member, *builder_and_scope)

    @functools.cache
    def seen_by(function: Callable[..., Any]) -> frozenset[Any]:
        values = function.__globals__.values()
        return frozenset(v for v in values if inspect.ismodule(v) and v in (tl, tl.core))

    def patch_once(function: Callable[..., Any]) -> Any:
        if seen_by(function) <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen_by(function))
        return patch_lang(function)

    def run(self: Any, *args: Any, **named: Any) -> None:
        patched.clear()
        launch(self, *args, **named)

    of_element = functools.cache(interpreter._get_np_dtype)

    def numpy_type(of: Any) -> np.dtype[Any]:
        element = of.element_ty if isinstance(of, tl.block_type) else of
        return addresses if isinstance(element, tl.pointer_type) else of_element(element)

    reduce = interpreter.ReduceOps.apply_impl

    def reduce_at_once(self: Any, tensors: Any) -> Any:
        """As its own maximum, which drops NaN; others are computed entry by entry."""
        if self.combine_fn is rowwise.larger_or_nan:
            return self.min_max(tensors[0], val_reduce_op=np.max)
        return reduce(self, tensors)

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.ReduceOps.apply_impl = reduce_at_once
    addresses = np.dtype(np.uint64)
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run
    interpreter._get_np_dtype = numpy_type
