"""Each promise of SECURITY.md has a test of its name, and each of those tests has its promise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "SECURITY.md"
FILES = sorted(Path(__file__).parent.glob("test_promises*.py"))
CHECKS = ("raises", "fail")


def in_scope(page: str) -> str:
    """The section of what is promised."""
    return page.partition("\n## What is in scope\n")[2].partition("\n## ")[0]


def promised(page: str) -> list[str]:
    """The name of each promise's test; a point that names no promise is shown as it begins."""
    found = []
    for point in re.findall(r"^- (.*)$", in_scope(page), re.MULTILINE):
        lead = re.match(r"\*\*([^*]+)\.\*\*(?: |$)", point)
        found.append(f"test_{re.sub('[^a-z0-9]+', '_', lead[1].lower())}" if lead else point)
    return found


def checks_of(sources: Iterable[str]) -> dict[str, bool]:
    """Test -> whether it can fail: it asserts something, or expects an error."""
    found: dict[str, bool] = {}
    for source in sources:
        for function in ast.parse(source).body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                found[function.name] = any(_checks(node) for node in ast.walk(function))
    return found


def _checks(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr in CHECKS)


def mismatches(page: str, sources: Iterable[str]) -> list[str]:
    """What is promised without a test, tested without a promise, promised twice, or tested without a check."""
    names, tests = promised(page), checks_of(sources)
    found = [f"no test: {name}" for name in names if name not in tests]
    found += [f"no promise: {name}" for name in tests if name not in names]
    found += [f"twice: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    return found + [f"no check: {name}" for name, can_fail in tests.items() if not can_fail]


def test_each_promise_has_its_test() -> None:
    assert FILES and len(promised(PAGE.read_text())) >= 20
    assert mismatches(PAGE.read_text(), (path.read_text() for path in FILES)) == []


GOOD = """
## What is in scope

- **Gates are shut.** All of them,
  at night.

## What is not

- Rain.
"""
TEST = "def test_gates_are_shut(gate):\n    assert gate.shut\n"
MORE = "def test_more(gate):\n    print(gate)\n"
GATES, WINDOWS = "test_gates_are_shut", "test_windows_are_shut"


@pytest.mark.parametrize(
    ("page", "source", "found"),
    [
        (GOOD, TEST, []),
        (GOOD, "", [f"no test: {GATES}"]),
        (GOOD.replace("Gates", "Windows"), TEST, [f"no test: {WINDOWS}", f"no promise: {GATES}"]),
        (GOOD.replace("All", "All\n- Locks hold:"), TEST, ["no test: Locks hold: of them,"]),
        (GOOD.replace("- **", "- **Gates are shut.**\n- **"), TEST, [f"twice: {GATES}"]),
        (GOOD, TEST.replace("assert gate.shut", "print(gate.shut)"), [f"no check: {GATES}"]),
        (GOOD, TEST + MORE, ["no promise: test_more", "no check: test_more"]),
    ],
)
def test_planted_faults_are_found(page: str, source: str, found: list[str]) -> None:
    assert mismatches(page, [source]) == found
