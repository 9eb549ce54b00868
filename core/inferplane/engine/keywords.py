"""Keyword arguments that nobody takes: answered with the one that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from inferplane.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def known_keywords(call: Callable[P, R]) -> Callable[P, R]:
    """A function, or a method, that refuses unknown keyword arguments with a UsageError in place of a TypeError."""
    known = {
        name: p for name, p in inspect.signature(call).parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD
    }
    taken = [name for name, p in known.items() if name != "self" and p.kind is not inspect.Parameter.POSITIONAL_ONLY]
    said = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: P.args, **more: P.kwargs) -> R:
        for name in more:
            if name not in known:
                raise _unknown(said, name, more[name], taken)
        return call(*args, **more)

    return checked


def _unknown(said: str, name: str, value: Any, known: list[str]) -> UsageError:
    from inferplane.engine.request.params import SamplingParams

    close = get_close_matches(name, known, n=1)
    if said != SamplingParams.__name__ and name in {f.name for f in fields(SamplingParams)}:
        call = "" if "params" in known else " of generate, stream or chat"
        remedy = f"pass params{call}: params=SamplingParams({name}={value!r})"
    else:
        remedy = f"perhaps {close[0]} was meant" if close else ""
    return UsageError(f"{said} takes no {name}.", there_is=", ".join(known), remedy=remedy)
