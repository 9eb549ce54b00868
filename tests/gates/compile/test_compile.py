"""Every kernel compiles for every target without spilling, within the hardware's limits, and to what was recorded."""

from __future__ import annotations

import copy

import pytest

from tests.gates.compile import arrival_order, ptx
from tests.gates.compile.compiler import GRID_CONTROL
from tests.gates.compile.golden import RUNS, faults, read, run
from tests.gates.compile.targets import TARGETS


@pytest.mark.parametrize(("version", "target"), RUNS)
def test_compiles_to_what_was_recorded(version, target, record_property):
    record_property("feature", "offline compile")
    found = run(version, target)
    limits = TARGETS[target]
    assert found
    wrong = faults(found, read(version, target), limits.shared_bytes, limits.registers)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("version", "target"), RUNS)
def test_only_launches_ahead_wait_for_the_one_before(version, target):
    """By what was recorded, with which the compilers' output is held to agree above."""
    kernels = read(version, target)
    ahead = {name for name in kernels if name.partition("/")[0].endswith("_ahead")}
    assert bool(ahead) == (target in ("sm_90", "sm_100"))
    for name, found in kernels.items():
        assert [word in found["mix"] for word in GRID_CONTROL] == [name in ahead] * 2, name


def test_programs_are_counted_in_wherever_results_are_shared():
    """Splits of K and of the cache, and experts whose pairs are added up: one arrival each, nothing else."""
    for version, target in RUNS:
        if target.startswith("sm_"):
            counted = {name for name, found in read(version, target).items() if found.get("arrivals") == 1}
            assert {"product_bf16_int4_1_split/product", "decode/attend", "mla_decode/absorbed"} <= counted
            assert {name for name, found in read(version, target).items() if "arrivals" in found} == counted


ARRIVAL = """
.visible .entry k(
    ld.param.b64 %rd1, [k_param_0];
    @%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };
    bar.sync 0;
    @%p2 atom.global.gpu.acq_rel.add.u32 %r5, [ %rd3 + 0 ], %r6;
    @%p2 st.shared::cta.b32 [ %r7 + 0 ], %r5;
    bar.sync 0;
    @%p3 ld.global.cg.b32 { %r8 }, [ %rd4 + 0 ];
    ret;
"""
LINE = "\n    @%p3 "
LAUNCH_AHEAD = """
.visible .entry k(
    ld.param.b64 %rd1, [k_param_0];
    cp.async.bulk.prefetch.L2.global [%rd1], %r1;
    griddepcontrol.wait ;
    @%p1 cp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, %r3;
    griddepcontrol.launch_dependents ;
    st.global.b32 [ %rd3 + 0 ], { %r4 };
"""
TMA = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"


def test_what_breaks_memory_s_order_is_found():
    """Text as the compiler writes it, with one line changed, moved or missing."""
    assert ptx.ahead(ARRIVAL) == ptx.ahead(LAUNCH_AHEAD) == ptx.uncounted(ARRIVAL) == ptx.uncounted(LAUNCH_AHEAD) == []
    assert ptx.arrivals(ARRIVAL) == 1 and ptx.arrivals(LAUNCH_AHEAD) == 0
    store, load = "@%p1 st.global.v4.b32", "@%p3 ld.global.cg.b32"
    for old, new, word in (
        ("acq_rel", "relaxed", "must be acq_rel"),
        ("gpu.acq_rel", "cta.acq_rel", "must be acq_rel on the gpu"),
        ("bar.sync 0;\n    @%p2 atom", "@%p2 atom", "no barrier between st.global.v4.b32 and atom"),
        ("    @%p2 atom", f"    {store} [ %rd2 + 0 ];\n    @%p2 atom", "no barrier between st.global.v4"),
        (f"bar.sync 0;\n    {load}", load, "no barrier between atom.global.gpu.acq_rel.add.u32 and ld.global.cg.b32"),
    ):
        assert old in ARRIVAL
        assert [x for x in ptx.uncounted(ARRIVAL.replace(old, new)) if word in x], (old, new)
    wait, tell = "griddepcontrol.wait ;", "griddepcontrol.launch_dependents ;"
    for old, new, word in (
        (wait, f"ld.global.b32 {{ %r9 }}, [ %rd9 + 0 ];\n    {wait}", "ld.global.b32 before griddepcontrol.wait"),
        (wait, f"@%p1 atom.global.gpu.acq_rel.add.u32 %r9, [ %rd9 ], 1;\n    {wait}", "atom.global"),
        (wait, f"{TMA}\n    {wait}", "cp.async.bulk.tensor"),
        (wait, f"@%p1 bra $L;\n    {wait}", "bra before"),
        (wait, f"{tell}\n    {wait}", "launch_dependents before"),
        (wait, f"@%p1 {wait}", "not for all threads"),
        (wait, "", "without griddepcontrol.wait"),
        (tell, "", "wait without griddepcontrol.launch_dependents"),
    ):
        assert [x for x in ptx.ahead(LAUNCH_AHEAD.replace(old, new)) if word in x], (old, new)


