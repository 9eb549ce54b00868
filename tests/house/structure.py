"""Rules of structure: circles of imports, sizes of folders, classes and signatures, one home for each class name.

As in `rules.py`, each rule reads a folder and returns its findings, so that it can be run on a planted fault too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.rules import finding, parsed

MAX_FILES_IN_A_FOLDER = 20
MAX_FILES_IN_AN_ENGINE_PACKAGE = 12
MAX_CLASS_LINES = 300
MAX_PARAMETERS = 10
CODE_SUFFIXES = (".py", ".h", ".cpp", ".cu")


# ------------------------------------------------------------------ imports


def import_graph(*packages: Path) -> dict[str, set[str]]:
    """Module -> modules of these packages that it imports anywhere: in functions and under TYPE_CHECKING too.

    Relative imports count, and `import_module` and `__import__` of a constant.
    """
    files = {}
    for package in packages:
        for path, tree in parsed(package):
            parts = path.relative_to(package.parent).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path, tree
    graph: dict[str, set[str]] = {}
    for module, (path, tree) in files.items():
        found: set[str] = set()
        inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node.level * "." + (node.module or ""), inside)
                inner = {f"{source}.{alias.name}" for alias in node.names}
                found |= {name if name in files else source for name in inner}
            elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
                texts = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
                found |= {_absolute(texts[0], texts[1] if len(texts) > 1 else inside)} if texts else set()
        graph[module] = {name for name in found if name in files and name != module}
    return graph


def _absolute(name: str, package: str) -> str:
    """The full name of a module that code in a package calls `name`, which begins with a dot a level."""
    below = name.lstrip(".")
    levels = len(name) - len(below)
    parts = package.split(".") if levels else []
    return ".".join((*parts[: len(parts) - levels + 1], *filter(None, (below,))))


def import_circles(*packages: Path) -> list[str]:
    """Circles of modules. A package's `__init__` that gathers names of its own modules closes none by that."""
    graph = import_graph(*packages)
    graph = {a: {b for b in to if not a.startswith(f"{b}.") and not b.startswith(f"{a}.")} for a, to in graph.items()}
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: Mapping[str, set[str]], into: list[str]) -> None:
        stack = [(start, iter(sorted(edges.get(start, ()))))]
        seen.add(start)
        while stack:
            node, following = stack[-1]
            for other in following:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(sorted(edges.get(other, ())))))
                    break
            else:
                into.append(node)
                stack.pop()

    for module in sorted(graph):
        if module not in seen:
            visit(module, graph, order)
    backward: dict[str, set[str]] = {module: set() for module in graph}
    for module, to in graph.items():
        for other in to:
            backward[other].add(module)
    seen.clear()
    circles = []
    for module in reversed(order):
        if module not in seen:
            members: list[str] = []
            visit(module, backward, members)
            if len(members) > 1:
                circles.append(f"imports run in a circle: {', '.join(sorted(members))}")
    return circles


# ------------------------------------------------------------------ sizes


def crowded_folders(*roots: Path, alike: tuple[str, ...] = (), most: int = MAX_FILES_IN_A_FOLDER) -> list[str]:
    """Folders with more than `most` code files; those in `alike` hold a list of files of one kind (families, cases)."""
    found = []
    for root in roots:
        for folder in sorted({path.parent for path in root.rglob("*") if path.suffix in CODE_SUFFIXES}):
            files = [path for path in folder.iterdir() if path.suffix in CODE_SUFFIXES]
            if len(files) > most and not folder.as_posix().endswith(alike or ("\0",)):
                found.append(f"{folder}: {len(files)} code files; at most {most} that are not alike")
    return found


def long_classes(*roots: Path) -> list[str]:
    """Classes over 300 lines."""
    return [
        finding(path, node.lineno, f"class {node.name} has {lines} lines; at most {MAX_CLASS_LINES}")
        for path, tree in parsed(*roots)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_CLASS_LINES
    ]


DEVICE_CODE = re.compile(r"^(?:\w+\.)*(?:jit|constexpr_function|aggregate)$")
"""Decorators of Triton and Gluon: the body is device code, whose arguments are pointers, strides and sizes."""


def long_signatures(*roots: Path) -> list[str]:
    """Public functions and lambdas with more than 10 parameters, `*args` and `**kwargs` among them; not device code."""
    found = []
    for path, tree in parsed(*roots):
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            name = getattr(node, "name", "lambda")
            decorators = [ast.unparse(each).partition("(")[0] for each in getattr(node, "decorator_list", ())]
            if re.match(r"_(?!_init__)", name) or any(map(DEVICE_CODE.match, decorators)):
                continue
            arguments = node.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            names += [a.arg for a in (arguments.vararg, arguments.kwarg) if a]
            count = len([each for each in names if each not in ("self", "cls")])
            if count > MAX_PARAMETERS:
                found.append(finding(path, node.lineno, f"{name} has {count} parameters: make a record"))
    return found


# ------------------------------------------------------------------ names of classes


def shared_class_names(*roots: Path, allowed: Mapping[str, str] | None = None) -> list[str]:
    """Class names, nested and private ones included, that several modules define; `_Line` is the same as `Line`.

    Args:
        roots: folders to read.
        allowed: names that may have several homes, each with its reason: an entry that has one is a finding too.
    """
    homes: dict[str, set[str]] = {}
    for path, tree in parsed(*roots):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), set()).add(finding(path, node.lineno, "")[:-2])
    allowed = allowed or {}
    several = {
        name: sorted(places)
        for name, places in homes.items()
        if len({place.rpartition(":")[0] for place in places}) > 1
    }
    found = [
        f"{places[0]}: class {name} is also in {', '.join(places[1:])}"
        for name, places in sorted(several.items())
        if name not in allowed
    ]
    return found + [f"{name}: allowed, and has one home" for name in sorted(set(allowed) - set(several))]


def _defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each class, function, parameter, field and constant."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield argument.lineno, argument.arg
        if isinstance(node, (ast.ClassDef, ast.Module)):
            for statement in node.body:
                targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield statement.lineno, target.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
