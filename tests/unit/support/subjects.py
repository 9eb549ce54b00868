"""Devices made up for the tests of the conformance suite: torch on the host, with whatever kernels and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.conformance.subject import Subject
from inferplane.plugin import (
    HOST,
    Backend,
    DeviceState,
    Features,
    Kernel,
    KVLayout,
    Presence,
    Probe,
    paged_layout,
)
from inferplane.plugins import DeviceEntry

PROBE = Probe(Presence.AVAILABLE, "made in this test", devices=1)


def subject(
    kernels: Sequence[Kernel] = (), layouts: Sequence[KVLayout] = (paged_layout(16),), dtype: str = "float32"
) -> Subject:
    """A device "made" with these kernels and layouts, opened."""

    class Made(Backend):
        name, torch_device = "made", HOST

        @classmethod
        def probe(cls) -> Probe:
            return PROBE

        def open(self) -> DeviceState:
            return DeviceState(HOST, "made", "made1", Features(["bf16"]), self.memory())

        def kernels(self) -> Sequence[Kernel]:
            return kernels

        def kv_layouts(self, request: Any, dtype: torch.dtype) -> Sequence[KVLayout]:
            return layouts

    entry = DeviceEntry("made", "made", "1.0", None, PROBE, HOST, 0, False)
    found = Subject(Made(), entry, list(kernels), {dtype: getattr(torch, dtype)})
    found.open()
    return found