COUNTED = ("store", "barrier", "atom.global.gpu.acq_rel.add.u32", "barrier", "told", "reset", "load")
STALE = "the last program may read what was there before a part was stored"


def test_the_last_program_reads_all_parts_in_any_order():
    """Of three programs with two threads each, every order; and each thing that makes it so, taken away."""
    assert arrival_order.steps(ARRIVAL.replace("ld.global.cg", f"st.global.b32 [ %rd3 ];{LINE}ld.global.cg")) == COUNTED
    assert arrival_order.faults(COUNTED) == frozenset()
    assert arrival_order.faults(COUNTED, programs=2, threads=3) == frozenset()
    atomic = COUNTED[2]
    for weaker in ("relaxed", "acquire", "release"):
        changed = tuple(step.replace("acq_rel", weaker) for step in COUNTED)
        assert arrival_order.faults(changed) == {STALE}, weaker
    assert arrival_order.faults(tuple(step.replace("gpu", "cta") for step in COUNTED)) == {STALE}
    assert arrival_order.faults(("store", *COUNTED[2:])) == {STALE}
    assert arrival_order.faults(("barrier", "store", *COUNTED[2:])) == {STALE}
    untold = "a thread may not know yet whether its program is the last"
    assert arrival_order.faults((*COUNTED[:3], "told", "reset", "load")) == {STALE, untold}
    assert arrival_order.faults((*COUNTED[:5], "load")) == {"the counter is not left as zero"}
    assert arrival_order.faults(("store", "barrier", atomic, "barrier", "told", "reset")) == frozenset()
    with pytest.raises(ValueError, match="0 arrivals"):
        arrival_order.steps(LAUNCH_AHEAD)


EIGHT_BITS = {
    "fp8_int4": {"sm_90": "QGMMA", "sm_100": "UTCQMMA"},
    "coded_int4": {"sm_90": "QGMMA", "sm_100": "UTCQMMA"},
    "int8_int8": {"sm_80": "IMMA", "sm_90": "IMMA IGMMA", "sm_100": "IMMA UTCIMMA"},
}
"""Matrix instructions of 8-bit numbers, by pair of forms and architecture; few rows of int8 take those of a warp."""


@pytest.mark.parametrize(("version", "target"), [run for run in RUNS if run[1].startswith("sm_")])
def test_8_bits_are_multiplied_as_8_bits(version, target):
    """By what was recorded: INT4 beside FP8 in FP8, for few rows too, and int8 in whole numbers, nothing wider."""
    kernels = read(version, target)
    for pair, by_target in EIGHT_BITS.items():
        found = {n: k["mix"] for n, k in kernels.items() if pair in n and n.endswith(("/product", "/grouped"))}
        assert bool(found) == (target in by_target)
        for name, mix in found.items():
            multiply = {word.partition(" ")[0] for word in mix if "MMA" in word}
            assert len(multiply) == 1 and multiply <= set(by_target[target].split()), (name, mix)


def test_faults_are_found():
    good = {"k/f": {"registers": 100, "stack": 0, "spills": 0, "instructions": 1000, "mix": {"HMMA": 8}, "shared": 64}}
    assert faults(good, good, 64, 255) == []
    for change, words in (
        ({"spills": 2}, "spills 2, must be 0"),
        ({"stack": 8}, "stack 8, must be 0"),
        ({"shared": 65}, "shared 65, at most 64"),
        ({"registers": 106}, "registers 106, recorded 100"),
        ({"instructions": 1051}, "instructions 1051, recorded 1000"),
        ({"mix": {"HMMA": 16}}, "instructions {'HMMA': 16}, recorded {'HMMA': 8}"),
        ({"error": "no end within 60 s"}, "no end within 60 s"),
        ({"order": ["ld.global.b32 before griddepcontrol.wait"]}, "before griddepcontrol.wait"),
        ({"arrivals": 1}, "arrivals 1, recorded None"),
    ):
        bad = copy.deepcopy(good)
        bad["k/f"].update(change)
        assert [w for w in faults(bad, good, 64, 255) if words in w], words
    assert faults({}, good, 64, 255) == ["k/f: recorded, but not compiled"]
    assert faults(good, {}, 64, 255) == ["k/f: not recorded; make gates-record"]
