"""Native kernels on every instruction set this machine has: against their oracles, in all sizes, and row by row."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, c_int64
from dataclasses import replace

import pytest
import torch

from inferplane.binding import View, run_case
from inferplane.binding.check import Bench
from inferplane.errors import InferplaneWarning, KernelError
from inferplane.ops import OPS, encode
from inferplane.quant.online import quantize
from inferplane.types import Context
from inferplane_cpu.backend import CpuBackend
from inferplane_cpu.kernels import kernels
from inferplane_cpu.kernels.linear import multiply
from inferplane_cpu.kernels.moe import moe_experts
from inferplane_cpu.kernels.packing import PANEL_FORMATS, Panels, expand_rows, matrices, with_any_order
from inferplane_cpu.kvcache import layouts
from inferplane_cpu.native import _SIGNATURES, _STRUCTS, instruction_sets, native, use_instruction_set
from inferplane_cpu.structs import Matrix

SETS = instruction_sets()
needs_library = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
FEATURES = CpuBackend().features()
PLAIN_CACHE = layouts()[0].name
NATIVE = [
    k
    for k in kernels()
    if k.provider == "native"
    and not FEATURES.lacking(k.when.features)
    and PLAIN_CACHE in (*k.when.kv_layouts, *([] if k.when.kv_layouts else [PLAIN_CACHE]))
]
"""Those that take a cache in the plan's dtype, or none; of others test_cache_kinds.py has samples."""


def served(kernel):
    """The samples of its op that a kernel takes."""
    out = []
    for sample in OPS[kernel.op].samples():
        chosen = {request: layouts()[0] for request in sample.op.kv_requests()}
        context = Context(torch.bfloat16, sample.step_kind, chosen, FEATURES)
        if not kernel.refusals(sample.op, context, sample.op.formats()):
            out.append((kernel, sample))
    return out


SAMPLES = [case for kernel in NATIVE for case in served(kernel)]


@needs_library
def test_every_kernel_has_a_sample():
    assert {kernel.name for kernel in NATIVE if OPS[kernel.op].samples()} == {kernel.name for kernel, _ in SAMPLES}


@needs_library
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("kernel", "sample"), SAMPLES, ids=lambda x: getattr(x, "label", getattr(x, "name", "")))
def test_against_the_oracle(kernel, sample, name):
    with use_instruction_set(name):
        for seed in (11, 12):
            bench = Bench("cpu", "cpu", torch.bfloat16, FEATURES, lambda request: layouts(), kernels=kernels())
            outcome = run_case(kernel, sample, bench, seed=seed)
            assert outcome.passed, outcome


def outliers(shape, draw):
    """Rows as a trained model has them: a few columns a thousand times larger than the rest."""
    x = torch.randn(shape, generator=draw)
    x[..., torch.randint(0, shape[-1], (max(1, shape[-1] // 64),), generator=draw)] *= 1000
    return x.bfloat16()


@needs_library
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("make", [outliers, lambda shape, draw: torch.randn(shape, generator=draw).bfloat16()])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 31), (16, 32), (17, 33), (64, 257), (130, 192), (257, 1000)])
def test_products_of_all_heights(name, make, n, k):
    draw = torch.Generator().manual_seed(n * 1000 + k)
    w, x = make((n, k), draw), make((40, k), draw)
    want = x.double() @ w.double().T
    room = (k + 4) * 2**-24 * (x.double().abs() @ w.double().abs().T)  # of a sum in float32, in any order
    with use_instruction_set(name):
        for m in range(1, 41):
            got = multiply(matrices(w)[0], x[:m], True)
            assert ((got - want[:m]).abs() <= room[:m]).all(), (m, (got - want[:m]).abs().max())
            assert m > 1 or torch.equal(got, multiply(matrices(w)[0], x, True)[:1])
        alone = torch.cat([multiply(matrices(w)[0], x[i : i + 1], True) for i in range(40)])
        assert torch.equal(alone, multiply(matrices(w)[0], x, True))


@needs_library
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("n", "k"), [(1, 512), (17, 511), (33, 513), (64, 1024), (130, 1500)])
def test_products_whose_order_may_vary(name, n, k):
    """Rows of weights in turn where that reads faster: as exact, and in one order for one and for two rows."""
    draw = torch.Generator().manual_seed(n * 1000 + k)
    w, x = outliers((n, k), draw), outliers((66, k), draw)
    want = x.double() @ w.double().T
    room = (k + 4) * 2**-24 * (x.double().abs() @ w.double().abs().T)
    fixed = matrices(w, bias := torch.randn(n, generator=draw).bfloat16())
    found = with_any_order(fixed)[0]
    with use_instruction_set(name):
        got = {m: multiply(found, x[:m], True) for m in (*range(1, 21), 65, 66)}
        tiles = multiply(fixed[0], x, True)
    for m, y in got.items():
        assert ((y - bias - want[:m]).abs() <= room[:m] + 2**-23 * y.abs()).all(), m
        assert torch.equal(y, got[2][:m] if m <= 2 else tiles[:m]), m
    in_turn = name == "amx" and n >= 16 and k >= 512  # else both have the same order
    assert torch.equal(got[2], tiles[:2]) is not in_turn


