"""The portable kernels with the tile sizes that device "dcu" gives them, compiled for AMD's architectures.

A proxy, and no more: upstream Triton does not know Hygon's gfx928, gfx936 and gfx938, and Hygon's own build cannot be
had. AMD's architectures share with them waves of 64 lanes and what is asked for here, 64 KiB of shared memory at most.
gfx906, which Hygon's Z100 goes by too, has no matrix instructions: products keep whole rows in registers there, and
some are spilled, at most as many as noted. The others have such instructions, as Hygon's newer DCUs do, and spill none.
"""

from __future__ import annotations

import pytest

from inferplane_dcu.kernels import TILES
from tests.gates.compile.compiler import launches, limited
from tests.gates.compile.targets import Target

SHARED_BYTES = 65536
REGISTERS = {"gfx906": 256, "gfx90a": 512, "gfx942": 512, "gfx950": 512}
ATTENTION = ("attend", "absorbed", "expanded", "index_scores", "attend_chosen")
SPILLS = {
    "decode/attend": 15,
    "decode_int8/attend": 43,
    "decode_softcap/attend": 170,
    "decode_window/attend": 14,
    "experts_bf16/grouped": 697,
    "experts_clamped_down/grouped": 273,
    "experts_clamped_few/grouped": 817,
    "experts_clamped_many/grouped": 2310,
    "experts_clamped_mxfp4_few/grouped": 64,
    "experts_clamped_mxfp4_many/grouped": 300,
    "index_select/index_scores": 275,
    "mla_decode/absorbed": 537,
    "mla_decode_int8/absorbed": 547,
    "mla_prefill/expanded": 296,
    "prefill/attend": 171,
    "prefill_softcap/attend": 163,
    "prefill_window/attend": 170,
    "product_bf16_int4_256/product": 1663,
    "product_bf16_int8_1/product": 293,
    "product_bf16_mxfp4_256/product": 760,
    "product_bf16_nvfp4_256/product": 106,
    "rotate_index_keys/rotate": 16,
    "sparse_mla/attend_chosen": 664,
}
"""Registers that are spilled on gfx906, by kernel, with Triton 3.9.0."""


def found(gfx: str) -> dict[str, dict]:
    """What each kernel compiles to that a DCU may be given: caches in the plan's dtype and in int8. Kernels that take
    no tile sizes are compiled for the others by test_compile.py, so they are for gfx906 alone.
    """
    target = Target(("hip", gfx, 64), TILES, SHARED_BYTES, REGISTERS[gfx])
    return {
        name: limited(launch, target)
        for name, launch in launches(target).items()
        if "fp8" not in name and (gfx == "gfx906" or name.endswith(ATTENTION))
    }


def faults(gfx: str, kernels: dict[str, dict]) -> list[str]:
    """What is wrong, a line each."""
    spills = SPILLS if gfx == "gfx906" else {}
    wrong = [f"{name}: noted for its spills, but not compiled" for name in spills.keys() - kernels.keys()]
    for name, now in kernels.items():
        if "error" in now:
            wrong.append(f"{name}: {now['error']}")
            continue
        most = spills.get(name, 0)
        if now["spills"] > most:
            wrong.append(f"{name}: spills {now['spills']}, at most {most}")
        for what, most in (("shared", SHARED_BYTES), ("registers", REGISTERS[gfx])):
            if now[what] > most:
                wrong.append(f"{name}: {what} {now[what]}, at most {most}")
        if name.endswith(ATTENTION) and bool(now["mix"]) == (gfx == "gfx906"):
            wrong.append(f"{name}: matrix instructions {now['mix']}")
    return wrong


@pytest.mark.parametrize("gfx", REGISTERS)
def test_compiles_within_the_limits(gfx, record_property):
    record_property("backend", "dcu")
    record_property("feature", "offline compile, a proxy for Hygon's architectures")
    wrong = faults(gfx, found(gfx))
    assert not wrong, "\n".join(wrong)


def test_faults_are_found():
    good = {"registers": 100, "stack": 0, "spills": 0, "instructions": 1000, "mix": {"v_mfma": 4}, "shared": 8192}
    assert faults("gfx942", {"decode/attend": good}) == []
    for change, words in (
        ({"spills": 1}, "spills 1, at most 0"),
        ({"shared": 65537}, "shared 65537, at most 65536"),
        ({"registers": 513}, "registers 513, at most 512"),
        ({"mix": {}}, "matrix instructions {}"),
        ({"error": "no end within 60 s"}, "no end within 60 s"),
    ):
        assert faults("gfx942", {"decode/attend": {**good, **change}}) == [f"decode/attend: {words}"]
    noted = {name: {**good, "spills": most, "mix": {}} for name, most in SPILLS.items()}
    assert faults("gfx906", noted) == []
    assert faults("gfx906", {**noted, "decode/attend": {**good, "spills": 16, "mix": {}}}) == [
        "decode/attend: spills 16, at most 15"
    ]
    del noted["decode/attend"]
    assert faults("gfx906", noted) == ["decode/attend: noted for its spills, but not compiled"]
