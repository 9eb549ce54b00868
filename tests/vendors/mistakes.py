"""Mistakes that are made on purpose with a vendor's operators: between a kernel and the operator it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.binding import Bench, run_case
from inferplane.conformance.subject import Subject
from inferplane.ops import OPS
from inferplane.plugins import host


def with_(**wrong: Any) -> Callable[..., Any]:
    """The call with other keyword arguments; None leaves one out."""

    def change(real, *args, **kwargs):
        given = {**kwargs, **wrong}
        return real(*args, **{k: v for k, v in given.items() if not (k in wrong and wrong[k] is None)})

    return change


def swapped(i: int, j: int) -> Callable[..., Any]:
    """The call with two positional arguments exchanged."""

    def change(real, *args, **kwargs):
        args = list(args)
        args[i], args[j] = args[j], args[i]
        return real(*args, **kwargs)

    return change


def judged(device: str, dtype: torch.dtype, kernel_name: str, label: str) -> str:
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