@needs_library
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", [*PANEL_FORMATS, "fp8_block"])
@pytest.mark.parametrize("make", [outliers, lambda shape, draw: torch.randn(shape, generator=draw).bfloat16()])
@pytest.mark.parametrize(("n", "k"), [(1, 7), (5, 31), (16, 128), (33, 257), (200, 320)])
def test_quantized_products_of_all_heights(name, format, make, n, k):
    draw = torch.Generator().manual_seed(n * 1000 + k)
    q, x = encode(torch.randn(n, k, generator=draw), format), make((40, k), draw)
    weight = matrices(q if format == "fp8_block" else Panels(q))[0]
    values = q.dequantize().double()
    want = x.double() @ values.T
    room = (k + 4) * 2**-24 * (x.double().abs() @ values.abs().T)
    if q.minimum is not None:  # larger than the values that entries and it add up to
        room += (k + 4) * 2**-22 * (x.double().abs() @ torch.ones_like(values).T) * q.minimum.abs().max()
    if format != "fp8_block":  # activations are rounded to 2^-16 of the largest in their group of columns
        columns = min(128, q.block[1])
        for first in range(0, k, columns):
            part = slice(first, first + columns)
            top = x[:, part].double().abs().amax(1, keepdim=True)
            room += top * 2**-15.9 * values[:, part].abs().sum(1)
    with use_instruction_set(name):
        for m in (*range(1, 10), 16, 33, 40):
            assert ((multiply(weight, x[:m], True) - want[:m]).abs() <= room[:m]).all(), m
        alone = torch.cat([multiply(weight, x[i : i + 1], True) for i in range(40)])
        assert torch.equal(alone, multiply(weight, x, True))
        rows = expand_rows(weight, 0, n)
    assert torch.equal(rows, q.dequantize(torch.bfloat16))


@needs_library
def test_integer_products_are_the_same_on_every_instruction_set():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(9, 300, generator=draw).bfloat16()
    for format in PANEL_FORMATS:
        weight = matrices(Panels(encode(torch.randn(70, 300, generator=draw), format)))[0]
        found = []
        for name in SETS:
            with use_instruction_set(name):
                found.append(multiply(weight, x, True))
        assert all(torch.equal(found[0], y) for y in found), format


@needs_library
def test_panels_know_their_formats():
    q = encode(torch.randn(32, 256), "int8_group")
    assert Panels(q).nbytes == 32 * 256 + 32 * 2 * 4  # these scales do not fit float16 exactly
    assert Panels(quantize(torch.randn(32, 256), "int8_group")).nbytes == 32 * 256 + 32 * 2 * 2
    assert Panels(quantize(torch.randn(32, 256), "int4_group32")).nbytes == 32 * 256 * 9 // 16
    assert Panels(encode(torch.randn(32, 256), "int4_min32")).nbytes == 32 * 256 * 10 // 16
    for odd in (replace(q, zero=torch.zeros_like(q.scale)), encode(torch.randn(32, 256), "fp8_block")):
        with pytest.raises(KernelError, match="blocks"):
            Panels(odd)


@needs_library
@pytest.mark.parametrize("name", SETS)
def test_infinite_and_nan_reach_their_results_only(name):
    x, w = torch.randn(5, 96).bfloat16(), torch.randn(33, 96).bfloat16()
    x[1, 40], x[3, 7] = float("nan"), float("inf")
    with use_instruction_set(name):
        y = multiply(matrices(w)[0], x, True)
    assert not torch.isfinite(y[[1, 3]]).any()
    assert torch.isfinite(y[[0, 2, 4]]).all()


