"""Device "gcu" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's schemas.

Plugin module for a process of its own: `INFERPLANE_PLUGINS=only,inferplane_cpu.plugin,tests.vendors.gcu.emulated`.
Variables as in tests/vendors/npu/emulated.py. `flash_attn.vllm_flash_attn` is a module that passes calls on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch

from inferplane.plugin import HOST, DeviceState, Features, Kernel, Memory, Presence, Probe, hookimpl, host_memory
from inferplane_gcu.backend import S60_MAJOR, GcuBackend, features_of
from tests.vendors import schemas
from tests.vendors.calls import note_until_exit
from tests.vendors.emulator import Emulator, lifted
from tests.vendors.gcu import chip, emulate_attention, emulate_basic, emulate_moe

INFERPLANE_API = (1, 0)
RESTATED = schemas.read(Path(__file__).with_name("schemas.txt"))
EMULATOR = Emulator(
    RESTATED,
    {**emulate_basic.IMPLEMENTATIONS, **emulate_attention.IMPLEMENTATIONS, **emulate_moe.IMPLEMENTATIONS},
)
WHAT = f"vllm-gcu {RESTATED.version}'s published operators on the host"

_FLASH = ModuleType("flash_attn.vllm_flash_attn")
_FLASH.flash_attn_varlen_func = torch.ops.flash_attn__vllm_flash_attn.flash_attn_varlen_func
sys.modules.setdefault("flash_attn", ModuleType("flash_attn"))
sys.modules["flash_attn.vllm_flash_attn"] = _FLASH

if os.environ.get("INFERPLANE_EMULATED_CALLS") and not chip.LIFTED:  # calls in float32 are not the backend's
    note_until_exit(EMULATOR, Path(os.environ["INFERPLANE_EMULATED_CALLS"]))


class EmulatedGcu(GcuBackend):
    """The backend, opened without a GCU."""

    torch_device: ClassVar[str] = HOST
    auto_rank: ClassVar[int] = -1

    @classmethod
    def probe(cls) -> Probe:
        return Probe(
            Presence.AVAILABLE, f"emulated, no GCU: {WHAT}", versions={"vllm-gcu": RESTATED.version}, devices=1
        )

    def open(self) -> DeviceState:
        return DeviceState(HOST, "Enflame S60", "s60", self.features(), self.memory(), emulated=WHAT)

    def features(self, arch: str | None = None) -> Features:
        return features_of(S60_MAJOR)

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
def inferplane_register_backends(register: Callable[[str, type[GcuBackend]], None]) -> None:
    register("gcu", EmulatedGcu)
