"""The device under test: the declarations of its plugin and, after opening, its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from inferplane.binding import Bench
from inferplane.engine.runner.kv_cache import DEFAULT_BLOCK_TOKENS
from inferplane.engine.runner.options import DTYPES
from inferplane.errors import UsageError
from inferplane.kvcache import list_kv_dtypes, paged_layout
from inferplane.plugins import DeviceEntry, PluginHost
from inferplane.types import HOST, Backend, DeviceState, Features, Kernel, KVLayout, KVRequest


@dataclass
class Subject:
    """One device under test.

    Args:
        backend: its backend; `open` opens it.
        entry: the distribution that serves it, and its probe.
        kernels: all kernels declared for it, by the backend and by other plugins.
        dtypes: activation dtypes to test, by name.
        state: the result of `open`; None before.
    """

    backend: Backend
    entry: DeviceEntry
    kernels: list[Kernel]
    dtypes: dict[str, torch.dtype]
    state: DeviceState | None = None

    @classmethod
    def of(cls, host: PluginHost, device: str, dtypes: str) -> Subject:
        """The device that the user named, whether or not it is available.

        Args:
            host: the plugin host.
            device: the value of `--device`.
            dtypes: dtype names, separated by commas.

        Raises:
            DeviceError, PluginError: no plugin serves it, or its plugin is quarantined; the message has the reason.
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
        """The device's name; for a variant of a family, such as "toy:b"."""
        return self.backend.name

    @property
    def absent(self) -> str:
        """Why the device is not available, with the remedy; empty if it is available."""
        probe = self.entry.probe
        if probe.available:
            return ""
        return f"{probe.presence.value}: {probe.reason.rstrip('.')}" + (
            f"; to do: {probe.remedy}" if probe.remedy else ""
        )

    @property
    def accelerator(self) -> bool:
        """True if its tensors are not in host memory."""
        return self.backend.torch_device != HOST

    def open(self) -> DeviceState:
        """Open the device, once.

        Raises:
            DeviceError: the device cannot be opened, although its probe found it available.
        """
        if self.state is None:
            self.state = self.backend.open()
        return self.state

    @property
    def features(self) -> Features:
        """Its features: detected if it is open, else those assumed for its default architecture."""
        return self.state.features if self.state is not None else self.backend.features()

    def layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """Layouts available for a cache request: the backend's, or core's own if the backend has none."""
        available = list(self.backend.kv_layouts(request, dtype))
        return available or [paged_layout(DEFAULT_BLOCK_TOKENS, kv_dtype) for kv_dtype in list_kv_dtypes(request)]

    def bench(self, dtype: torch.dtype, layout: str | None = None) -> Bench:
        """The settings with which cases run on this device."""
        device = self.backend.torch_device_indexed
        return Bench(self.name, device, dtype, self.features, partial(self.layouts, dtype=dtype), layout, self.kernels)
