"""Hygon DCUs: torch's "cuda" device on a HIP build of torch, with a gfx name that is Hygon's.

AMD's GPUs run the same HIP builds, so the build alone decides nothing. The kernel driver lists gfx names in sysfs, and
Hygon's installations have paths of their own; both can be read without starting HIP. `open()` asks HIP for the gfx
name. gfx906 is a name that both vendors use: there the installation decides. Wheels of two releases crash when they are
imported, so their versions are compared first (`inferplane_dcu.versions`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from glob import glob
from typing import ClassVar

import torch

from inferplane.kernels.graphs import CapturingAccelerator
from inferplane.plugin import (
    DeviceError,
    DeviceState,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Presence,
    Probe,
)
from inferplane_dcu import versions
from inferplane_dcu.chips import GFX, SHARED_NAME, features_here, features_of
from inferplane_dcu.kernels import kernels
from inferplane_dcu.kvcache import layouts

VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
COMPUTE_NODE = "/dev/kfd"
TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes/*/properties"
VENDOR_PATHS = ("/dev/mkfd", "/opt/dtk", "/opt/hyhal")
"""What only Hygon's driver and toolkit bring: a device node, the toolkit (DTK), the libraries below it."""
VENDOR_TOOL = "hy-smi"

INSTALL = (
    "start from one of Hygon's images, or install DTK and the torch wheel made for it (https://das.sourcefind.cn); "
    "in a container, pass /dev/kfd, /dev/mkfd and /dev/dri and mount /opt/hyhal"
)


class DcuBackend(CapturingAccelerator):
    """One Hygon DCU."""

    name = "dcu"
    torch_device = "cuda"
    graph_class = "CUDAGraph"
    """What a HIP build of torch calls a HIP graph. Source: HYGON-AI/vllm-plugin-das, tests/accuracy: its cache write is
    recorded and replayed this way."""
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        gfx: tuple(name for name, feature in features_of(gfx).items() if feature.present) for gfx in GFX
    }

    @classmethod
    def probe(cls) -> Probe:
        """From torch's build, packages' metadata, sysfs and the vendor's paths. HIP is not started: a fork is safe."""
        versions_here = {"torch": str(torch.__version__)}
        if not torch.version.hip:
            build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without HIP"
            return Probe(Presence.ABSENT, f"torch {torch.__version__} is {build}", INSTALL, versions_here)
        versions_here["hip"] = torch.version.hip
        signs = [path for path in VENDOR_PATHS if os.path.exists(path)]
        signs += [VENDOR_TOOL] if shutil.which(VENDOR_TOOL) else []
        signs += ["a torch built for DTK"] if versions.dtk_of(torch.__version__) else []
        listed = _list_gfx()
        hygon = [gfx for gfx in listed if gfx in GFX and (gfx != SHARED_NAME or signs)]
        if not hygon and not signs:
            seen = f"; the GPUs here are {', '.join(sorted(set(listed)))}, not Hygon's" if listed else ""
            looked = f"looked for {', '.join((*VENDOR_PATHS, VENDOR_TOOL))} and a Hygon gfx name in sysfs"
            reason = f"torch is built for HIP {torch.version.hip}, but nothing of Hygon's is here ({looked}){seen}"
            return Probe(Presence.ABSENT, reason, INSTALL, versions_here)
        packages = versions.read_installed()
        versions_here = {**versions_here, **packages}
        if misfits := versions.misfits(str(torch.__version__), packages):
            remedy = "install torch and the vendor's packages of one DAS release, for the DTK that is here"
            return Probe(Presence.BROKEN, "; ".join(misfits), remedy, versions_here)
        if not os.path.exists(COMPUTE_NODE):
            found = ", ".join((*signs, *sorted(set(hygon))))
            reason = f"Hygon's software is here ({found}), but no DCU is: {COMPUTE_NODE} is missing"
            remedy = "load the driver; in a container, pass /dev/kfd, /dev/mkfd and /dev/dri"
            return Probe(Presence.ABSENT, reason, remedy, versions_here)
        for variable in VISIBLE:
            if os.environ.get(variable, "all").strip() in ("", "-1"):
                reason = f"{variable}={os.environ[variable]!r} hides every DCU"
                return Probe(Presence.ABSENT, reason, f"unset {variable}, or list the DCUs to use", versions_here)
        what = ", ".join(f"{gfx} ({GFX[gfx][0]})" for gfx in sorted(set(hygon))) or "a gfx name that opening will tell"
        reason = f"torch {torch.__version__} with HIP {torch.version.hip}, {what}"
        devices = len(hygon) if hygon and not any(variable in os.environ for variable in VISIBLE) else None
        return Probe(Presence.AVAILABLE, reason, versions=versions_here, devices=devices)

    def open(self) -> DeviceState:
        """Make DCU `index` torch's current device, ask for its gfx name and allocate one element on it.

        Raises:
            DeviceError: the probe did not find it available, HIP does not start, there is no such device, or it is not
                Hygon's.
        """
        look, fit = f"see what `{VENDOR_TOOL}` says", "DTK, driver and torch wheel must be of one release"
        with self.opening("DCUs that HIP can use", VISIBLE, look, fit, device_label="DCU") as cuda:
            properties = cuda.get_device_properties(self.index)
            gfx = str(properties.gcnArchName).split(":")[0]
            if gfx not in GFX:
                raise DeviceError(
                    f"{self.torch_device_indexed} is {properties.name!r} ({gfx}), which is not a Hygon DCU known here.",
                    there_is=f"support for {', '.join(GFX)}",
                    remedy="use the backend of its vendor, or add it to inferplane_dcu.chips.GFX if it is Hygon's",
                )
            self.select()
            memory = self.memory()
        return DeviceState(self.torch_device_indexed, properties.name, gfx, features_here(gfx), memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_dcu.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of a gfx name, with what it lacks and why; the default is "gfx936"."""
        return features_of(arch or next(iter(self.architectures)))

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_dcu.kvcache`."""
        return layouts(request)

    def comm(self) -> str:
        """RCCL, which torch calls by NCCL's name."""
        return "nccl"


def _list_gfx() -> list[str]:
    """The gfx name of each GPU that the kernel driver lists.

    Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: `gfx_target_version` is major * 10000 + minor * 100 +
    stepping, 0 for a CPU; the name writes minor and stepping in hexadecimal (90010 is gfx90a). That Hygon's driver
    keeps to it was not seen on a machine, so other signs of Hygon outweigh a name that is not in the table.
    """
    names = []
    for path in sorted(glob(TOPOLOGY)):
        try:
            with open(path, errors="replace") as file:
                match = re.search(r"^gfx_target_version (\d+)$", file.read(), re.MULTILINE)
        except OSError:
            continue
        if match and (version := int(match[1])):
            names.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return names
