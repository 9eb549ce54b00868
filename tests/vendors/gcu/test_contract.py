"""Every call that inferplane_gcu makes, bound again to the schemas that vllm-gcu publishes.

No binary of the vendor's can be had, so these are the definitions as restated in schemas.txt, each with its kind. Run
by `make test-vendors` on the calls that the emulator's runs have noted; nothing is computed.
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
SOURCES = REPOSITORY / "backends" / "gcu" / "inferplane_gcu"
CALLS = REPOSITORY / "build" / "vendors" / "gcu" / "calls"


@pytest.fixture(scope="module")
def restated():
    """The schemas, and operators that have them; the libraries live as long as the module's tests."""
    found = schemas.read(HERE / "schemas.txt")
    libraries = {ns: torch.library.Library(ns, "DEF") for ns in {name.partition("::")[0] for name in found.schemas}}
    for name, schema in found.schemas.items():
        libraries[name.partition("::")[0]].define(str(schema).partition("::")[2])
    yield found
    libraries.clear()


def test_every_operator_in_the_source_is_restated_and_called(restated):
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
        print("", f"vllm-gcu {restated.version}: {sum(bound.values())} calls bound", sep="\n")
        for kind, count in by_kind.items():
            operators = sum(restated.kinds[name] == kind for name in bound)
            print(f"  {kind}: {count} calls of {operators} operators")
    assert not report.refused, "\n  ".join(["refused:", *report.refused])
    assert not report.misshapen, "\n  ".join(report.misshapen)
    assert set(bound) == set(restated.schemas)


def test_a_wrong_call_is_refused(restated):
    """A keyword that there is not, and an argument that is missing."""
    x = {"tensor": [3, 64], "strides": [64, 1], "dtype": "bfloat16"}
    wrong = [Call("_C::silu_and_mul", [x], {"x": x}, []), Call("_C::rms_norm", [x, x, x], {}, [])]
    report = contract.repeat(wrong, "cpu")
    assert len(report.refused) == 2 and not report.bound
