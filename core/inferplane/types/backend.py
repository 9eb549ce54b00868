"""What a backend implements for its hardware: required members first, then optional ones with their defaults."""

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
from inferplane.types.kv import KVCache, KVLayout, Layouts
from inferplane.types.kv_request import KVRequest


class Backend(ABC):
    """A kind of hardware. One instance serves one device of this kind and allocates nothing before `open()`.

    The module that defines a backend imports no vendor package, so that probing and explaining work on a machine
    without the hardware. `open()` and kernels with dotted targets import the vendor's runtime.
    """

    name: ClassVar[str]
    """(required) The user's word: the value of `device=`; a family's variant has its own name, "family:variant"."""

    torch_device: ClassVar[str]
    """(required) torch's name for this kind of device. May differ from `name`; core derives neither from the other."""

    architectures: ClassVar[dict[str, tuple[str, ...]]] = {}
    """(optional) Known architecture names and the features assumed for each, used by `explain --arch` on a
    machine without the hardware. The first one is the default architecture. Default: none."""

    auto_rank: ClassVar[int] = 0
    """(optional) Priority under `device="auto"`: the available device with the highest number is taken. Accelerators
    have 100, the host 0. Default: 0."""

    asynchronous: ClassVar[bool] = False
    """(optional) True if launched work runs in the order of its launch while the host goes on, and `start_read` waits
    for no work that is launched later. The engine then prepares the next step meanwhile. Default: False, also for
    `Accelerator`, on whose devices `async_scheduling="on"` switches it on: it was measured on none of them."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    # -- required

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """(required) Whether this hardware can be used here, judged by package metadata and environment only. Takes
        less than 0.1 s and never raises."""

    @abstractmethod
    def open(self) -> DeviceState:
        """(required) Import the runtime, make one tiny allocation on the device, and describe the device.

        Raises:
            DeviceError: the device cannot be used; the message says what to install or change.
        """

    @abstractmethod
    def kernels(self) -> Sequence[Kernel]:
        """(required) Every kernel that this backend declares. Pure; imports no vendor package (use dotted targets)."""

    # -- optional

    def features(self, arch: str | None = None) -> Features:
        """(optional) Features assumed of an architecture before `open()`. Default: those in `architectures`."""
        if arch is None:
            arch = next(iter(self.architectures), None)
        return Features(self.architectures.get(arch, ()) if arch else ())

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """(optional) KV layouts that this backend supports for one kind of layer. Pure. Binding takes the layout whose
        kernels rank highest, and the first one among equals.

        Default: empty, which means core's paged storage.
        """
        return ()

    def build_kv_cache(
        self, requests: Sequence[KVRequest], layouts: Layouts, blocks: int, dtype: torch.dtype
    ) -> KVCache:
        """(optional) Allocate the cache after weights are loaded: `blocks` blocks per layer. Default: layer by
        layer."""
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
        """(optional) Capture `step` for batches of `bucket`'s size, after as many warm-up calls of `step(bucket)` as
        needed.

        Args:
            step: the bound model over its cache: `(batch) -> (logits, hidden)`. It never synchronizes, and every call
                makes the same allocations.
            bucket: a decode step's batch; core keeps its tensors in place and copies each next batch into them.

        Returns:
            An object whose `replay()` runs the step on the present contents of the bucket's tensors and returns the
            same result tensors every time. None (the default) if this device cannot capture: steps run eagerly.
        """
        return None

    def synchronize(self) -> None:
        """(optional) Wait until all launched work is done. Default: returns at once, for devices that run
        synchronously."""

    def start_read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """(optional) Copy tensors `[...]` to the host, behind all work launched so far. Returns a function that waits
        for the copies and returns them in order. Later work may overwrite the tensors. Default: copies them when that
        function is called, which waits for later work too; right for devices that run synchronously."""
        return lambda: [tensor.to(HOST) for tensor in tensors]

    def timer(self) -> Callable[[], float]:
        """(optional) A clock in seconds that waits for asynchronous work. Default: calls `synchronize()`, then reads
        the host's monotonic clock."""

        def now() -> float:
            self.synchronize()
            return time.perf_counter()

        return now

    # -- for core

    @property
    def torch_device_indexed(self) -> str:
        """`torch_device` with this instance's index, without an index for devices that torch does not number."""
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
