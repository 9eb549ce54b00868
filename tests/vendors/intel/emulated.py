"""Device "xpu:intel" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's schemas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from inferplane.plugin import Feature, Features, hookimpl
from inferplane_xpu.intel import chips
from inferplane_xpu.intel.backend import IntelBackend
from tests.vendors.emulated import Emulated, emulator
from tests.vendors.intel import emulate_attention, emulate_basic, emulate_legacy, emulate_moe, emulate_quant

INFERPLANE_API = (1, 0)
ARCH = "bmg"
EMULATOR = emulator(Path(__file__).parent, emulate_basic, emulate_attention, emulate_moe, emulate_quant, emulate_legacy)
emulate_legacy.install(EMULATOR.restated.schemas)


class EmulatedIntel(Emulated, IntelBackend):
    """The backend, opened without a GPU."""

    identity = ("Intel(R) Arc(TM) B580 Graphics", ARCH)
    versions = {"torch": torch.__version__, "vllm-xpu-kernels": EMULATOR.restated.version}
    operators = f"vllm-xpu-kernels {EMULATOR.restated.version}'s operators on the host"

    def features(self, arch: str | None = None) -> Features:
        return Features({**chips.assume_features(ARCH), "ipex": Feature(True, "emulated")})


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[IntelBackend]], None]) -> None:
    register("xpu:intel", EmulatedIntel)
