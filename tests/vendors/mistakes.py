"""Mistakes that are made on purpose with a vendor's operators: between a kernel and the operator it calls.

A vendor's mistakes.py lists them as `MISTAKES`, a row each; every/test_mistakes.py makes them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferplane.binding import Bench, run_case
from inferplane.conformance.subject import Subject
from inferplane.ops import OPS
from inferplane.plugins import host
from tests.vendors.emulator import Meddled

Change = Callable[..., Any]
"""`(real, *args, **kwargs)` -> result of the wrong call; the functions below make some."""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        words: what is done wrong.
        where: the module and the name in it through which the call goes.
        what: what is called wrongly: an operator or function of that name's. None: the name itself stands for
            something else.
        change: the wrong call; with `what` None, what the name stands for.
        kernel: the kernel that makes the call. sample: of its op.
        caught: a part of what is said of it; "" where the numbers alone are wrong.
        dtype: of the plan, where it is not the vendor's usual one.
    """

    words: str
    where: tuple[Any, str]
    what: str | None
    change: Any
    kernel: str
    sample: str
    caught: str
    dtype: torch.dtype | None = None

    def make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it from now on."""
        meant = getattr(*self.where)
        monkeypatch.setattr(*self.where, self.change if self.what is None else Meddled(meant, {self.what: self.change}))


def with_(**wrong: Any) -> Change:
    """The call with other keyword arguments; None leaves one out."""

    def change(real, *args, **kwargs):
        given = {**kwargs, **wrong}
        return real(*args, **{k: v for k, v in given.items() if not (k in wrong and wrong[k] is None)})

    return change


def at(i: int, value: Callable[[Any], Any]) -> Change:
    """The call with a positional argument changed."""
    return lambda real, *args, **kwargs: real(*args[:i], value(args[i]), *args[i + 1 :], **kwargs)


def by(**changes: Callable[[Any], Any]) -> Change:
    """The call with keyword arguments changed."""
    return lambda real, *args, **given: real(*args, **{**given, **{k: f(given.get(k)) for k, f in changes.items()}})


def swap(i: int, j: int) -> Change:
    """The call with two positional arguments exchanged."""

    def change(real, *args, **kwargs):
        args = list(args)
        args[i], args[j] = args[j], args[i]
        return real(*args, **kwargs)

    return change


def find_fault(device: str, dtype: torch.dtype, kernel_name: str, label: str) -> str:
    """What is said of a kernel on a sample, padded and not; empty when nothing is wrong."""
    subject = Subject.of(host(), device, str(dtype).removeprefix("torch."))
    subject.open()
    (kernel,) = [k for k in subject.kernels if k.name == kernel_name]
    (sample,) = [s for s in OPS[kernel.op].samples() if s.label == label]
    bench: Bench = subject.bench(dtype)
    for padded in (False, True):
        outcome = run_case(kernel, sample, bench, seed=5, padded=padded)
        assert outcome.served, outcome.detail
        if not outcome.passed:
            return outcome.detail or f"error {outcome.error}"
    return ""
