"""NVIDIA GPUs: torch's "cuda" device on a CUDA build of torch, and nothing else that answers to that name.

Three other stacks call their devices "cuda": HIP builds of torch (device "dcu"), Kunlun's torch_xmlir ("xpu:kunlun"),
and third-party builds that translate CUDA. The probe leaves the first two to their own backends; `open()` asks for an
NVIDIA name, which the third kind lacks. Compute capabilities are known to this file only.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import ClassVar

import torch

from inferplane.kernels.graphs import CapturingAccelerator
from inferplane.plugin import (
    DeviceError,
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Presence,
    Probe,
    is_installed,
)
from inferplane_cuda.kernels import kernels, providers
from inferplane_cuda.kvcache import layouts_for

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
TOOL = "nvidia-smi"
DRIVER_FILE = "/proc/driver/nvidia/version"
DEVICE_NODES = "/dev/nvidia[0-9]*"
OTHER_NODES = ("/dev/dxg", "/dev/nvhost-gpu")
"""Where NVIDIA GPUs have no node of their own: WSL2 and Tegra."""

INSTALL_TORCH = (
    "put a CUDA build of torch in place of this one: `pip install --force-reinstall torch --index-url "
    "https://download.pytorch.org/whl/cu130` (other versions of CUDA: https://pytorch.org/get-started/locally)"
)
INSTALL_DRIVER = "install NVIDIA's driver; in a container, start it with `--gpus all`"

BRANDS = ("NVIDIA", "GeForce", "Quadro", "TITAN", "Tesla")
"""What NVIDIA's driver puts into a device's name; drivers before 465 left out the first."""

# Source: CUDA C++ Programming Guide, "Compute Capabilities" and "Arithmetic Instructions"; PTX ISA, "Target ISA Notes".
FEATURE_SINCE: dict[str, tuple[tuple[int, int], str]] = {
    "fp16": ((5, 3), "half-precision arithmetic"),
    "bf16": ((8, 0), "bfloat16 matrix instructions"),
    "int8-dot": ((7, 5), "int8 matrix instructions"),
    "fp8": ((8, 9), "FP8 matrix instructions"),
    "fp4": ((10, 0), "FP4 matrix instructions"),
    "triton": ((8, 0), "support by Triton's compiler"),
    "sm80": ((8, 0), "the instructions of sm80"),
    "sm89": ((8, 9), "the instructions of sm89"),
    "sm90": ((9, 0), "the instructions of sm90"),
    "sm100": ((10, 0), "the instructions of sm100"),
    "sm120": ((12, 0), "the instructions of sm120"),
}
"""Feature -> first compute capability that has it, and what it is. Later ones keep it."""

FEATURE_ONLY: dict[str, tuple[int, int]] = {"sm90a": (9, 0), "sm100a": (10, 0), "sm120a": (12, 0)}
"""Feature -> the one compute capability that has it: instructions that no later architecture promises to keep."""


def features_of(capability: tuple[int, int]) -> Features:
    """What a compute capability `(major, minor)` can do, each with the reason."""
    here = f"this is compute capability {_format_dotted(capability)}"
    known = {
        name: Feature(capability >= since, f"{what} came with {_format_dotted(since)}; {here}")
        for name, (since, what) in FEATURE_SINCE.items()
    }
    for name, only in FEATURE_ONLY.items():
        known[name] = Feature(capability == only, f"instructions that {_format_dotted(only)} alone has; {here}")
    return Features(known)


def detect_features(capability: tuple[int, int]) -> Features:
    """Features of a real GPU: those of its capability, without "triton" if it is not installed, and the libraries'."""
    known = {**features_of(capability), **providers.features()}
    if known["triton"].present and not is_installed("triton"):
        known["triton"] = Feature(False, "Triton is not installed (pip install triton)")
    return Features(known)


def arch_name(capability: tuple[int, int]) -> str:
    """The architecture's name: "sm90a" where the architecture-specific instructions are the ones to compile for."""
    return "sm90a" if capability == (9, 0) else "sm{}{}".format(*capability)


def _format_dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def _capability(arch: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"sm(\d+)(\d)a?", arch)
    return (int(match[1]), int(match[2])) if match else None


def _present_features(capability: tuple[int, int]) -> tuple[str, ...]:
    known = features_of(capability)
    return tuple(name for name in (*FEATURE_SINCE, *FEATURE_ONLY) if known[name].present)


