"""Common code of accelerator backends: torch has a module per kind of accelerator, and these modules are alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from inferplane.errors import DeviceError
from inferplane.renamed import old_keywords, warn_of_old_name
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

    def start_read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copy tensors `[...]` to pinned memory without waiting, and record an event behind the copies (`Event` of the
        runtime, with `record()` and `synchronize()`).
        """
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        copied = self.runtime().Event()
        copied.record()

        def finish() -> list[torch.Tensor]:
            copied.synchronize()
            return copies

        return finish

    # -- for `open()`

    def require_free_slot(self, other_modules: Sequence[str]) -> None:
        """Check that the slot for devices outside of torch is free: a process has one (PrivateUse1).

        Args:
            other_modules: modules that occupy it when they are imported.

        Raises:
            DeviceError: another package occupies it.
        """
        owner = torch._C._get_privateuse1_backend_name()
        imported = [module for module in other_modules if module in sys.modules]
        if imported or owner not in ("privateuseone", self.torch_device):
            raise DeviceError(
                f"Device {self.name!r} cannot be used: torch has one slot for outside devices (PrivateUse1), and "
                f"{imported[0] if imported else owner!r} occupies it in this process.",
                remedy="start another process, with TORCH_DEVICE_BACKEND_AUTOLOAD=0 if the other package loads itself",
            )

    def require_free_place(self, rivals: Sequence[str]) -> None:
        """The name of `require_free_slot` until 0.2."""
        warn_of_old_name("Accelerator.require_free_place", "require_free_slot")
        self.require_free_slot(rivals)

    @old_keywords(
        usable="counted_devices",
        visible="visibility_variables",
        look="diagnosis",
        fit="version_hint",
        one="device_label",
    )
    @contextmanager
    def opening(
        self,
        counted_devices: str,
        visibility_variables: Sequence[str],
        diagnosis: str,
        version_hint: str = "",
        device_label: str = "",
    ) -> Iterator[Any]:
        """Context of the body of `open()`: yields the runtime, and turns every failure into a DeviceError.

        Args:
            counted_devices: the devices that the runtime counts, in the plural: "GPUs that Acme can use".
            visibility_variables: environment variables that select devices.
            diagnosis: how to diagnose a failure: "see the output of `acme-smi`".
            version_hint: which versions must match; follows `diagnosis` if the runtime itself fails.
            device_label: the name of one device; default: torch's name.

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
                setting = ", ".join(
                    f"{variable}={os.environ.get(variable, 'not set')}" for variable in visibility_variables
                )
                raise DeviceError(
                    f"{f'{device_label} {self.index}' if device_label else self.torch_device_indexed} was requested.",
                    there_is=f"{count} {counted_devices}, {setting}",
                    remedy=f"choose an index below {count}" if count else diagnosis,
                )
            yield runtime
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(
                f"Device {self.name!r} cannot be used: {type(error).__name__}: {' '.join(str(error).split())}.",
                there_is=probe.reason,
                remedy=f"{diagnosis}; {version_hint}" if version_hint else diagnosis,
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
