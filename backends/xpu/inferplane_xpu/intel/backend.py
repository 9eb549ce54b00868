"""Intel GPUs: torch's own "xpu" device, on a build of torch with XPU. No extension package is needed.

Where Kunlun's torch_xmlir is installed, `torch.xpu` is a stub that finds nothing and "xpu" means Kunlun's cards, so
this backend gives way. `open()` does the real check; the probe looks at torch's build and at render nodes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

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
from inferplane_xpu.intel.kernels import kernels
from inferplane_xpu.intel.kvcache import layouts

VISIBLE = "ZE_AFFINITY_MASK"
RENDER_NODES = "/dev/dri/renderD*"
RENDER_VENDORS = "/sys/class/drm/{node}/device/vendor"
INTEL = "0x8086"
WSL_NODE = "/dev/dxg"

INSTALL_TORCH = "install a build of torch with XPU: pip install torch --index-url https://download.pytorch.org/whl/xpu"
INSTALL_DRIVER = (
    "install Intel's GPU driver with Level Zero (packages libze1 and libze-intel-gpu1); in a container, pass /dev/dri "
    "and join the group `render`"
)

_XMX = "every Xe GPU with XMX engines multiplies matrices in it"
_FP8 = "torch does not report it, and no source that we read says so or denies it"
_NAMES: tuple[tuple[str, str], ...] = (
    (r"Data Center GPU Max", "pvc"),
    (r"Arc.*\bB\d{2,3}\b", "bmg"),
    (r"Arc.*\bA\d{2,3}M?\b|Data Center GPU Flex", "dg2"),
)
"""Pattern of a device's name -> architecture. Source: names printed by torch.xpu.get_device_name in public reports."""


def arch_of(name: str) -> str:
    """The architecture of a device by its name; "xe" when the name is of none that is known here."""
    return next((arch for pattern, arch in _NAMES if re.search(pattern, name)), "xe")


def features_of(properties: Any) -> Features:
    """What torch reports of a device; what an older torch does not report stays unknown."""
    return Features(
        {
            "fp16": _reported(properties, "has_fp16"),
            "bf16": _reported(properties, "has_bfloat16_conversions"),
            "int8-dot": _reported(properties, "has_subgroup_matrix_multiply_accumulate"),
            "fp8": Feature(None, _FP8),
        }
    )


def _reported(properties: Any, attribute: str) -> Feature:
    value = getattr(properties, attribute, None)
    return Feature(None if value is None else bool(value), f"torch reports {attribute}={value}")


