"""Device "dcu" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's call forms.

The architecture is gfx936, or gfx928. Portable kernels are left out: Triton does not run on the host; tests/gates
interprets and compiles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from inferplane.plugin import Feature, Features, Kernel, hookimpl
from inferplane_dcu import vendor
from inferplane_dcu.backend import DcuBackend
from inferplane_dcu.chips import GFX, features_of
from tests.vendors.dcu import chip, emulate_attention, emulate_basic, emulate_moe
from tests.vendors.emulated import Emulated, emulator, make_modules

INFERPLANE_API = (1, 0)
EMULATOR = emulator(Path(__file__).parent, emulate_basic, emulate_attention, emulate_moe)
make_modules(EMULATOR.restated, "lightop", "flash_attn", "flash_mla")
vendor.device = lambda: (GFX[chip.ARCH][0], 80)  # what torch.cuda would say
vendor.triton_dtype = lambda dtype: str(dtype).removeprefix("torch.")  # there is no Triton on the host


class EmulatedDcu(Emulated, DcuBackend):
    """The backend, opened without a DCU."""

    identity = (GFX[chip.ARCH][0], chip.ARCH)
    versions = {"forms": EMULATOR.restated.version}
    operators = f"Hygon's functions as published ({EMULATOR.restated.version}) on the host"

    def features(self, arch: str | None = None) -> Features:
        return Features({**features_of(chip.ARCH), "triton": Feature(False, "Triton's kernels do not run on the host")})

    def kernels(self) -> Sequence[Kernel]:
        return [kernel for kernel in super().kernels() if not kernel.provider.startswith("triton")]


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[DcuBackend]], None]) -> None:
    register("dcu", EmulatedDcu)
