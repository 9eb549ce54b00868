"""What every backend on an emulator has in common, and how its operators come into the process.

`tests.vendors.NAME.emulated` is the plugin module for a process of its own:
`INFERPLANE_PLUGINS=only,inferplane_cpu.plugin,tests.vendors.NAME.emulated`. `INFERPLANE_EMULATED_ARCH` names the chip
where a vendor's emulator knows several; `INFERPLANE_EMULATED_FLOAT32=1` lifts the one check of dtypes, and lets kernels
that are declared for 16-bit floats take float32; `INFERPLANE_EMULATED_CALLS` names a folder into which the calls of the
vendor's operators are written when the process ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch

from inferplane.plugin import HOST, Backend, DeviceState, Kernel, Memory, Presence, Probe, host_memory
from tests.vendors import schemas
from tests.vendors.calls import note_until_exit
from tests.vendors.checks import LIFTED
from tests.vendors.emulator import Emulator, allow_float32


def emulator(folder: Path, *parts: ModuleType) -> Emulator:
    """Put the operators of a vendor's schemas.txt into this process, and note their calls where that is requested.

    Args:
        folder: the vendor's.
        parts: modules with `IMPLEMENTATIONS`.
    """
    implementations = {name: function for part in parts for name, function in part.IMPLEMENTATIONS.items()}
    made = Emulator(schemas.read(folder / "schemas.txt"), implementations)
    noted = os.environ.get("INFERPLANE_EMULATED_CALLS")
    if noted and not LIFTED:  # calls in float32 are not the backend's
        note_until_exit(made, Path(noted))
    return made


def make_modules(restated: schemas.Restated, *packages: str) -> None:
    """Make the modules of Python packages whose functions are restated, in namespaces `a__b`; they pass calls on."""
    made = {package: ModuleType(package) for package in packages}
    for name in restated.schemas:
        namespace, _, function = name.partition("::")
        path = namespace.replace("__", ".")
        if path.partition(".")[0] in packages:
            module = made.setdefault(path, ModuleType(path))
            setattr(module, function, getattr(getattr(torch.ops, namespace), function))
    sys.modules.update(made)


class Emulated(Backend):
    """A backend that is opened without its device; mixed in before the vendor's own, which also says `features`.

    Everything else, declarations, kernels and layouts, is the backend's own.
    """

    torch_device: ClassVar[str] = HOST
    auto_rank: ClassVar[int] = -1
    identity: ClassVar[tuple[str, str]]
    """Name and architecture of the device."""
    operators: ClassVar[str]
    """What is emulated, in words."""
    versions: ClassVar[dict[str, str]]
    """Of what the operators were restated from."""

    @classmethod
    def probe(cls) -> Probe:
        reason = f"emulated, no {cls.identity[0]}: {cls.operators}"
        return Probe(Presence.AVAILABLE, reason, versions=cls.versions, devices=1)

    def open(self) -> DeviceState:
        return DeviceState(HOST, *self.identity, self.features(), self.memory(), emulated=self.operators)

    def kernels(self) -> Sequence[Kernel]:
        return [self.lift(kernel) for kernel in super().kernels()] if LIFTED else super().kernels()

    def lift(self, kernel: Kernel) -> Kernel:
        """The kernel as it is declared where the check of dtypes is lifted."""
        return allow_float32(kernel)

    def memory(self) -> Memory:
        return host_memory()

    def comm(self) -> str:
        return "gloo"

    def synchronize(self) -> None:
        """Nothing is asynchronous."""

    def timer(self) -> Callable[[], float]:
        raise NotImplementedError("an emulator is not timed")
