"""A device that fails when core assumes anything. Plugin module: INFERPLANE_PLUGINS=tests.mock_device.mock_device.

| device | brings |
|---|---|
| mock:norm | the two norms; all else runs as references on the device |
| mock:block | also attention blocks, for both families |
| mock:layer | also whole decoder layers |
| mock:later | as mock:layer; steps may take time of their own (`hidden.TIMELINE`), while the host goes on |
| mock:decode | blocks, MLPs, and whole layers in decode steps only: a plan's columns differ, packings are shared |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from inferplane.plugin import (
    Backend,
    DeviceState,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Presence,
    Probe,
    hookimpl,
    paged_layout,
)
from tests.mock_device import hidden, kernels, kvcache

INFERPLANE_API = (1, 1)


class MockBackend(Backend):
    """What the variants share; `declared` is all by which they differ."""

    torch_device = hidden.DEVICE
    declared: ClassVar[list[Kernel]]
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {"mock1": ("bf16",)}

    @classmethod
    def probe(cls) -> Probe:
        if not hidden.supported():
            return Probe(
                Presence.ABSENT, f"torch {torch.__version__} takes no devices written in Python", "use torch 2.9"
            )
        return Probe(Presence.AVAILABLE, "made of Python", devices=1)

    def open(self) -> DeviceState:
        hidden.start()
        return DeviceState(self.torch_device_indexed, "a mock", "mock1", Features(["bf16"]), self.memory())

    def kernels(self) -> Sequence[Kernel]:
        return self.declared

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        own = kvcache.layout(request)
        return (own,) if request.kind == "mla" else (paged_layout(kvcache.BLOCK_TOKENS), own)


class Norm(MockBackend):
    name = "mock:norm"
    declared = kernels.NORMS


class Block(MockBackend):
    name = "mock:block"
    declared: ClassVar[list[Kernel]] = [*kernels.NORMS, *kernels.BLOCKS]


class Layer(MockBackend):
    name = "mock:layer"
    declared: ClassVar[list[Kernel]] = [*kernels.NORMS, *kernels.BLOCKS, kernels.LAYER]


class Decode(MockBackend):
    name = "mock:decode"
    declared: ClassVar[list[Kernel]] = [*kernels.NORMS, *kernels.BLOCKS, *kernels.MLPS, kernels.DECODE_LAYER]


class Later(Layer):
    name = "mock:later"
    asynchronous = True

    def synchronize(self) -> None:
        hidden.TIMELINE.wait()

    def start_read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        copies, until = [hidden.lowered(tensor).clone() for tensor in tensors], hidden.TIMELINE.ready_at

        def wait() -> list[torch.Tensor]:
            hidden.TIMELINE.wait(until)
            return copies

        return wait


VARIANTS = {backend.name: backend for backend in (Norm, Block, Layer, Decode, Later)}


@hookimpl
def inferplane_register_backends(register: Any) -> None:
    for name, backend in VARIANTS.items():
        register(name, backend)