class IntelBackend(Backend):
    """One Intel GPU."""

    name = "xpu:intel"
    torch_device = "xpu"
    auto_rank: ClassVar[int] = 100
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        "bmg": ("fp16", "bf16", "int8-dot"),
        "pvc": ("fp16", "bf16", "int8-dot"),
        "dg2": ("fp16", "bf16", "int8-dot"),
    }

    @classmethod
    def probe(cls) -> Probe:
        """From torch's build and render nodes; no XPU call is made, so a fork afterwards is safe."""
        version = getattr(torch.version, "xpu", None)
        versions = {"torch": str(torch.__version__), **({"xpu": str(version)} if version else {})}
        if _installed("torch_xmlir"):
            reason = "torch_xmlir is installed, so xpu means Kunlun's cards here and torch.xpu is a stub"
            return Probe(Presence.ABSENT, reason, "use device='xpu:kunlun', or uninstall torch_xmlir", versions)
        nodes, others = _render_nodes()
        if not torch.xpu._is_compiled():
            seen = "; an Intel GPU is there" if nodes else ", and no Intel GPU is visible"
            remedy = INSTALL_TORCH if nodes else f"{INSTALL_TORCH}, and {INSTALL_DRIVER}"
            return Probe(Presence.ABSENT, f"torch {torch.__version__} is a build without XPU{seen}", remedy, versions)
        if not nodes and not os.path.exists(WSL_NODE):
            seen = f"; {', '.join(others)} belong to other vendors" if others else ""
            reason = f"torch {torch.__version__} is built with XPU, but no Intel GPU is at {RENDER_NODES}{seen}"
            return Probe(Presence.ABSENT, reason, INSTALL_DRIVER, versions)
        where = ", ".join(nodes) or WSL_NODE
        return Probe(Presence.AVAILABLE, f"torch {torch.__version__} with XPU, Intel GPU at {where}", versions=versions)

    def open(self) -> DeviceState:
        """Make GPU `index` torch's current XPU device and allocate one element on it.

        Raises:
            DeviceError: the probe did not find it available, Level Zero does not start, or there is no such GPU.
        """
        probe = self.probe()
        if not probe.available:
            raise DeviceError(f"Device {self.name!r} cannot be used: {probe.reason}.", remedy=probe.remedy)
        try:
            count = torch.xpu.device_count() if torch.xpu.is_available() else 0
            if self.index >= count:
                raise DeviceError(
                    f"{self.torch_device_indexed} was asked for.",
                    there_is=f"{count} GPUs that Level Zero can use, {VISIBLE}={os.environ.get(VISIBLE, 'not set')}",
                    remedy=f"choose an index below {count}" if count else f"see what `sycl-ls` says; {INSTALL_DRIVER}",
                )
            properties = torch.xpu.get_device_properties(self.index)
            torch.xpu.set_device(self.index)
            _touch(self.torch_device_indexed)
            memory = self.memory()
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(
                f"Device {self.name!r} cannot be used: {type(error).__name__}: {' '.join(str(error).split())}.",
                there_is=probe.reason,
                remedy=f"see what `sycl-ls` says; {INSTALL_DRIVER}",
            ) from error
        arch = arch_of(properties.name)
        return DeviceState(self.torch_device_indexed, properties.name, arch, features_of(properties), memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_xpu.intel.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of an architecture by public specification; what an opened device reports takes its place."""
        known = {name: Feature(True, _XMX) for name in super().features(arch)}
        return Features({**known, "fp8": Feature(None, _FP8)})

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_xpu.intel.kvcache`."""
        return layouts()

    def memory(self) -> Memory:
        """Bytes of this GPU. Where the driver does not tell what is free, all that torch has not taken counts as free.

        Source: vllm-project/vllm#20743: `mem_get_info` raises on some integrated GPUs.
        """
        try:
            free, total = torch.xpu.mem_get_info(self.index)
        except (AttributeError, RuntimeError):
            total = torch.xpu.get_device_properties(self.index).total_memory
            free = total - torch.xpu.memory_reserved(self.index)
        return Memory(total, free)

    def comm(self) -> str:
        """XCCL, oneCCL inside torch."""
        return "xccl"

    def synchronize(self) -> None:
        """Wait for everything launched on this GPU."""
        torch.xpu.synchronize(self.index)

    def timer(self) -> Callable[[], float]:
        """The host's clock in seconds, read once the GPU has caught up."""

        def now() -> float:
            self.synchronize()
            return time.perf_counter()

        return now


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # imported by hand, without a spec
        return True


def _render_nodes() -> tuple[list[str], list[str]]:
    """Render nodes of Intel GPUs, and those of other vendors. One whose vendor cannot be read counts as Intel's."""
    nodes: list[str] = []
    others: list[str] = []
    for node in sorted(glob(RENDER_NODES)):
        try:
            vendor = Path(RENDER_VENDORS.format(node=os.path.basename(node))).read_text(errors="replace").strip()
        except OSError:
            vendor = INTEL
        (nodes if vendor == INTEL else others).append(node)
    return nodes, others


def _touch(device: str) -> None:
    """One tiny allocation, written and waited for: what fails now does not fail in the middle of loading."""
    torch.zeros(1, device=device).add_(1)
    torch.xpu.synchronize(device)