class CudaBackend(CapturingAccelerator):
    """One NVIDIA GPU."""

    name = "cuda"
    torch_device = "cuda"
    graph_class = "CUDAGraph"
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        arch_name(capability): _present_features(capability)
        for capability in ((9, 0), (8, 0), (8, 9), (10, 0), (12, 0))
    }

    @classmethod
    def probe(cls) -> Probe:
        """From torch's build and the driver's files; no CUDA call is made, so a fork afterwards is safe."""
        versions = {"torch": str(torch.__version__)}
        if torch.version.hip:
            reason = f"torch {torch.__version__} is built for HIP {torch.version.hip}, so its GPUs are not NVIDIA's"
            return Probe(Presence.ABSENT, reason, f"use device='dcu' for Hygon DCUs, or {INSTALL_TORCH}", versions)
        if is_installed("torch_xmlir"):
            reason = "torch_xmlir is installed: what torch calls cuda here is a Kunlun card"
            return Probe(Presence.ABSENT, reason, "use device='xpu:kunlun', or uninstall torch_xmlir", versions)
        driver, nodes = _driver_version(), len(glob(DEVICE_NODES))
        if torch.version.cuda is None:
            seen = "; an NVIDIA driver is there" if driver else ", and no NVIDIA driver is visible"
            reason = f"torch {torch.__version__} is a build without CUDA{seen}"
            remedy = INSTALL_TORCH if driver else f"{INSTALL_TORCH}, and {INSTALL_DRIVER}"
            return Probe(Presence.ABSENT, reason, remedy, versions)
        versions["cuda"] = torch.version.cuda
        if driver is None:
            looked = f"looked for {DRIVER_FILE}, {DEVICE_NODES}, {', '.join(OTHER_NODES)}"
            tool = f"; {TOOL} is on PATH, so only the kernel module may be missing" if shutil.which(TOOL) else ""
            reason = f"torch is built for CUDA {torch.version.cuda}, but no NVIDIA driver is visible ({looked}{tool})"
            return Probe(Presence.ABSENT, reason, INSTALL_DRIVER, versions)
        versions["driver"] = driver
        if os.environ.get(VISIBLE_DEVICES, "all").strip() in ("", "-1"):
            reason = f"{VISIBLE_DEVICES}={os.environ[VISIBLE_DEVICES]!r} hides every GPU"
            return Probe(Presence.ABSENT, reason, f"unset {VISIBLE_DEVICES}, or list the GPUs to use", versions)
        reason = f"torch {torch.__version__} with CUDA {torch.version.cuda}, NVIDIA driver {driver}"
        devices = nodes if nodes and VISIBLE_DEVICES not in os.environ else None
        return Probe(Presence.AVAILABLE, reason, versions=versions, devices=devices)

    def open(self) -> DeviceState:
        """Make GPU `index` torch's current device and allocate one element on it.

        Raises:
            DeviceError: the probe did not find it available, CUDA does not start, there is no such GPU, or it is not
                NVIDIA's.
        """
        look, fit = f"see what `{TOOL}` says", "a driver older than torch's CUDA must be updated"
        with self.opening("GPUs that CUDA can use", (VISIBLE_DEVICES,), look, fit) as cuda:
            name, capability = cuda.get_device_name(self.index), cuda.get_device_capability(self.index)
            if not any(brand in name for brand in BRANDS) and not Path(DRIVER_FILE).exists():
                raise DeviceError(
                    f"{self.torch_device_indexed} is {name!r}, which is not an NVIDIA GPU.",
                    remedy="use the backend of that hardware's vendor",
                )
            self.select()
            memory = self.memory()
        features = detect_features(capability)
        return DeviceState(self.torch_device_indexed, name, arch_name(capability), features, memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_cuda.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of any "sm<major><minor>", with what it lacks and why; the default is "sm90a"."""
        capability = _capability(arch or next(iter(self.architectures)))
        return Features({**features_of(capability), **providers.features()}) if capability else super().features(arch)

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_cuda.kvcache`."""
        return layouts_for(request)

    def comm(self) -> str:
        """NCCL."""
        return "nccl"


def _driver_version() -> str | None:
    """The driver's version, "unknown" where only a device node tells of it, None without a driver."""
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", Path(DRIVER_FILE).read_text(errors="replace"))
        return match[0] if match else "unknown"
    except OSError:
        there = glob(DEVICE_NODES) or any(os.path.exists(node) for node in OTHER_NODES)
        return "unknown" if there else None
