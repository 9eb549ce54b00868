"""Device "gcu" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's schemas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inferplane.plugin import Features, hookimpl
from inferplane_gcu.backend import S60_MAJOR, GcuBackend, features_of
from tests.vendors.emulated import Emulated, emulator, make_modules
from tests.vendors.gcu import emulate_attention, emulate_basic, emulate_moe

INFERPLANE_API = (1, 0)
EMULATOR = emulator(Path(__file__).parent, emulate_basic, emulate_attention, emulate_moe)
make_modules(EMULATOR.restated, "flash_attn")


class EmulatedGcu(Emulated, GcuBackend):
    """The backend, opened without a GCU."""

    identity = ("Enflame S60", "s60")
    versions = {"vllm-gcu": EMULATOR.restated.version}
    operators = f"vllm-gcu {EMULATOR.restated.version}'s published operators on the host"

    def features(self, arch: str | None = None) -> Features:
        return features_of(S60_MAJOR)


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[GcuBackend]], None]) -> None:
    register("gcu", EmulatedGcu)
