"""Runs the commands of docs/quantization.md and compares what they print."""

from __future__ import annotations

import shutil

from tests.e2e.test_tutorial import BLOCK, Reader
from tests.house.rules import REPOSITORY

PAGE = REPOSITORY / "docs" / "quantization.md"


def test_the_commands_of_the_page(tmp_path):
    reader = Reader(tmp_path)
    for folder, source in (("texts", "README.md"), ("more-texts", "CONTRIBUTING.md")):
        (tmp_path / folder).mkdir()
        shutil.copy(REPOSITORY / source, tmp_path / folder)
    blocks = list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))
    assert [block[1] for block in blocks] == ["console"] * 4
    for block in blocks:
        reader.follow(*block.groups(""))
    assert "gptq" in (tmp_path / "demo-int4" / "README.md").read_text()
    assert "<svg" in (tmp_path / "report.html").read_text()
