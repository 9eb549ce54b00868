"""Device "npu" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's schemas.

Plugin module for a process of its own: `INFERPLANE_PLUGINS=only,inferplane_cpu.plugin,tests.vendors.npu.emulated`.
`INFERPLANE_EMULATED_ARCH` names the series; `INFERPLANE_EMULATED_FLOAT32=1` lifts the one check of dtypes, and lets
kernels that are declared for 16-bit floats take float32; `INFERPLANE_EMULATED_CALLS` names a folder into which the
calls of the vendor's operators are written when the process ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from inferplane.plugin import (
    HOST,
    DeviceState,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Memory,
    Presence,
    Probe,
    hookimpl,
    host_memory,
)
from inferplane_npu.backend import NpuBackend
from inferplane_npu.chips import features_of
from tests.vendors import schemas
from tests.vendors.calls import note_until_exit
from tests.vendors.emulator import Emulator, lifted
from tests.vendors.npu import chip, emulate_attention, emulate_basic, emulate_cache, emulate_moe, emulate_quant

INFERPLANE_API = (1, 0)
RESTATED = schemas.read(Path(__file__).with_name("schemas.txt"))
EMULATOR = Emulator(
    RESTATED,
    {
        **emulate_basic.IMPLEMENTATIONS,
        **emulate_attention.IMPLEMENTATIONS,
        **emulate_cache.IMPLEMENTATIONS,
        **emulate_moe.IMPLEMENTATIONS,
        **emulate_quant.IMPLEMENTATIONS,
    },
)
WHAT = f"{RESTATED.source.partition(' ')[0]} {RESTATED.version}'s operators on the host"


if os.environ.get("INFERPLANE_EMULATED_CALLS") and not chip.LIFTED:  # calls in float32 are not the backend's
    note_until_exit(EMULATOR, Path(os.environ["INFERPLANE_EMULATED_CALLS"]))


class EmulatedNpu(NpuBackend):
    """The backend, opened without an NPU."""

    torch_device: ClassVar[str] = HOST
    auto_rank: ClassVar[int] = -1

    @classmethod
    def probe(cls) -> Probe:
        return Probe(
            Presence.AVAILABLE, f"emulated, no NPU: {WHAT}", versions={"torch-npu schemas": RESTATED.version}, devices=1
        )

    def open(self) -> DeviceState:
        return DeviceState(HOST, "Ascend", chip.ARCH, self.features(), self.memory(), emulated=WHAT)

    def features(self, arch: str | None = None) -> Features:
        return features_of(chip.ARCH)

    def kernels(self) -> Sequence[Kernel]:
        return [lifted(k) for k in super().kernels()] if chip.LIFTED else super().kernels()

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        return super().kv_layouts(request, dtype)

    def memory(self) -> Memory:
        return host_memory()

    def comm(self) -> str:
        return "gloo"

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def timer(self) -> Callable[[], float]:
        raise NotImplementedError("an emulator is not timed")


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[NpuBackend]], None]) -> None:
    register("npu", EmulatedNpu)
