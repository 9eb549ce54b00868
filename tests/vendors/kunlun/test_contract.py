"""Every call that inferplane_xpu.kunlun makes, bound again to the vendor's call forms.

No binary of the vendor's can be had, so these are the forms as restated in schemas.txt, each with its kind. Run by
`make test-vendors` on the calls that the emulator's runs have noted; nothing is computed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.vendors import calls, contract, schemas
from tests.vendors.calls import Call

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
SOURCES = REPOSITORY / "backends" / "xpu" / "inferplane_xpu" / "kunlun"
CALLS = REPOSITORY / "build" / "vendors" / "kunlun" / "calls"


@pytest.fixture(scope="module")
def restated():
    """The schemas, and operators that have them; the libraries live as long as the module's tests."""
    found = schemas.read(HERE / "schemas.txt")
    libraries = {ns: torch.library.Library(ns, "DEF") for ns in {name.partition("::")[0] for name in found.schemas}}
    for name, schema in found.schemas.items():
        libraries[name.partition("::")[0]].define(str(schema).partition("::")[2])
    yield found
    libraries.clear()


def test_every_function_in_the_source_is_restated_and_called(restated):
    written = contract.written(SOURCES)
    assert written - set(restated.schemas) == set(), "called in the source, not in schemas.txt"
    assert set(restated.schemas) - written == set(), "in schemas.txt, not called in the source"
    called = {call.name for call in calls.read(CALLS)}
    assert set(restated.schemas) - called == set(), "no run of the emulator has called them"


def test_every_call_binds(restated, capsys):
    report = contract.repeat(calls.read(CALLS), "cpu")
    bound = report.bound + report.shaped  # what returns nothing needs no shape function to be carried out
    by_kind = Counter({kind: 0 for kind in restated.kinds.values()})
    for name, count in bound.items():
        by_kind[restated.kinds[name]] += count
    with capsys.disabled():
        print("", f"vLLM-Kunlun {restated.version}: {sum(bound.values())} calls bound", sep="\n")
        for kind, count in by_kind.items():
            functions = sum(restated.kinds[name] == kind for name in bound)
            print(f"  {kind}: {count} calls of {functions} functions")
    assert not report.refused, "\n  ".join(["refused:", *report.refused])
    assert not report.misshapen, "\n  ".join(report.misshapen)
    assert set(bound) == set(restated.schemas)


def test_the_names_that_are_looked_up_are_those_that_are_called(restated):
    """A library without one of them is not used, so the backend's list and the call forms must be the same."""
    from inferplane_xpu.kunlun import operators

    names = {f"kunlun_ops::{name}" for name in (*operators.KUNLUN_OPS, operators.GROUP_TOPK)}
    assert names | {f"xspeedgate_ops::{name}" for name in operators.XSPEEDGATE_OPS} == set(restated.schemas)


def test_a_wrong_call_is_refused(restated):
    """A keyword that there is not, an argument that is missing, and one by position that goes by keyword."""
    x = {"tensor": [3, 64], "strides": [64, 1], "dtype": "bfloat16"}
    wrong = [
        Call("kunlun_ops::swiglu", [], {"x": x, "out": x}, []),
        Call("kunlun_ops::rmsnorm", [x, x], {}, []),
        Call("kunlun_ops::swiglu", [x, x], {}, []),
    ]
    report = contract.repeat(wrong, "cpu")
    assert len(report.refused) == 3 and not report.bound
