"""Counting definitions: what some functions alone need, across modules and packages."""

from __future__ import annotations

import pytest
from definition_lines import Definition, Definitions
from model_lines import ImportGraph

FILES = {
    "core/__init__.py": "",
    "core/api.py": "from core.parts import Cache, shared\n",
    "core/parts.py": "class Cache:\n    size = 1\n\ndef shared(): ...\n",
    "vendor/__init__.py": "",
    "vendor/own.py": (
        "from functools import cache\n\nfrom core.api import Cache, shared\nfrom vendor import helpers\n\nWIDTH = 4\n\n"
        "@cache\n@cache\ndef kernel(kv: Cache):\n    return helpers.put(shared() + WIDTH)\n\n"
        'def beside():\n    """Words."""\n\n    return 1\n'
    ),
    "vendor/helpers.py": "def put(x):\n    # why\n    return _pad(x)\n\ndef _pad(x): ...\n\ndef unused(): ...\n",
    "vendor/other.py": "from core.parts import shared\nother = lambda: shared()\n",
}
KERNEL, OTHER = Definition("vendor.own", "kernel"), Definition("vendor.other", "other")


@pytest.fixture
def defined(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Definitions({package: ImportGraph(tmp_path, package) for package in ("core", "vendor")})


def test_what_one_function_alone_needs(defined):
    """Through a module that passes names on, an imported module, and annotations; not what another one needs, too."""
    assert defined.own([KERNEL], [OTHER]) == {
        KERNEL,
        Definition("vendor.own", "WIDTH"),
        Definition("vendor.helpers", "put"),
        Definition("vendor.helpers", "_pad"),
        Definition("core.parts", "Cache"),
    }


def test_lines_have_decorators_and_no_comments(defined):
    lines = defined.count(defined.own([KERNEL], [OTHER]))
    assert (lines.files, lines.code) == (3, 4 + 1 + 2 + 1 + 2)
    assert defined.count([Definition("vendor.own", "beside")]).code == 2
