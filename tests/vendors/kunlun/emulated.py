"""Device "xpu:kunlun" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's calls.

Plugin module for a process of its own: `INFERPLANE_PLUGINS=only,inferplane_cpu.plugin,tests.vendors.kunlun.emulated`.
Variables as in tests/vendors/npu/emulated.py. `kunlun_ops` is a module that passes calls on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from inferplane.plugin import HOST, Batch, DeviceState, Features, Kernel, Memory, Presence, Probe, hookimpl, host_memory
from inferplane_xpu.kunlun.backend import KunlunBackend
from inferplane_xpu.kunlun.kernels import quant
from tests.vendors import schemas
from tests.vendors.calls import note_until_exit
from tests.vendors.emulator import Emulator, lifted
from tests.vendors.kunlun import chip, emulate_attention, emulate_basic, emulate_moe, emulate_quant

INFERPLANE_API = (1, 0)
RESTATED = schemas.read(Path(__file__).with_name("schemas.txt"))
EMULATOR = Emulator(
    RESTATED,
    {
        **emulate_basic.IMPLEMENTATIONS,
        **emulate_attention.IMPLEMENTATIONS,
        **emulate_moe.IMPLEMENTATIONS,
        **emulate_quant.IMPLEMENTATIONS,
    },
)
WHAT = f"vLLM-Kunlun {RESTATED.version}'s calls of kunlun_ops and xspeedgate_ops on the host"

_LIBRARY = ModuleType("kunlun_ops")
for _name in RESTATED.schemas:
    _space, _, _function = _name.partition("::")
    if _space == "kunlun_ops":
        setattr(_LIBRARY, _function, getattr(torch.ops.kunlun_ops, _function))
sys.modules["kunlun_ops"] = _LIBRARY

if os.environ.get("INFERPLANE_EMULATED_CALLS") and not chip.LIFTED:  # calls in float32 are not the backend's
    note_until_exit(EMULATOR, Path(os.environ["INFERPLANE_EMULATED_CALLS"]))


class EmulatedKunlun(KunlunBackend):
    """The backend, opened without a card."""

    torch_device: ClassVar[str] = HOST
    auto_rank: ClassVar[int] = -1

    @classmethod
    def probe(cls) -> Probe:
        versions = {"vllm-kunlun": RESTATED.version}
        return Probe(Presence.AVAILABLE, f"emulated, no Kunlun card: {WHAT}", versions=versions, devices=1)

    def open(self) -> DeviceState:
        return DeviceState(HOST, "Kunlun P800", "p800", self.features(), self.memory(), emulated=WHAT)

    def features(self, arch: str | None = None) -> Features:
        return super().features()

    def kernels(self) -> Sequence[Kernel]:
        """With the check of dtypes lifted, all but those of int4: their words are float16's alone."""
        if not chip.LIFTED:
            return super().kernels()
        return [k if k.packs.get("weight") is quant.INT4_WORDS else lifted(k) for k in super().kernels()]

    def memory(self) -> Memory:
        return host_memory()

    def comm(self) -> str:
        return "gloo"

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> None:
        """Nothing is recorded."""

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def timer(self) -> Callable[[], float]:
        raise NotImplementedError("an emulator is not timed")


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[KunlunBackend]], None]) -> None:
    register("xpu:kunlun", EmulatedKunlun)
