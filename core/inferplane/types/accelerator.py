"""Common code of accelerator backends: torch has a module per kind of accelerator, and these modules are alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from inferplane.errors import DeviceError
from inferplane.types.backend import Backend
from inferplane.types.device import Memory


class Accelerator(Backend):
    """A backend of devices for which torch has a module like those of its own accelerators, with these members:

    `is_available()`, `device_count()`, `set_device(index)`, `synchronize(index)` and `mem_get_info(index)`, which
    returns free and total bytes.
    """

    auto_rank: ClassVar[int] = 100

    def runtime(self) -> Any:
        """(optional) That module; the first call may import the vendor's package. Default: torch's attribute with the
        device's name."""
        return getattr(torch, self.torch_device)

    def memory(self) -> Memory:
        """Memory of this device in bytes; the use by other processes counts."""
        free, total = self.runtime().mem_get_info(self.index)
        return Memory(total, free)

    def synchronize(self) -> None:
        """Wait for all work launched on this device."""
        self.runtime().synchronize(self.index)

    # -- for `open()`

    def require_free_place(self, rivals: Sequence[str]) -> None:
        """Check that the slot for devices outside of torch is free: a process has one (PrivateUse1).

        Args:
            rivals: modules that occupy it when they are imported.

        Raises:
            DeviceError: another package occupies it.
        """
        owner = torch._C._get_privateuse1_backend_name()
        imported = [module for module in rivals if module in sys.modules]
        if imported or owner not in ("privateuseone", self.torch_device):
            raise DeviceError(
                f"Device {self.name!r} cannot be used: torch has one slot for outside devices (PrivateUse1), and "
                f"{imported[0] if imported else owner!r} occupies it in this process.",
                remedy="start another process, with TORCH_DEVICE_BACKEND_AUTOLOAD=0 if the other package loads itself",
            )

    @contextmanager
    def opening(self, usable: str, visible: Sequence[str], look: str, fit: str = "", one: str = "") -> Iterator[Any]:
        """Context of the body of `open()`: yields the runtime, and turns every failure into a DeviceError.

        Args:
            usable: the name of what the runtime counts: "GPUs that Acme can use".
            visible: environment variables that select devices.
            look: how to diagnose a failure: "see the output of `acme-smi`".
            fit: which versions must match; follows `look` if the runtime itself fails.
            one: the name of one device; default: torch's name.

        Raises:
            DeviceError: the probe did not find the device available, the runtime fails, or there is no such index.
        """
        probe = self.probe()
        if not probe.available:
            raise DeviceError(f"Device {self.name!r} cannot be used: {probe.reason}.", remedy=probe.remedy)
        try:
            runtime = self.runtime()
            count = runtime.device_count() if runtime.is_available() else 0
            if self.index >= count:
                setting = ", ".join(f"{variable}={os.environ.get(variable, 'not set')}" for variable in visible)
                raise DeviceError(
                    f"{f'{one} {self.index}' if one else self.torch_device_indexed} was requested.",
                    there_is=f"{count} {usable}, {setting}",
                    remedy=f"choose an index below {count}" if count else look,
                )
            yield runtime
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(
                f"Device {self.name!r} cannot be used: {type(error).__name__}: {' '.join(str(error).split())}.",
                there_is=probe.reason,
                remedy=f"{look}; {fit}" if fit else look,
            ) from error

    def select(self) -> None:
        """Make it torch's current device and wait for a tiny allocation on it, so that a broken device fails now, not
        while weights are loaded."""
        self.runtime().set_device(self.index)
        self.touch()
        self.synchronize()

    def touch(self) -> None:
        """Allocate and write one element."""
        torch.zeros(1, device=self.torch_device_indexed).add_(1)
