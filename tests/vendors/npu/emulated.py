"""Device "npu" on an emulator: the backend's own declarations and kernels, host tensors, the vendor's schemas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inferplane.plugin import Features, hookimpl
from inferplane_npu.backend import NpuBackend
from inferplane_npu.chips import features_of
from tests.vendors.emulated import Emulated, emulator
from tests.vendors.npu import (
    chip,
    emulate_atb,
    emulate_attention,
    emulate_basic,
    emulate_cache,
    emulate_hyper,
    emulate_moe,
    emulate_quant,
    emulate_recurrent,
    emulate_sparse,
)

INFERPLANE_API = (1, 0)
PARTS = (
    *(emulate_basic, emulate_attention, emulate_atb, emulate_cache, emulate_moe, emulate_quant, emulate_recurrent),
    *(emulate_hyper, emulate_sparse),
)
EMULATOR = emulator(Path(__file__).parent, *PARTS)


class EmulatedNpu(Emulated, NpuBackend):
    """The backend, opened without an NPU."""

    identity = ("Ascend", chip.ARCH)
    versions = {"torch-npu schemas": EMULATOR.restated.version}
    operators = f"{EMULATOR.restated.source.partition(' ')[0]} {EMULATOR.restated.version}'s operators on the host"

    def features(self, arch: str | None = None) -> Features:
        return features_of(chip.ARCH)


@hookimpl
def inferplane_register_backends(register: Callable[[str, type[NpuBackend]], None]) -> None:
    register("npu", EmulatedNpu)
