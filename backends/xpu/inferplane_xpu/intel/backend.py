"""Intel GPUs: torch's own "xpu" device, on a build of torch with XPU; vllm-xpu-kernels makes it fast.

Where Kunlun's torch_xmlir is installed, `torch.xpu` is a stub that finds nothing and "xpu" means Kunlun's cards, so
this backend gives way. `open()` does the real check; the probe looks at torch's build, package metadata and render
nodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any, ClassVar

import torch

from inferplane.kernels.graphs import CapturingAccelerator
from inferplane.plugin import (
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Memory,
    Presence,
    Probe,
    is_installed,
)
from inferplane_xpu.intel import chips, extension, ipex
from inferplane_xpu.intel.kernels import kernels
from inferplane_xpu.intel.kvcache import layouts

cache_ops = torch.ops._C_cache_ops
VISIBLE = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
RENDER_NODES = "/dev/dri/renderD*"
RENDER_VENDORS = "/sys/class/drm/{node}/device/vendor"
INTEL = "0x8086"
WSL_NODE = "/dev/dxg"

INSTALL_TORCH = "install a build of torch with XPU: pip install torch --index-url https://download.pytorch.org/whl/xpu"
INSTALL_DRIVER = (
    "install Intel's GPU driver with Level Zero (packages libze1 and libze-intel-gpu1); in a container, pass /dev/dri "
    "and join the group `render`"
)


class IntelBackend(CapturingAccelerator):
    """One Intel GPU."""

    name = "xpu:intel"
    torch_device = "xpu"
    graph_class = "XPUGraph"
    """torch 2.13 has it, older ones may not."""
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        arch: tuple(name for name, feature in chips.assume_features(arch).items() if feature.present)
        for arch in chips.ARCHS
    }

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._extension = False

    @classmethod
    def probe(cls) -> Probe:
        """From torch's build and render nodes; no XPU call is made, so a fork afterwards is safe."""
        version = getattr(torch.version, "xpu", None)
        versions = {"torch": str(torch.__version__), **({"xpu": str(version)} if version else {})}
        if is_installed("torch_xmlir"):
            reason = "torch_xmlir is installed, so xpu means Kunlun's cards here and torch.xpu is a stub"
            return Probe(Presence.ABSENT, reason, "use device='xpu:kunlun', or uninstall torch_xmlir", versions)
        if release := extension.version():
            versions[extension.DISTRIBUTION] = release
        nodes, others = _render_nodes()
        if not torch.xpu._is_compiled():
            seen = "; an Intel GPU is there" if nodes else ", and no Intel GPU is visible"
            remedy = INSTALL_TORCH if nodes else f"{INSTALL_TORCH}, and {INSTALL_DRIVER}"
            return Probe(Presence.ABSENT, f"torch {torch.__version__} is a build without XPU{seen}", remedy, versions)
        if not nodes and not os.path.exists(WSL_NODE):
            seen = f"; {', '.join(others)} belong to other vendors" if others else ""
            reason = f"torch {torch.__version__} is built with XPU, but no Intel GPU is at {RENDER_NODES}{seen}"
            return Probe(Presence.ABSENT, reason, INSTALL_DRIVER, versions)
        if misfit := extension.misfit():
            return Probe(Presence.BROKEN, *misfit, versions)
        where = ", ".join(nodes) or WSL_NODE
        kernels = f"{extension.DISTRIBUTION} {release}" if release else f"no {extension.DISTRIBUTION}"
        reason = f"torch {torch.__version__} with XPU and {kernels}, Intel GPU at {where}"
        return Probe(Presence.AVAILABLE, reason, versions=versions)

    def open(self) -> DeviceState:
        """Make GPU `index` torch's current XPU device and allocate one element on it.

        Raises:
            DeviceError: the probe did not find it available, Level Zero does not start, or there is no such GPU.
        """
        look = f"see what `sycl-ls` says; {INSTALL_DRIVER}"
        with self.opening("GPUs that Level Zero can use", VISIBLE, look) as runtime:
            properties = runtime.get_device_properties(self.index)
            self.select()
            features = self._features_here(properties)
            memory = self.memory()
        arch = chips.arch_of(properties.name)
        return DeviceState(self.torch_device_indexed, properties.name, arch, features, memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_xpu.intel.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of an architecture by public specification; what an opened device reports takes its place."""
        return chips.assume_features(arch or chips.ARCHS[0]) if arch in (None, *chips.ARCHS) else super().features(arch)

    def _features_here(self, properties: Any) -> Features:
        """What torch reports, and what the extension says once it is loaded."""
        found = extension.load()
        self._extension = bool(found.present)
        matrix = chips.matrix_kernels(self.index) if found.present else Feature(False, found.reason)
        legacy = ipex.usable(ipex.LAST_FOR_GPUS)
        known = chips.features_of(properties)
        return Features({**known, "vllm-xpu-kernels": found, "xe2-kernels": matrix, "ipex": legacy})

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_xpu.intel.kvcache`."""
        return layouts(request)

    def memory(self) -> Memory:
        """Bytes of this GPU. Where torch does not tell what is free the extension does, and where that is not here all
        that torch has not taken counts as free.

        Source: vllm-project/vllm#20743: `mem_get_info` raises on some integrated GPUs.
        """
        try:
            free, total = torch.xpu.mem_get_info(self.index)
        except (AttributeError, RuntimeError):
            if self._extension:
                free, total = cache_ops.getMemoryInfo(self.index)
                return Memory(total, free)
            total = torch.xpu.get_device_properties(self.index).total_memory
            free = total - torch.xpu.memory_reserved(self.index)
        return Memory(total, free)

    def comm(self) -> str:
        """XCCL, oneCCL inside torch."""
        return "xccl"


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