@needs_library
@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("format", ["plain", *PANEL_FORMATS])
def test_an_expert_that_is_none_is_refused_and_named(format, rows, wrong):
    """Nothing is read past the matrices; 300 rows in bfloat16 are oneDNN's."""
    draw = torch.Generator().manual_seed(3)
    gate_up, down = torch.randn(4, 64, 128, generator=draw), torch.randn(4, 128, 32, generator=draw)
    if format == "plain":
        site = View(
            gate_up=gate_up.bfloat16(), down=down.bfloat16(), act="", limit=None, limits_input=False, prepared=None
        )
    else:
        panels = (Panels(encode(matrices, format)) for matrices in (gate_up, down))
        site = View(gate_up=next(panels), down=next(panels), act="", limit=None, limits_input=False, prepared=None)
    x, weights = torch.randn(rows, 128, generator=draw).bfloat16(), torch.rand(rows, 2, generator=draw)
    ids = torch.randint(0, 4, (rows, 2), generator=draw)
    moe_experts(site, x, weights, ids)
    ids[-1, 1] = wrong
    with pytest.raises(KernelError, match=f"moe_experts got expert {wrong}, by token {rows - 1} of {rows}") as raised:
        moe_experts(site, x, weights, ids)
    assert raised.value.there_is == "experts 0 to 3"


@needs_library
def test_one_pool_of_threads():
    """The library's OpenMP is torch's: its number of threads is torch's, and one library is mapped."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert native().library.ip_num_threads() == threads
            with ThreadPoolExecutor(1) as other:  # a thread that torch has not seen
                assert other.submit(native().library.ip_num_threads).result() == threads
    finally:
        torch.set_num_threads(before)
    with open("/proc/self/maps") as lines:
        assert len({line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}) == 1


@pytest.mark.parametrize(("value", "reason"), [("none", "INFERPLANE_CPU_ISA=none"), ("mmx", "mmx")])
def test_without_native_kernels(value, reason, monkeypatch):
    """Everything runs on torch's kernels, and doctor and explain say why."""
    if native().library is None:
        reason = native().reason
    monkeypatch.setenv("INFERPLANE_CPU_ISA", value)
    script = (
        "from inferplane import LLM, SamplingParams; from inferplane_cpu.backend import CpuBackend\n"
        "llm = LLM('demo', device='cpu', dtype='bfloat16', max_model_len=64)\n"
        "llm.generate('def', SamplingParams(max_tokens=2))\n"
        "print(CpuBackend.probe().reason); print(llm.explain_text(verbose=True))\n"
        "assert not any(s['chosen']['provider'] == 'native' for s in llm.explain()['sites'])\n"
        "from inferplane.cli.main import main; print('DOCTOR'); main(['doctor', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    explained, _, report = done.stdout.rpartition("DOCTOR\n")
    assert explained.count(reason) >= 2
    missed = value != "none" if SETS else bool(native().remedy)  # and nobody asked for that
    assert ("Device cpu computes without its native kernels" in done.stderr) == missed
    line, opened = [x for x in json.loads(report)["lines"] if x["subject"] == "device cpu"]
    assert reason in line["detail"] and opened["status"] == "ok"
    assert (line["status"], bool(line["remedy"])) == (("warn", True) if missed else ("ok", False))


class Tomorrow(Structure):
    _fields_ = [*Matrix._fields_, ("of_tomorrow", c_int64)]


@needs_library
@pytest.mark.parametrize("differs", ["ip_of_tomorrow", "Tomorrow"])
def test_a_library_of_other_sources_is_warned_of(differs, monkeypatch):
    if differs == "Tomorrow":
        monkeypatch.setattr("inferplane_cpu.native._STRUCTS", (Tomorrow, *_STRUCTS[1:]))
    else:
        monkeypatch.setitem(_SIGNATURES, differs, (None,))
    native.cache_clear()
    try:
        with pytest.warns(InferplaneWarning, match=rf"cannot be loaded: .*{differs}.*pip install"):
            assert native().library is None
    finally:
        monkeypatch.undo()
        native.cache_clear()
    assert native().library is not None
