"""Evidence of the gates: each kernel's cases are known by its name, and one that failed proves nothing."""

from __future__ import annotations

from inferplane.cli.evidence import Evidence
from tests.gates.evidence import results

REPORT = """<testsuites><testsuite>
<testcase classname="tests.gates.test_products" name="test_rows[1]"><properties>
<property name="op" value="linear"/><property name="kernel" value="gluon:linear"/>
<property name="kernel" value="gluon_fp8:linear"/><property name="error" value="0.1"/></properties></testcase>
<testcase classname="tests.gates.test_products" name="test_rows[2]"><properties>
<property name="op" value="linear"/><property name="kernel" value="triton:linear"/></properties>
<failure message="wrong"/></testcase>
<testcase classname="tests.gates.test_products" name="test_other"><properties>
<property name="op" value="rms_norm"/><property name="backend" value="dcu"/></properties></testcase>
<testcase classname="tests.gates.test_products" name="test_of_nothing"/>
</testsuite></testsuites>"""


def test_kernels_are_known_by_their_names(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = results(tmp_path / "report.xml")
    assert [row["case"] for row in found] == [
        "gluon:linear, gluon_fp8:linear/products/test_rows[1]",
        "triton:linear/products/test_rows[2]",
    ]
    evidence = Evidence([{"level": "L2", "results": found}])
    assert evidence.level("linear", "gluon:linear") == evidence.level("linear", "gluon_fp8:linear") == "L2"
    assert evidence.level("linear", "triton:linear") == evidence.level("linear", "gluon_fp8:linear_fp8") == ""
