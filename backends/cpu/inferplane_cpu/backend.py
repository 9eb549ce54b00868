"""The cpu backend: always there, and the one every other backend is compared with."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import ClassVar

import torch

from inferplane.plugin import (
    Backend,
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Presence,
    Probe,
    host_memory,
    warn,
)
from inferplane_cpu import threads
from inferplane_cpu.kernels import kernels
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import native


class CpuBackend(Backend):
    """Processors, x86 and Arm."""

    name = "cpu"
    torch_device = "cpu"
    auto_rank: ClassVar[int] = 0
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        "x86-64": ("bf16", "native"),
        "arm64": ("bf16",),
    }

    @classmethod
    def probe(cls) -> Probe:
        """Always available."""
        return Probe(
            Presence.AVAILABLE,
            f"{platform.machine()}, {threads.thread_count()}; {native().reason}",
            native().remedy,
            versions={"torch": torch.__version__},
            devices=1,
        )

    def open(self) -> DeviceState:
        """Settle the number of threads, unless `OMP_NUM_THREADS` does, and describe the processor."""
        threads.use_best_thread_count()
        if native().remedy:
            warn(
                f"Device cpu computes without its native kernels, several times slower: {native().reason}. To do: "
                f"{native().remedy}."
            )
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} ({capability}; {native().reason})"
        return DeviceState("cpu", name, capability.lower(), self.features(), host_memory())

    def features(self, arch: str | None = None) -> Features:
        """What an architecture is assumed to have; without a name, what this machine has."""
        if arch is not None:
            return super().features(arch)
        known = {
            "bf16": Feature(True, "torch computes it, in software where the processor does not"),
            "fp8": Feature(False, "torch has no fast FP8 product for processors"),
            "native": native().feature,
            "tiles": native().tiles,
        }
        return Features(known)

    def kernels(self) -> Sequence[Kernel]:
        """Native ones, and torch's own operators."""
        return kernels()

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """Core's paged storage with 16 tokens a block."""
        return layouts(request)
