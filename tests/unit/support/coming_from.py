"""The tables of the pages docs/coming-from-*.md, for the tests that hold them to the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[3] / "docs"
PAGES = tuple(sorted(DOCS.glob("coming-from-*.md")))
CODE = re.compile(r"`([^`]+)`")


class TableRow(NamedTuple):
    """One row of a table.

    Args:
        page: the page's name.
        section: the heading above the table.
        there: the cell about the other engine. here: the cell about this one.
    """

    page: str
    section: str
    there: str
    here: str

    @property
    def code_there(self) -> list[str]:
        """What the first cell has as code."""
        return CODE.findall(self.there)

    @property
    def code_here(self) -> list[str]:
        """What the second cell has as code; that of the first if it says "the same"."""
        return self.code_there if self.here.startswith("the same") else CODE.findall(self.here)


def read_rows(page: Path) -> list[TableRow]:
    """All rows of a page, without the heads of tables."""
    rows, section = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2 and "---" not in cells[0] and (cells[1] not in ("here", "because")):
            rows.append(TableRow(page.name, section, *cells))
    return rows


ROWS = [row for page in PAGES for row in read_rows(page)]
