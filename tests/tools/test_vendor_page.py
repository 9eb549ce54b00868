"""The page of models across vendors: its numbers are those of the files and of the plans."""

from __future__ import annotations

import json

import family_page
import pytest
import vendor_page
from generate_docs import IN_TREE
from model_lines import count_lines, find_code

from inferplane.cli import main
from inferplane.models.reading.shipped_configs import PREFIX, list_shipped_configs, read_shipped_config
from inferplane.plugins import discover
from tests.house.rules import REPOSITORY

PAGE = REPOSITORY / "docs" / "models-across-vendors.md"
FAMILIES = REPOSITORY / "core" / "inferplane" / "models" / "families"


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


def rows(text):
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_lines_of_families_and_of_the_other_project(page):
    """A family's file is among its lines; equal modules are summed once."""
    peer = json.loads(vendor_page.PEER.read_text(encoding="utf-8"))["families"]
    table = {row[0]: row[1:] for row in rows(page.partition("## Lines")[2].partition("Families are short")[0])}
    shown = [name for name in peer if name in table]
    assert len(shown) >= 6
    for name in shown:
        mine, there, beside, _ = table[name]
        own_file = len(find_code((FAMILIES / f"{name}.py").read_text(encoding="utf-8")))
        assert int(mine) >= own_file
        want = (peer[name]["code"], peer[name]["code_beside_kernels"])
        assert (int(there.replace(",", "")), int(beside.replace(",", ""))) == want
    distinct = {tuple(peer[name]["modules"]): peer[name]["code"] for name in shown}
    assert table["all"][1] == f"{sum(distinct.values()):,}"


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_what_a_backend_replaces_is_what_its_plan_says(page, device):
    section = page.partition("### glm_moe_dsa")[2].partition("###")[0]
    (row,) = [row for row in rows(section) if row[0] == device]
    named = {name.strip("*` ") for cell in row[1:3] for name in cell.split(",") if name}
    plan = family_page.make_plan(discover(IN_TREE), device, dict(read_shipped_config("config:glm-5")))
    ways = [(op.name, family_page.way_of(choice)) for _, op, choice in plan.sites("decode")]
    assert named == {name for name, way in ways if way in ("native", "portable")}
    assert {name.strip("` ") for name in row[3].split(",") if name} == {
        op.name for _, op, choice in plan.sites("decode") if choice.kernel is None and choice.own_hot
    }


def test_configs_are_named_on_the_page(page):
    for family in (line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")):
        (name,) = [
            name
            for name in list_shipped_configs()
            if vendor_page.module_of(read_shipped_config(PREFIX + name)["architectures"][0]) == family
        ]
        assert f"### {family}\n\n`{PREFIX}{name}`\n" in page


def test_commands_on_the_page_run(page, capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    commands = [line.removeprefix("$ inferplane ") for line in page.splitlines() if line.startswith("$ inferplane ")]
    assert len(commands) == 3
    for command in commands:
        assert main.main(command.split()) == 0, capsys.readouterr().err


def test_kernels_count_with_what_they_alone_need(page):
    """Most of a module is helpers, where all of its kernels are of these ops."""
    counted = page.partition("Families are short")[2].partition("folders hold more")[0]
    table = {row[0]: int(row[2].replace(",", "")) for row in rows(counted)[1:]}
    backend = REPOSITORY / "backends" / "npu" / "inferplane_npu" / "kernels"
    files = [backend / "sparse.py", backend / "sparse_blocks.py", backend / "hyper.py"]
    assert table["kernels of npu, Python"] > 0.8 * count_lines(files).code
    native = REPOSITORY / "backends" / "cpu" / "csrc"
    files = [native / "attention" / "index_select.h", native / "model" / "sparse_mla.h"]
    assert table["kernels of cpu, C++"] == count_lines(files).code
