"""Runs the pages on adding a device, an op, a kernel and a model family, as test_tutorial runs the tutorial."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_tutorial import BLOCK, Reader
from tests.house.rules import REPOSITORY

DOCS = REPOSITORY / "docs"


def follow(reader: Reader, text: str, *, leave_out: str = "") -> int:
    """Follow the files, changes and commands of a text, except files of this name; returns their number."""
    blocks = [b for b in BLOCK.findall(text) if (b[1] or b[0] == "console") and b[1] != (leave_out or None)]
    for block in blocks:
        reader.follow(*block)
    return len(blocks)


@pytest.fixture
def clone(tmp_path):
    """A reader in a copy of the source tree, whose packages come first. What is compiled is copied, too: the reader's
    processes write no bytecode.
    """
    tree = tmp_path / "clone"
    ignored = shutil.ignore_patterns("*-pytest-*", "*.safetensors", "*.egg-info")
    for name in ("core", "tests"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tree)
    (tree / "backends").symlink_to(REPOSITORY / "backends")
    (tree / "docs").symlink_to(DOCS)
    return Reader(tree, tree / "core", tree)


@pytest.mark.slow
def test_adding_a_device(tmp_path):
    assert follow(Reader(tmp_path), (DOCS / "adding-a-device.md").read_text(encoding="utf-8")) == 3


@pytest.mark.slow
def test_adding_a_kernel_and_an_op(tmp_path, clone):
    kernel, op = re.split(r"^## An op$", (DOCS / "adding-an-op.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert follow(Reader(tmp_path / "empty"), kernel) == 2
    assert follow(clone, op) == 6


@pytest.mark.slow
def test_adding_a_model(clone):
    assert follow(clone, (DOCS / "adding-a-model.md").read_text(encoding="utf-8")) == 5


@pytest.mark.parametrize("page", ["tutorial-backend", "adding-a-device", "adding-an-op", "adding-a-model"])
def test_every_file_is_named_in_the_text_above_it(page):
    """A page that is shown as such has no place for the names that stand behind the fences."""
    text, end = (DOCS / f"{page}.md").read_text(encoding="utf-8"), 0
    named = [block for block in re.finditer(BLOCK, text) if block[2]]
    assert named
    for block in named:
        above = text[end : block.start()]
        assert f"`{Path(block[2])}`" in above, f"{page}: nothing above says that this is {block[2]}:\n{block[0][:200]}"
        end = block.end() if block[1] != "diff" else end
