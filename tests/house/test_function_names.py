"""Functions of core and backends are named by a verb and what it acts on; public predicates read as sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from inferplane.ops import OPS
from tests.house.rules import REPOSITORY, finding, none, plant, python_files

CODE = (REPOSITORY / "core" / "inferplane", *sorted((REPOSITORY / "backends").glob("*/inferplane_*")))

VERBS_IN_ED = frozenset({"embed", "feed", "need", "seed", "shed", "speed"})
PARTICIPLES = frozenset(
    """
    begun bound broken brought chosen dealt drawn driven fallen felt found frozen given gone grown heard held hidden
    known laid left lent lost made meant met paid said seen sent shown sold spent stolen taken thought told understood
    won worn written
    """.split()  # noqa: SIM905 - a list of quoted words is hard to read
)
"""Participles without -ed that are no present tense as well: `read`, `set`, `cut`, `put`, `split`, `run` are verbs."""
PREDICATES = frozenset({"are", "is", "has", "can", "needs", "may", "must", "should", "was", "does"})
ACTIONS = frozenset({"admit", "agree", "extend", "multiply", "push", "share", "wait"})
"""Verbs of functions that act and return whether that worked."""
ALLOWED = {
    "composed_kernels": "promised: the kernels composed from torch's operators",
    "paged_layout": "promised: a paged layout is a word of the glossary",
    "grouped_query_attention": "the part's name, as all functions of models/parts have",
    "flag": "as `size`, `number` and the other typed entries of a Config",
}
_EXEMPT = re.compile(
    r"\b(classmethod|property|abstractproperty|cached_property|jit|fixture|KERNELS|kernels|declare\w*|overload|builtin)\b"
)


def functions_without_verb(
    *roots: Path, ops: frozenset[str] = frozenset(), allowed: Mapping[str, str] | None = None
) -> list[str]:
    """Functions whose first word is a past participle, and public predicates that do not read as a sentence.

    Args:
        roots: folders to read.
        ops: names of ops: a kernel has the name of its op, with what is special about it behind.
        allowed: names that may stay, each with its reason; one that no longer occurs is a finding too.
    """
    found, met = [], set()
    for path in python_files(*roots):
        for node in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            what = _misnamed(node)
            if what and not node.name.lstrip("_").startswith(tuple(ops) or ("\0",)):
                if node.name in (allowed or {}):
                    met.add(node.name)
                else:
                    found.append(finding(path, node.lineno, f"{node.name}: {what}"))
    return found + [f"{name}: allowed, and no longer there" for name in sorted({*(allowed or {})} - met)]


def _misnamed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    word = node.name.lstrip("_").split("_")[0]
    if (word.endswith("ed") and word not in VERBS_IN_ED) or word in PARTICIPLES:
        return f"{word!r} is a participle; begin with a verb (list_, find_, make_, check_)"
    is_predicate = node.returns is not None and ast.unparse(node.returns) == "bool"
    if is_predicate and node.name[0] != "_" and word not in PREDICATES | ACTIONS and not word.endswith("s"):
        return "a predicate begins with is_, has_, can_, needs_, may_ or a verb such as fits_"
    return ""


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, without those inside of functions, properties, kernels and other constructors."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = " ".join(ast.unparse(decorator) for decorator in child.decorator_list)
            if not _EXEMPT.search(decorators):
                yield child
        else:
            yield from _functions(child)


def test_functions_are_named_by_verbs():
    none(functions_without_verb(*CODE, ops=frozenset(OPS), allowed=ALLOWED))


def test_participles_and_adjectives_are_found(tmp_path):
    faults = ("stored", "hidden_rows", "known", "gated", "told_of", "expanded_scale", "_packed")
    for number, name in enumerate(faults):
        plant(tmp_path, f"class A:\n    def {name}(self): ...\n", f"fault{number}.py")
    plant(tmp_path, "def ready() -> bool: ...\ndef same_name(a, b) -> bool: ...\n", "predicate.py")
    found = functions_without_verb(tmp_path, ops=frozenset({"gated_mlp"}))
    assert len(found) == len(faults) + 2, found
    right = (
        "def read_all(): ...\ndef split(): ...\ndef embed(): ...\ndef is_ready() -> bool: ...\n"
        "def fits() -> bool: ...\n"
        "def gated_mlp_fp8(): ...\ndef _ready() -> bool: ...\ndef extend() -> bool: ...\n"
        "class B:\n    @property\n    def stored(self): ...\n    @classmethod\n    def shared(cls): ...\n"
        "@triton.jit\ndef hidden(x): ...\n"
    )
    for path in tmp_path.glob("*.py"):
        path.unlink()
    none(functions_without_verb(plant(tmp_path, right), ops=frozenset({"gated_mlp"})))
    assert functions_without_verb(tmp_path, allowed={"old": "a reason"})[-1] == "old: allowed, and no longer there"
