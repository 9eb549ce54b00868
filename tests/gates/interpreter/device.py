"""The device "cuda" in Triton's interpreter: the backend's declarations and kernels, on host memory."""

from __future__ import annotations

from collections.abc import Callable

from inferplane.plugin import Features, hookimpl
from inferplane_cuda.backend import CudaBackend, features_of
from tests.vendors.emulated import Emulated

INFERPLANE_API = (1, 0)
CAPABILITY = (8, 0)
"""Of an A100: what Triton compiles from, without kernels for one architecture alone."""


class InterpretedCuda(Emulated, CudaBackend):
    """The backend, opened without a GPU."""

    identity = ("NVIDIA A100", "sm80")
    versions = {}
    operators = "Triton's interpreter on the host"

    def features(self, arch: str | None = None) -> Features:
        return features_of(CAPABILITY)


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[CudaBackend]], None]) -> None:
    register("cuda", InterpretedCuda)
