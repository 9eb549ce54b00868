"""Counting the lines of a model: which files belong to it alone, and which lines hold code."""

from __future__ import annotations

import pytest
from model_lines import ImportGraph, count_lines, count_vllm, find_code

FILES = {
    "__init__.py": "",
    "models/__init__.py": "from .one.model import One\nfrom .two import Two\n",
    "models/one/__init__.py": "",
    "models/one/model.py": "from pack.common import shared\nfrom ...parts import own\nLAZY = 'pack.late:Thing'\n",
    "models/one/vendor.py": "def f():\n    from pack.deep import x\n",
    "models/two.py": "import pack.common\nfrom pack.parts import other\n\nclass Two: ...\n",
    "models/heir.py": "from pack.models.one.model import One\n",
    "parts/__init__.py": "from .own import own\nfrom .other import other\n",
    "parts/own.py": "own = 1\n",
    "parts/other.py": "other = 2\n",
    "common.py": "shared = 1\n",
    "late.py": "class Thing: ...\n",
    "deep.py": "import pack.deeper\nx = 1\n",
    "deeper.py": "import pack.deep\n",
}


@pytest.fixture
def graph(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ImportGraph(tmp_path, "pack")


def test_what_one_model_alone_imports(graph):
    """Also through strings, functions, packages that list names, and imports in a circle."""
    one = graph.below("pack.models.one")
    assert one == {"pack.models.one", "pack.models.one.model", "pack.models.one.vendor"}
    own = graph.own(one, {"pack.models.two"})
    assert own - one == {"pack.parts.own", "pack.late", "pack.deep", "pack.deeper"}


def test_what_another_model_imports_through_this_one_stays_its_own(graph):
    one = graph.below("pack.models.one")
    assert graph.own(one, {"pack.models.two", "pack.models.heir"}) == graph.own(one, {"pack.models.two"})


def test_what_another_model_imports_too_is_common(graph):
    (graph.root / "pack" / "models" / "two.py").write_text("from pack import deep\n")
    found = graph.own(graph.below("pack.models.one"), {"pack.models.two"})
    assert not found & {"pack.deep", "pack.deeper"}


def test_lines_with_code(tmp_path):
    text = (
        '"""A page\nof words."""\n\n# a comment\nx = """two\nlines"""\n\ndef f():\n    "Words."\n    return 1  # one\n'
    )
    assert find_code(text) == {5, 6, 8, 10}
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.h").write_text("// words\n\nint x;\n/* more\n * words */\nint y; // here\n")
    lines = count_lines([tmp_path / "a.py", tmp_path / "b.h"])
    assert (lines.files, lines.all, lines.code) == (2, 16, 6)


def test_a_wheel_of_the_other_project(tmp_path):
    """A kernel is told by its decorator, a vendor by its folder."""
    for name, text in {
        "_version.py": "__version__ = version = '9.1'\n\n__commit_id__ = commit_id = 'gabc123'\n",
        "models/deepseek_v4/__init__.py": "from .nvidia.model import Model\n",
        "models/deepseek_v4/nvidia/model.py": "from vllm.layers import norm\n\nclass Model: ...\n",
        "models/deepseek_v4/amd/kernels.py": "import triton\n\n@triton.jit\ndef f(): ...\n",
        "models/deepseek_v41/model.py": "from vllm.models.deepseek_v4.amd import kernels\n",
        "layers/norm.py": "x = 1\n",
    }.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = count_vllm(tmp_path)
    assert (found["version"], found["commit"]) == ("9.1", "abc123")
    assert found["families"]["deepseek_v4"] == {
        "modules": ["vllm.models.deepseek_v4"],
        "vendors": ["amd", "nvidia"],
        "files": 4,
        "lines": 9,
        "code": 7,
        "code_beside_kernels": 4,
    }
