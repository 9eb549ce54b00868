"""What backends of accelerators share: torch has a module for each of its kinds, and these look alike."""

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
    """A backend of devices that torch serves by a module like those of its own accelerators, with these members:

    `is_available()`, `device_count()`, `set_device(index)`, `synchronize(index)` and `mem_get_info(index)`, which gives
    the bytes that are free and those there are.
    """

    auto_rank: ClassVar[int] = 100

    def runtime(self) -> Any:
        """(optional) That module; the first call may import the vendor's package. Default: torch's attribute of the
        device's name."""
        return getattr(torch, self.torch_device)

    def memory(self) -> Memory:
        """Bytes of this device, other processes' use counted."""
        free, total = self.runtime().mem_get_info(self.index)
        return Memory(total, free)

    def synchronize(self) -> None:
        """Wait for everything launched on this device."""
        self.runtime().synchronize(self.index)

    # -- for `open()`

    def require_free_place(self, rivals: Sequence[str]) -> None:
        """For a device outside of torch: torch has one place for these in a process (PrivateUse1).

        Args:
            rivals: modules that take it as soon as they are imported.

        Raises:
            DeviceError: another package has taken it.
        """
        owner = torch._C._get_privateuse1_backend_name()
        imported = [module for module in rivals if module in sys.modules]
        if imported or owner not in ("privateuseone", self.torch_device):
            raise DeviceError(
                f"Device {self.name!r} cannot be used: torch has one place for outside devices (PrivateUse1), and "
                f"{imported[0] if imported else owner!r} has taken it in this process.",
                remedy="start another process, with TORCH_DEVICE_BACKEND_AUTOLOAD=0 if the other package loads itself",
            )

    @contextmanager
    def opening(self, usable: str, visible: Sequence[str], look: str, fit: str = "", one: str = "") -> Iterator[Any]:
        """Around what `open()` asks of the runtime, which is what it gives; every failure becomes a DeviceError.

        Args:
            usable: what the runtime counts: "GPUs that Acme can use".
            visible: variables of the environment that choose among devices.
            look: where to look when something fails: "see what `acme-smi` says".
            fit: what must fit together, said after `look` when the runtime itself fails.
            one: what to call one device; without it, torch's name for it.

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
                    f"{f'{one} {self.index}' if one else self.torch_device_indexed} was asked for.",
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
        """Make it torch's current device and wait for one tiny allocation on it: what fails now does not fail in the
        middle of loading."""
        self.runtime().set_device(self.index)
        self.touch()
        self.synchronize()

    def touch(self) -> None:
        """One element, allocated and written."""
        torch.zeros(1, device=self.torch_device_indexed).add_(1)
