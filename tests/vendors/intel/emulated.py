"""Device "xpu:intel" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's schemas.

Plugin module for a process of its own: `INFERPLANE_PLUGINS=only,inferplane_cpu.plugin,tests.vendors.intel.emulated`.
Variables as in tests/vendors/npu/emulated.py.
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
    Feature,
    Features,
    Kernel,
    Memory,
    Presence,
    Probe,
    hookimpl,
    host_memory,
)
from inferplane_xpu.intel import chips
from inferplane_xpu.intel.backend import IntelBackend
from tests.vendors import schemas
from tests.vendors.calls import note_until_exit
from tests.vendors.emulator import Emulator, lifted
from tests.vendors.intel import chip, emulate_attention, emulate_basic, emulate_legacy, emulate_moe, emulate_quant

INFERPLANE_API = (1, 0)
ARCH = "bmg"
RESTATED = schemas.read(Path(__file__).with_name("schemas.txt"))
EMULATOR = Emulator(
    RESTATED,
    {
        **emulate_basic.IMPLEMENTATIONS,
        **emulate_attention.IMPLEMENTATIONS,
        **emulate_moe.IMPLEMENTATIONS,
        **emulate_quant.IMPLEMENTATIONS,
        **emulate_legacy.IMPLEMENTATIONS,
    },
)
WHAT = f"vllm-xpu-kernels {RESTATED.version}'s operators on the host"

emulate_legacy.install(RESTATED.schemas)

if os.environ.get("INFERPLANE_EMULATED_CALLS") and not chip.LIFTED:  # calls in float32 are not the backend's
    note_until_exit(EMULATOR, Path(os.environ["INFERPLANE_EMULATED_CALLS"]))


class EmulatedIntel(IntelBackend):
    """The backend, opened without a GPU."""

    torch_device: ClassVar[str] = HOST
    auto_rank: ClassVar[int] = -1

    @classmethod
    def probe(cls) -> Probe:
        versions = {"torch": torch.__version__, "vllm-xpu-kernels": RESTATED.version}
        return Probe(Presence.AVAILABLE, f"emulated, no Intel GPU: {WHAT}", versions=versions, devices=1)

    def open(self) -> DeviceState:
        name = "Intel(R) Arc(TM) B580 Graphics"
        return DeviceState(HOST, name, ARCH, self.features(), self.memory(), emulated=WHAT)

    def features(self, arch: str | None = None) -> Features:
        return Features({**chips.assumed(ARCH), "ipex": Feature(True, "emulated")})

    def kernels(self) -> Sequence[Kernel]:
        return [lifted(k) for k in super().kernels()] if chip.LIFTED else super().kernels()

    def memory(self) -> Memory:
        return host_memory()

    def comm(self) -> str:
        return "gloo"

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def timer(self) -> Callable[[], float]:
        raise NotImplementedError("an emulator is not timed")


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[IntelBackend]], None]) -> None:
    register("xpu:intel", EmulatedIntel)
