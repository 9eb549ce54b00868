"""The page of families by device: what it counts, and that it is what the plans say."""

from __future__ import annotations

import ast

import family_page
import pytest
from generate_docs import IN_TREE

from inferplane.errors import BindError
from inferplane.plugins import discover
from tests.house.rules import REPOSITORY
from tests.vendors.configs import FAMILIES

PAGE = REPOSITORY / "docs" / "family-matrix.md"


@pytest.fixture(scope="module")
def host():
    return discover(IN_TREE)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5"])
def test_a_row_is_what_the_plans_say(host, family):
    """And `strict` refuses exactly the plans that leave a hot op to its body."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {family} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    for device, cell in zip([d.name for d in host.devices()], cells[2:], strict=True):
        found = family_page.find_ways(host, device, FAMILIES[family])
        assert cell.split(" · ")[:2] == ["0", family_page.describe(found)], device
        if "body" in found.values():
            with pytest.raises(BindError, match="strict=True"):
                family_page.make_plan(host, device, FAMILIES[family], strict=True)
        else:
            assert not family_page.make_plan(host, device, FAMILIES[family], strict=True).hot_references()


def test_code_that_names_a_family_is_counted():
    """A string, an identifier and an argument; no docstring, and no longer word."""
    code = '"""For gpt_oss."""\nKIND = "gpt_oss"\ndef run_gpt_oss(x):\n    "gpt_oss"\n    gpt_osslike = x\n'
    lines = list(family_page.read_lines(ast.parse(code)))
    assert len([line for line in lines if family_page.find_names("GptOssForCausalLM").search(line)]) == 2
