"""The page a vendor implements from. Required members first, then optional ones with their defaults."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from inferplane.types.batch import Batch
from inferplane.types.device import HOST, DeviceState, Features, Memory, Probe
from inferplane.types.kernel import Kernel
from inferplane.types.kv import KVCache, KVLayout, KVRequest, Layouts


class Backend(ABC):
    """A kind of hardware. One instance serves one device of it; nothing is allocated before `open()`.

    The module that holds a backend imports no vendor package: probing and explaining work on a bare machine, and the
    vendor's runtime is imported by `open()` or by a kernel's dotted target.
    """

    name: ClassVar[str]
    """(required) The user's word: the value of `device=`; a family's variant has its own name, "family:variant"."""

    torch_device: ClassVar[str]
    """(required) What torch calls it. May differ from `name`; nothing in core derives one from the other."""

    architectures: ClassVar[dict[str, tuple[str, ...]]] = {}
    """(optional) Known architecture names and the features assumed for each, used by `explain --arch` on a bare
    machine. The first is the default. Default: none."""

    auto_rank: ClassVar[int] = 0
    """(optional) Place in the order of `device="auto"`, highest first among those available: accelerators 100, the host
    0. Default: 0."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    # -- required

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether it can be used here, from package metadata and environment only. Under 0.1 s, never raises."""

    @abstractmethod
    def open(self) -> DeviceState:
        """Import the runtime, touch the device (one tiny allocation), and describe it.

        Raises:
            DeviceError: it cannot be used; the message says what to install or change.
        """

    @abstractmethod
    def kernels(self) -> Sequence[Kernel]:
        """Every kernel this backend declares. Pure; imports no vendor package (use dotted targets)."""

    # -- optional

    def features(self, arch: str | None = None) -> Features:
        """(optional) Features assumed of an architecture before `open()`. Default: those in `architectures`."""
        if arch is None:
            arch = next(iter(self.architectures), None)
        return Features(self.architectures.get(arch, ()) if arch else ())

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """(optional) Layouts it offers for one kind of layer; among equally good ones the first is taken. Pure.

        Default: empty, core's paged storage.
        """
        return ()

    def build_kv_cache(
        self, requests: Sequence[KVRequest], layouts: Layouts, blocks: int, dtype: torch.dtype
    ) -> KVCache:
        """(optional) Allocate the cache after weights are loaded: `blocks` blocks a layer. Default: layer by layer."""
        device = torch.device(self.torch_device_indexed)
        layers = tuple(layouts[r].build(r, blocks, dtype, device) for r in requests)
        return KVCache(layers, blocks, next(iter(layouts.values())).block_tokens)

    def memory(self) -> Memory:
        """(optional) Bytes of device memory, total and free now. Default: the host's."""
        return host_memory()

    def comm(self) -> str:
        """(optional) The torch.distributed backend for collectives between devices of this kind. Default: "gloo"."""
        return "gloo"

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> Any | None:
        """(optional) Record `step` for batches of `bucket`'s size, `step(bucket)` run first as often as is needed.

        Args:
            step: the bound model over its cache: `(batch) -> (logits, hidden)`. It waits for nothing and allocates
                alike every time.
            bucket: a decode step's batch; its tensors stay where they are, and core writes the next batch into them.

        Returns:
            An object whose `replay()` runs the step on what the bucket's tensors then hold and returns the same result
            tensors every time. None (the default) when this device records nothing: steps then run eagerly.
        """
        return None

    def synchronize(self) -> None:
        """(optional) Wait until everything launched is done. Default: nothing is asynchronous."""

    def timer(self) -> Callable[[], float]:
        """(optional) A clock in seconds that accounts for asynchronous work. Default: the host's monotonic clock, read
        once `synchronize()` returns."""

        def now() -> float:
            self.synchronize()
            return time.perf_counter()

        return now

    # -- for core

    @property
    def torch_device_indexed(self) -> str:
        """`torch_device` with this instance's index where devices are numbered."""
        return self.torch_device if self.torch_device in _UNNUMBERED else f"{self.torch_device}:{self.index}"


_UNNUMBERED = (HOST, "meta", "mps")


def host_memory() -> Memory:
    """Bytes of host memory, from the operating system (`/proc/meminfo`, else `os.sysconf`) and a container's limit."""
    try:
        with open("/proc/meminfo") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        total, free = found["MemTotal"], found["MemAvailable"]
    except OSError:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        total, free = pages * size, pages * size // 2
    for limit, used in _CGROUP:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None and most < total:
            total, free = most, min(free, max(0, most - now))
    return Memory(total, free)


_CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of the container's memory: cgroup v2, then v1."""


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # no such control group, or "max"
        return None
