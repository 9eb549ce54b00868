"""Kunlun cards (P800): torch's "cuda" device under torch_xmlir, which runs CUDA calls on the card.

The vendor ships a torch 2.5 of its own that was built for CUDA. The probe recognises torch_xmlir by its spec alone;
`open()` imports it, after which "cuda" means the card, and then the libraries of fused operators. `torch.xpu` there is
Intel's stub and finds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from inferplane.kernels.graphs import CapturedGraph, CapturingAccelerator
from inferplane.kernels.probes import probe_package
from inferplane.plugin import (
    Batch,
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Probe,
    minor_of,
    version_of,
)
from inferplane_xpu.kunlun.kernels import kernels
from inferplane_xpu.kunlun.kvcache import layouts
from inferplane_xpu.kunlun.operators import assume_features, find_features

MODULE = "torch_xmlir"
VISIBLE = ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
DEVICE_NODES = "/dev/xpu[0-9]*"
TOOL = "xpu-smi"
GRAPHS_SWITCH = "XMLIR_FORCE_USE_XPU_GRAPH"
"""The environment variable that makes torch_xmlir record; at "1" it does."""
OLDEST_TORCH = (2, 5)
"""The vendor's torch is 2.5.1 (xpytorch-cp310-torch251); no older one is known to have been made."""
TWINS = ("xspeedgate_ops", "cocopod")
"""Packages of the vendor's that are released together, with one number: 1.0.0 with 1.0.0, 1.1.0 with 1.1.0."""

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


class KunlunBackend(CapturingAccelerator):
    """One Kunlun card."""

    name = "xpu:kunlun"
    torch_device = "cuda"
    graph_class = "CUDAGraph"
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        "p800": tuple(name for name, feature in {**P800, **assume_features()}.items() if feature.present)
    }

    def runtime(self) -> Any:
        """torch.cuda, which means cards once torch_xmlir is imported."""
        import_module(MODULE)
        return torch.cuda

    @classmethod
    def probe(cls) -> Probe:
        """From torch_xmlir's spec, torch's build and device nodes; torch_xmlir is not imported."""
        return probe_package(
            MODULE,
            MODULE,
            device=("a Kunlun card", "Kunlun card"),
            nodes=DEVICE_NODES,
            visible=VISIBLE,
            install=INSTALL,
            pass_nodes=PASS_NODES,
            misfit=_misfit,
        )

    def open(self) -> DeviceState:
        """Import torch_xmlir, make card `index` torch's current device and allocate one element on it.

        Raises:
            DeviceError: the probe did not find it available, torch_xmlir does not start, or there is no such card.
        """
        look, fit = f"see what `{TOOL}` says", f"driver, XRE and {MODULE} must be of one release"
        with self.opening(f"cards that {MODULE} can use", VISIBLE, look, fit, device_label="Kunlun card") as cuda:
            name = cuda.get_device_name(self.index)
            self.select()
            memory = self.memory()
        return DeviceState(self.torch_device_indexed, name, "p800", Features({**P800, **find_features()}), memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_xpu.kunlun.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of the P800, with what it lacks and why."""
        return Features({**P800, **assume_features()}) if arch in (None, "p800") else super().features(arch)

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_xpu.kunlun.kvcache`."""
        return layouts(request)

    def comm(self) -> str:
        """BKCL, which torch_xmlir puts under NCCL's name."""
        return "nccl"

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> CapturedGraph | None:
        """As a CUDA graph, which torch_xmlir makes one of the card, where the vendor's variable asks for that; where it
        does not, steps run as they are.

        Source: baidu/vLLM-Kunlun at 09869ee7, docs/source/user_guide/configuration/env_vars.md, and
        vllm_kunlun/platforms/kunlun.py, which leaves capture to vLLM's own code for CUDA.
        """
        return super().capture(step, bucket) if os.environ.get(GRAPHS_SWITCH) == "1" else None


def _misfit(version: str | None, versions: dict[str, str]) -> tuple[str, str] | None:
    """Reason and remedy where versions do not fit each other, both named; None where they do."""
    package = f"{MODULE} {versions[MODULE]}"
    if torch.version.cuda is None:
        return f"{package} is installed, but torch {torch.__version__} is not the vendor's: it lacks CUDA", INSTALL
    if tuple(map(int, minor_of(torch.__version__).split("."))) < OLDEST_TORCH:
        made_for = ".".join(map(str, OLDEST_TORCH))
        reason = f"{package} is made for torch {made_for} or newer, this is torch {torch.__version__}"
        return reason, INSTALL
    twins = [(name, version_of(name)) for name in TWINS]
    if all(version for _, version in twins) and len({str(version).split("+")[0] for _, version in twins}) > 1:
        (one, first), (other, second) = twins
        reason = f"{one} {first} does not go with {other} {second}: they are released as pairs of one number"
        return reason, f"install {one} and {other} of one number, as the installation page of baidu/vLLM-Kunlun says"
    return None
