"""Device "dcu" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's call forms.

Plugin module for a process of its own: `INFERPLANE_PLUGINS=only,inferplane_cpu.plugin,tests.vendors.dcu.emulated`.
Variables as in tests/vendors/npu/emulated.py; the architecture is gfx936, or gfx928. The modules that hold the vendor's
functions (`lightop.norm` and so on) are made here and pass calls on. Portable kernels are left out: Triton does not run
on the host; tests/gates interprets and compiles them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
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
from inferplane_dcu import vendor
from inferplane_dcu.backend import DcuBackend
from inferplane_dcu.chips import GFX, features_of
from tests.vendors import schemas
from tests.vendors.calls import note_until_exit
from tests.vendors.dcu import chip, emulate_attention, emulate_basic, emulate_moe
from tests.vendors.emulator import Emulator, lifted

INFERPLANE_API = (1, 0)
RESTATED = schemas.read(Path(__file__).with_name("schemas.txt"))
EMULATOR = Emulator(
    RESTATED,
    {**emulate_basic.IMPLEMENTATIONS, **emulate_attention.IMPLEMENTATIONS, **emulate_moe.IMPLEMENTATIONS},
)
WHAT = f"Hygon's functions as published ({RESTATED.version}) on the host"


def _make_modules() -> None:
    """Modules with the restated functions; hcu_ops are operators and have none."""
    for name in RESTATED.schemas:
        namespace, _, function = name.partition("::")
        if namespace == "hcu_ops":
            continue
        path = namespace.replace("__", ".")
        for parent in (path.partition(".")[0], path):
            sys.modules.setdefault(parent, ModuleType(parent))
        setattr(sys.modules[path], function, getattr(getattr(torch.ops, namespace), function))


_make_modules()
vendor.device = lambda: (GFX[chip.ARCH][0], 80)  # what torch.cuda would say

if os.environ.get("INFERPLANE_EMULATED_CALLS") and not chip.LIFTED:  # calls in float32 are not the backend's
    note_until_exit(EMULATOR, Path(os.environ["INFERPLANE_EMULATED_CALLS"]))


class EmulatedDcu(DcuBackend):
    """The backend, opened without a DCU."""

    torch_device: ClassVar[str] = HOST
    auto_rank: ClassVar[int] = -1

    @classmethod
    def probe(cls) -> Probe:
        return Probe(Presence.AVAILABLE, f"emulated, no DCU: {WHAT}", versions={"forms": RESTATED.version}, devices=1)

    def open(self) -> DeviceState:
        return DeviceState(HOST, GFX[chip.ARCH][0], chip.ARCH, self.features(), self.memory(), emulated=WHAT)

    def features(self, arch: str | None = None) -> Features:
        return Features({**features_of(chip.ARCH), "triton": Feature(False, "Triton's kernels do not run on the host")})

    def kernels(self) -> Sequence[Kernel]:
        ours = [k for k in super().kernels() if not k.provider.startswith("triton")]
        return [lifted(k) for k in ours] if chip.LIFTED else ours

    def memory(self) -> Memory:
        return host_memory()

    def comm(self) -> str:
        return "gloo"

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def timer(self) -> Callable[[], float]:
        raise NotImplementedError("an emulator is not timed")


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[DcuBackend]], None]) -> None:
    register("dcu", EmulatedDcu)
