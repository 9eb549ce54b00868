"""Evidence files are named after what they hold."""

from __future__ import annotations

import json
import re

import pytest

from tests.house.rules import REPOSITORY

FILES = sorted(REPOSITORY.glob("backends/*/evidence/*.json"))
NAME = re.compile(r"(?P<level>l[0-5])-(?P<date>\d{4}-\d{2}-\d{2})(-[a-z0-9-]+)?\.json")


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.parent.name}-{p.stem}")
def test_named_after_its_level_and_day(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    named = NAME.fullmatch(path.name)
    assert named, f"{path.name} is not LEVEL-DATE[-LABEL].json"
    assert (named["level"].upper(), named["date"]) == (content["level"], content["date"])
    assert content["backend"].partition(":")[0] == path.parent.parent.name
