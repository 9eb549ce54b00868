"""Enflame GCUs: torch's "gcu" device, which the package torch_gcu registers as PrivateUse1.

torch_gcu is made for one minor version of torch. Importing it starts the vendor's runtime and sets an environment
variable, so the probe reads its metadata and looks for device nodes, and only `open()` imports it.
`torch_gcu.transfer_to_gcu`, which renames the device to "cuda", is never imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from packaging.version import InvalidVersion, Version

from inferplane.kernels.graphs import CapturingAccelerator
from inferplane.kernels.probes import probe_package
from inferplane.plugin import (
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Probe,
    is_installed,
    libraries_of,
    load_library,
)
from inferplane_gcu.kernels import kernels
from inferplane_gcu.kvcache import layouts

MODULE, DISTRIBUTION = "torch_gcu", "torch-gcu"
OTHER_PRIVATEUSE1 = ("torch_npu",)
VISIBLE = "TOPS_VISIBLE_DEVICES"
DEVICE_NODES = "/dev/gcu[0-9]*"
TOOL = "efsmi"

INSTALL = (
    "install Enflame's TopsRider with its torch_gcu wheel of the same minor version as torch (on no package index), or "
    "start from one of Enflame's images"
)
PASS_NODES = "load the driver (module `enflame`); in a container, pass /dev/gcu0 (and so on) and /dev/gcuctl"

OPERATORS, FLASH = "vllm_gcu", "flash_attn"
"""Packages whose operators and functions the kernels call."""

S60_MAJOR = 3
FP8_MAJOR = 4


def features_of(major: int) -> Features:
    """What a generation of GCUs can do; `major` is the first part of torch_gcu's device capability.

    Source: EnflameTechnology/vllm-gcu, vllm_gcu/gcu.py: FP8 from capability (14, 0) on, where vllm-gcu adds 10 to
    what torch_gcu says; its schemas for the int8 operators; the vendor's Triton compiler, whose error is "64-bit data
    type not supported on GCU300".
    """
    vendor = "the vendor's vLLM plugin uses it on every GCU it serves"
    return Features(
        {
            "fp16": Feature(True, vendor),
            "bf16": Feature(True, vendor),
            "int8-dot": Feature(True, vendor),
            "fp8": Feature(major >= FP8_MAJOR, f"FP8 came with generation {FP8_MAJOR}; this is generation {major}"),
            "vllm-gcu": Feature(True, f"assumed: {OPERATORS} is installed"),
            "flash-attn": Feature(True, f"assumed: Enflame's build of {FLASH} is installed"),
            "int64-kernels": Feature(
                False if major == S60_MAJOR else None,
                "compiled kernels may not use 64-bit types on the S60 (GCU300); not known of others",
            ),
        }
    )


def generation_of(capability: Sequence[int]) -> int:
    """The generation by a device capability: 3 is the S60.

    torch_gcu says (3, 0) for an S60; software written for CUDA's numbers adds 10 to it, and patched stacks answer with
    the sum, so both count.
    """
    return capability[0] - 10 if capability[0] > 10 else capability[0]


class GcuBackend(CapturingAccelerator):
    """One Enflame GCU."""

    name = "gcu"
    torch_device = "gcu"
    graph_class = "GCUGraph"
    """Source: EnflameTechnology/vllm-gcu at 7b5aaca9, vllm_gcu/worker/model_runner.py (GCUGraphRunner)."""
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        "s60": tuple(name for name, feature in features_of(S60_MAJOR).items() if feature.present)
    }

    def runtime(self) -> Any:
        """The vendor's counterpart of `torch.cuda`; the first call imports the package."""
        return importlib.import_module(MODULE).gcu

    @classmethod
    def probe(cls) -> Probe:
        """From package metadata and device nodes; torch_gcu is not imported."""
        return probe_package(
            MODULE,
            DISTRIBUTION,
            device=("a GCU", "GCU"),
            nodes=DEVICE_NODES,
            visible=(VISIBLE,),
            install=INSTALL,
            pass_nodes=PASS_NODES,
            misfit=_misfit,
        )

    def open(self) -> DeviceState:
        """Import torch_gcu, make GCU `index` torch's current device and allocate one element on it.

        Raises:
            DeviceError: another package holds PrivateUse1, the probe did not find it available, torch_gcu does not
                start, or there is no such GCU.
        """
        self.require_free_slot(OTHER_PRIVATEUSE1)
        look, fit = f"see what `{TOOL}` says", "driver, TopsRider and torch_gcu must be of one release"
        with self.opening("GCUs that TopsRider can use", (VISIBLE,), look, fit) as gcu:
            name = str(gcu.get_device_name(self.index))
            generation = generation_of(gcu.get_device_capability(self.index))
            self.select()
            memory = self.memory()
        arch = "s60" if generation == S60_MAJOR else f"gcu{generation}00"
        return DeviceState(self.torch_device_indexed, name, arch, features_here(generation), memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_gcu.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of the S60, with what it lacks and why; other architectures are known once opened."""
        return features_of(S60_MAJOR) if arch in (None, "s60") else super().features(arch)

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_gcu.kvcache`."""
        return layouts(request)

    def comm(self) -> str:
        """ECCL."""
        return "eccl"


def features_here(generation: int) -> Features:
    """Features of a generation on this machine: vllm-gcu's operators are loaded, flash attention is looked for."""
    found = {**features_of(generation), "vllm-gcu": _load_operators()}
    if not is_installed(FLASH):
        found["flash-attn"] = Feature(False, f"{FLASH} is not installed; TopsRider has Enflame's build of it")
    return Features(found)


def _load_operators() -> Feature:
    """The shared library alone: importing the package would rename the device to "cuda" (torch_gcu.transfer_to_gcu)."""
    libraries = libraries_of(OPERATORS, "_C*.so")
    if not libraries:
        return Feature(False, f"{OPERATORS} is not installed; TopsRider has a wheel of it")
    return load_library(libraries[0]) or Feature(True, f"its operators are loaded from {libraries[0]}")


def _misfit(version: str | None, versions: dict[str, str]) -> tuple[str, str] | None:
    """Reason and remedy where torch_gcu is made for another torch, or does not say for which."""
    package, made_for, here = f"{DISTRIBUTION} {versions[DISTRIBUTION]}", _minor(version), _minor(torch.__version__)
    if not made_for:
        reason = f"{package}: nothing says which torch it is made for"
        return reason, f"install torch_gcu {here} of TopsRider as a wheel"
    if made_for != here:
        reason = f"{package} is made for torch {made_for}, this is torch {torch.__version__}"
        return reason, f"install torch_gcu {here} of TopsRider, or 'torch=={made_for}.*'"
    return None


def _minor(version: str | None) -> str:
    """ "2.13" of "2.13rc1" or "2.13.0+3.8"; empty where there is no version, or none that can be read."""
    try:
        parsed = Version(str(version))
    except InvalidVersion:
        return ""
    return f"{parsed.major}.{parsed.minor}"
