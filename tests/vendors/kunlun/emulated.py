"""Device "xpu:kunlun" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferplane.plugin import Batch, Features, Kernel, hookimpl
from inferplane_xpu.kunlun.backend import KunlunBackend
from inferplane_xpu.kunlun.kernels import quant
from tests.vendors.emulated import Emulated, emulator, make_modules
from tests.vendors.kunlun import emulate_attention, emulate_basic, emulate_moe, emulate_quant

INFERPLANE_API = (1, 0)
EMULATOR = emulator(Path(__file__).parent, emulate_basic, emulate_attention, emulate_moe, emulate_quant)
make_modules(EMULATOR.restated, "kunlun_ops")


class EmulatedKunlun(Emulated, KunlunBackend):
    """The backend, opened without a card."""

    identity = ("Kunlun P800", "p800")
    versions = {"vllm-kunlun": EMULATOR.restated.version}
    operators = f"vLLM-Kunlun {EMULATOR.restated.version}'s calls of kunlun_ops and xspeedgate_ops on the host"

    def features(self, arch: str | None = None) -> Features:
        return super().features()

    def lift(self, kernel: Kernel) -> Kernel:
        """All but those of int4: their words are float16's alone."""
        return kernel if kernel.packs.get("weight") is quant.INT4_WORDS else super().lift(kernel)

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> None:
        """Nothing is recorded."""


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[KunlunBackend]], None]) -> None:
    register("xpu:kunlun", EmulatedKunlun)
