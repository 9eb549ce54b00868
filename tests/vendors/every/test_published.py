"""Every call that a backend makes, bound again to the schemas and call forms that its vendor publishes, as restated.

For vendors whose library cannot be had or loaded here; each schema's kind says what it was taken from. The calls are
those that the emulator's runs have noted. Nothing is computed.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.vendors import calls, contract, profile

VENDOR = profile.current()


@pytest.fixture(scope="module")
def restated():
    """The schemas, and operators that have them."""
    with contract.define_operators(VENDOR.restated):
        yield VENDOR.restated


def test_everything_in_the_source_is_restated_and_called(restated):
    contract.check_names(restated, VENDOR.called_operators(), calls.read(VENDOR.calls))


def test_every_call_binds(restated, capsys):
    report = contract.repeat(calls.read(VENDOR.calls), "cpu")
    bound = report.bound + report.shaped  # what returns nothing needs no shape function to be carried out
    by_kind = Counter({kind: 0 for kind in restated.kinds.values()})
    for name, count in bound.items():
        by_kind[restated.kinds[name]] += count
    with capsys.disabled():
        print("", f"{VENDOR.library} {restated.version}: {sum(bound.values())} calls bound", sep="\n")
        for kind, count in by_kind.items():
            print(f"  {kind}: {count} calls of {sum(restated.kinds[name] == kind for name in bound)} operators")
    assert not report.refused, "\n  ".join(["refused:", *report.refused])
    assert not report.misshapen, "\n  ".join(report.misshapen)
    assert set(bound) == set(restated.schemas)


def test_a_wrong_call_is_refused(restated):
    assert {call.name for call in VENDOR.wrong_calls} <= set(restated.schemas)
    report = contract.repeat(VENDOR.wrong_calls, "cpu")
    assert len(report.refused) == len(VENDOR.wrong_calls) >= 2 and not report.bound and not report.shaped
