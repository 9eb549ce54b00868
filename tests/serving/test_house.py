"""The house rules for the server's modules, which need the packages of its extra."""

from __future__ import annotations

from tests.house import rules
from tests.house.rules import none


def test_the_server_imports_no_vendor_package_and_sets_no_variable():
    names = rules.core_modules(rules.REPOSITORY / "core")
    names = [name for name in names if name.startswith("inferplane.serving")]
    assert len(names) > 20
    report = rules.imported_by(names, preload=("torch", "transformers", "inferplane.engine"))
    none(rules.impurities(report, rules.VENDOR_PACKAGES))
