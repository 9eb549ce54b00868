"""The device under test: what its plugin declares, and, once it is opened, what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from inferplane.binding import Bench
from inferplane.engine.runner.kv_cache import DEFAULT_BLOCK_TOKENS
from inferplane.engine.runner.options import DTYPES
from inferplane.errors import UsageError
from inferplane.kvcache import paged_layout
from inferplane.plugins import DeviceEntry, PluginHost
from inferplane.types import HOST, Backend, DeviceState, Features, Kernel, KVLayout, KVRequest


@dataclass
class Subject:
    """One device, as the suite sees it.

    Args:
        backend: its backend; opened by `open`.
        entry: who serves it, and its probe.
        kernels: every kernel declared for it, by the backend and by other plugins.
        dtypes: activations' dtypes to test, by name.
        state: what `open` found; None before.
    """

    backend: Backend
    entry: DeviceEntry
    kernels: list[Kernel]
    dtypes: dict[str, torch.dtype]
    state: DeviceState | None = field(default=None)

    @classmethod
    def of(cls, host: PluginHost, device: str, dtypes: str) -> Subject:
        """The device that the user named, present or not.

        Args:
            host: knows the plugins.
            device: the user's word.
            dtypes: a comma list of dtype names.

        Raises:
            DeviceError, PluginError: nobody serves it, or who does is quarantined; the message says why.
            UsageError: an unknown dtype.
        """
        names = [name.strip() for name in dtypes.split(",") if name.strip()]
        unknown = [name for name in names if name not in DTYPES]
        if unknown or not names:
            raise UsageError(f"--dtype {dtypes!r} cannot be read.", there_is=", ".join(DTYPES))
        backend = host.backend_for_explain(device)
        entry = next(e for e in host.devices() if e.name == backend.name)
        return cls(backend, entry, host.kernels(backend), {name: DTYPES[name] for name in names})

    @property
    def name(self) -> str:
        """The device's name, also for a family's variant: "toy:b"."""
        return self.backend.name

    @property
    def absent(self) -> str:
        """Why nothing can be run on it, with the remedy; empty when it is available."""
        probe = self.entry.probe
        if probe.available:
            return ""
        return f"{probe.presence.value}: {probe.reason.rstrip('.')}" + (
            f"; to do: {probe.remedy}" if probe.remedy else ""
        )

    @property
    def accelerator(self) -> bool:
        """Whether its tensors live elsewhere than in host memory."""
        return self.backend.torch_device != HOST

    def open(self) -> DeviceState:
        """Open the device, once.

        Raises:
            DeviceError: the probe promised too much.
        """
        if self.state is None:
            self.state = self.backend.open()
        return self.state

    @property
    def features(self) -> Features:
        """What it can do: as found when it was opened, else as assumed of its default architecture."""
        return self.state.features if self.state is not None else self.backend.features()

    def layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """Layouts on offer for one kind of layer: the backend's, or core's own storage when it offers none."""
        offers = list(self.backend.kv_layouts(request, dtype))
        return offers or [paged_layout(DEFAULT_BLOCK_TOKENS, kv_dtype) for kv_dtype in ("auto", "fp8", "int8")]

    def bench(self, dtype: torch.dtype, layout: str | None = None) -> Bench:
        """Where cases run on this device."""
        device = self.backend.torch_device_indexed
        offers = lambda request: self.layouts(request, dtype)  # noqa: E731
        return Bench(self.name, device, dtype, self.features, offers, layout, self.kernels)
