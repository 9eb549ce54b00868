"""Kunlun cards (P800): torch's "cuda" device under torch_xmlir, which runs CUDA calls on the card.

The vendor ships a torch 2.5 of its own that was built for CUDA. torch_xmlir is told by its spec alone; `open()` imports
it, after which "cuda" means the card. `torch.xpu` there is Intel's stub and finds nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from glob import glob
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import ClassVar

import torch

from inferplane.plugin import (
    Backend,
    DeviceError,
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Memory,
    Presence,
    Probe,
)
from inferplane_xpu.kunlun.kernels import kernels
from inferplane_xpu.kunlun.kvcache import layouts

MODULE = "torch_xmlir"
VISIBLE = ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
DEVICE_NODES = "/dev/xpu[0-9]*"
TOOL = "xpu-smi"

INSTALL = (
    "start from one of Kunlun's images, or install its torch 2.5 (xpytorch), torch_xmlir, kunlun_ops and "
    "xspeedgate_ops, which are on no package index, as the installation page of baidu/vLLM-Kunlun says"
)
PASS_NODES = "load Kunlun's driver; in a container, pass /dev/xpu0 (and so on) and /dev/xpuctrl"

_SUPPORTED = "the vendor's vLLM plugin lists float32, float16, bfloat16 and int8 (platforms/kunlun.py)"
P800: dict[str, Feature] = {
    "fp16": Feature(True, _SUPPORTED),
    "bf16": Feature(True, _SUPPORTED),
    "int8-dot": Feature(True, _SUPPORTED),
    "fp8": Feature(False, _SUPPORTED),
}
"""What a P800 can do."""


class KunlunBackend(Backend):
    """One Kunlun card."""

    name = "xpu:kunlun"
    torch_device = "cuda"
    auto_rank: ClassVar[int] = 100
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        "p800": tuple(name for name, feature in P800.items() if feature.present)
    }

    @classmethod
    def probe(cls) -> Probe:
        """From torch_xmlir's spec, torch's build and device nodes; torch_xmlir is not imported."""
        versions = {"torch": str(torch.__version__)}
        nodes = len(glob(DEVICE_NODES))
        if not _installed(MODULE):
            seen = "; a Kunlun card is there" if nodes else ", and no Kunlun card is visible"
            return Probe(Presence.ABSENT, f"{MODULE} is not installed{seen}", INSTALL, versions)
        versions[MODULE] = _version(MODULE) or "(version unknown)"
        package = f"{MODULE} {versions[MODULE]}"
        if torch.version.cuda is None:
            reason = f"{package} is installed, but torch {torch.__version__} is not the vendor's: it lacks CUDA"
            return Probe(Presence.BROKEN, reason, INSTALL, versions)
        if not nodes:
            reason = f"{package} is here, but no Kunlun card is: no {DEVICE_NODES}"
            return Probe(Presence.ABSENT, reason, PASS_NODES, versions)
        devices = None if any(variable in os.environ for variable in VISIBLE) else nodes
        reason = f"torch {torch.__version__} under {package}"
        return Probe(Presence.AVAILABLE, reason, versions=versions, devices=devices)

    def open(self) -> DeviceState:
        """Import torch_xmlir, make card `index` torch's current device and allocate one element on it.

        Raises:
            DeviceError: the probe did not find it available, torch_xmlir does not start, or there is no such card.
        """
        probe = self.probe()
        if not probe.available:
            raise DeviceError(f"Device {self.name!r} cannot be used: {probe.reason}.", remedy=probe.remedy)
        try:
            import_module(MODULE)
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if self.index >= count:
                setting = ", ".join(f"{variable}={os.environ.get(variable, 'not set')}" for variable in VISIBLE)
                raise DeviceError(
                    f"Kunlun card {self.index} was asked for.",
                    there_is=f"{count} cards that {MODULE} can use, {setting}",
                    remedy=f"choose an index below {count}" if count else f"see what `{TOOL}` says",
                )
            name = torch.cuda.get_device_name(self.index)
            torch.cuda.set_device(self.index)
            _touch(self.torch_device_indexed)
            memory = self.memory()
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(
                f"Device {self.name!r} cannot be used: {type(error).__name__}: {' '.join(str(error).split())}.",
                there_is=probe.reason,
                remedy=f"see what `{TOOL}` says; driver, XRE and {MODULE} must be of one release",
            ) from error
        return DeviceState(self.torch_device_indexed, name, "p800", Features(P800), memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_xpu.kunlun.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of the P800, with what it lacks and why."""
        return Features(P800) if arch in (None, "p800") else super().features(arch)

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_xpu.kunlun.kvcache`."""
        return layouts(request)

    def memory(self) -> Memory:
        """Bytes of this card, other processes' use counted."""
        free, total = torch.cuda.mem_get_info(self.index)
        return Memory(total, free)

    def comm(self) -> str:
        """BKCL, which torch_xmlir puts under NCCL's name."""
        return "nccl"

    def synchronize(self) -> None:
        """Wait for everything launched on this card."""
        torch.cuda.synchronize(self.index)

    def timer(self) -> Callable[[], float]:
        """The host's clock in seconds, read once the card has caught up."""

        def now() -> float:
            self.synchronize()
            return time.perf_counter()

        return now


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # imported by hand, without a spec
        return True


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _touch(device: str) -> None:
    """One tiny allocation, written and waited for: what fails now does not fail in the middle of loading."""
    torch.zeros(1, device=device).add_(1)
    torch.cuda.synchronize(device)
