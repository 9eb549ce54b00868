"""Kernels of caches with static scales, with other scales than those with which such caches are built."""

from __future__ import annotations

import pytest

from inferplane.binding import run_case
from inferplane.conformance.subject import Subject
from inferplane.kvcache import STATIC_DTYPES
from inferplane.ops import OPS
from inferplane.plugins import host
from tests.vendors import profile

VENDOR = profile.current()
SCALES = {"fp8": 0.37, "int8": 1 / 27}
"""Neither powers of two nor 1, and wide enough for the samples' entries."""


def list_kernels():
    subject = Subject.of(host(), VENDOR.device, str(VENDOR.dtype).removeprefix("torch."))
    return [k for k in subject.kernels if any("static_" in name for name in k.when.kv_layouts)]


@pytest.mark.parametrize("kernel", list_kernels(), ids=lambda kernel: kernel.name)
def test_numbers_are_right(kernel, monkeypatch):
    for name, scale in SCALES.items():
        monkeypatch.setitem(STATIC_DTYPES, name, STATIC_DTYPES[name]._replace(unset=scale))
    subject = Subject.of(host(), VENDOR.device, str(VENDOR.dtype).removeprefix("torch."))
    subject.open()
    bench = subject.bench(VENDOR.dtype)
    outcomes = [run_case(kernel, sample, bench, seed=3) for sample in OPS[kernel.op].samples()]
    served = [x for x in outcomes if x.served]
    assert served and not [x.detail or x.error for x in served if not x.passed]
