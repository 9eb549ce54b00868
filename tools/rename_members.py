"""Renames attributes, methods, fields and keyword arguments in Python source where their class is clear (`rename.py`).

A class is clear from the file alone: by its name, by a subclass of it, by `self` in their bodies, by a variable that is
annotated with it or assigned from it, and by `replace(variable, ...)` of one. Strings and comments are left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

COLLECTORS = {"Kernel": "Kernels"}
"""Class -> class whose instances are called with the first one's keywords: `kernels = Kernels()`, `@kernels(...)`."""
FORWARDING = ("replace", "partial")
"""Functions whose first argument decides whose keywords the others are."""


class MemberRow(Protocol):
    """A row of kind "member", "keyword" or "gone"."""

    @property
    def kind(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...
    @property
    def owners(self) -> tuple[str, ...]: ...
    @property
    def advice(self) -> str: ...


@dataclass(frozen=True)
class Hint:
    """A place that the user has to judge: in a file, at a line, with words."""

    path: str
    line: int
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words}"


@dataclass(frozen=True)
class Use:
    """Where a name stands: line from 1, and columns in bytes; `clear` where its class is known."""

    line: int
    start: int
    end: int
    clear: bool


@dataclass
class Scope:
    """What is known of the names of a module, class or function: variable -> class."""

    classes: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


def carry_members(rows: Sequence[MemberRow], text: str, path: str) -> tuple[str, list[Hint]]:
    """A file's source with members and keywords renamed, and the places that are left to the user.

    Args:
        rows: of the tables; owners have the names that the file uses before any renaming.
        text: the file's source; what cannot be parsed is returned unchanged.
        path: of the file, for hints.
    """
    present = [row for row in rows if re.search(rf"\b{row.old}\b", text)]
    hints: list[Hint] = []
    for row in present:
        try:
            tree = ast.parse(text)
        except SyntaxError:
            break
        lines = text.encode().splitlines(keepends=True)
        for use in sorted(_Finder(row, tree).uses, key=lambda use: (use.line, use.start), reverse=True):
            owner = " or ".join(dict.fromkeys(row.owners))
            if row.kind == "gone":
                perhaps = "" if use.clear else f", if it is a member of {owner}"
                hints.append(Hint(path, use.line, f"{row.old} of {owner} is gone{perhaps}: {row.advice}"))
            elif use.clear:
                line = lines[use.line - 1]
                lines[use.line - 1] = line[: use.start] + row.new.encode() + line[use.end :]
            else:
                hints.append(Hint(path, use.line, f"{row.old} is {row.new} now, if it is a member of {owner}"))
        text = b"".join(lines).decode()
    return text, sorted(hints, key=lambda hint: hint.line)


def _name(node: ast.AST | None) -> str:
    """The last word of a dotted name or of what is called or subscripted; of an annotation in quotes too."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rpartition(".")[2]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # `X | None`
        return _name(node.left)
    return ""


def _made_by(call: ast.Call) -> str:
    """The class of a call's result, if what is called has the name of a class; otherwise ""."""
    name = _name(call.func)
    return name if name[:1].isupper() else ""


class _Finder(ast.NodeVisitor):
    """Finds the uses of one row's name.

    Args:
        row: the row.
        tree: the file's.
    """

    def __init__(self, row: MemberRow, tree: ast.Module) -> None:
        self.row = row
        self.owners = {*row.owners}
        self.collectors = {COLLECTORS[owner] for owner in row.owners if owner in COLLECTORS}
        self.uses: list[Use] = []
        for node in ast.walk(tree):  # subclasses, in the order of their definition
            if isinstance(node, ast.ClassDef) and self.owners & {_name(base) for base in node.bases}:
                self.owners.add(node.name)
        names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.alias, ast.ClassDef))}
        self.mentioned = bool(self.owners & {name.rpartition(".")[2] for name in names})
        self.scopes = [self._scope(tree.body)]
        self.visit(tree)

    # -- what is known of names

    def _scope(self, body: Sequence[ast.stmt], arguments: ast.arguments | None = None) -> Scope:
        scope = Scope()
        for node in _own_statements(body):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                scope.modules |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                scope.classes[node.target.id] = _name(node.annotation)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        scope.classes[target.id] = _made_by(node.value)
        if arguments is not None:
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                scope.classes[argument.arg] = _name(argument.annotation)
        return scope

    def _class_of(self, node: ast.expr) -> str | None:
        """The class of a value, "" if that is unknown, None if the value is a module or another imported thing."""
        if isinstance(node, ast.Call):
            if _name(node.func) in FORWARDING and node.args:
                return self._class_of(node.args[0])
            return _made_by(node)
        if isinstance(node, ast.Name):
            if node.id in self.owners:
                return node.id
            for scope in reversed(self.scopes):
                if node.id in scope.classes:
                    return scope.classes[node.id]
                if node.id in scope.modules:
                    return None
        return _name(node) if _name(node) in self.owners else ""

    # -- visits

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Fields and methods of the class, if it is an owner; then its body, in which `self` is one."""
        if node.name in self.owners and self.row.kind != "keyword":
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == self.row.old:
                    words = "async def " if isinstance(item, ast.AsyncFunctionDef) else "def "
                    self._add(item.lineno, item.col_offset + len(words), clear=True)
                for target in item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]:
                    if isinstance(target, ast.Name) and target.id == self.row.old:
                        self._add(target.lineno, target.col_offset, clear=True)
        own = Scope({"self": node.name, "cls": node.name})
        self.scopes.append(own)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A function's body, with what is known of its parameters and variables."""
        scope = self._scope(node.body, node.args)
        for first in ("self", "cls"):
            if first in scope.classes and not scope.classes[first]:
                del scope.classes[first]  # known by the class
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.scopes.append(scope)
        for part in (node.args, *([node.returns] if node.returns else []), *node.body):
            self.visit(part)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`value.old`."""
        if node.attr == self.row.old and self.row.kind != "keyword":
            found = self._class_of(node.value)
            if found in self.owners or (found == "" and self.mentioned):
                end = node.end_col_offset or 0
                self._add(node.end_lineno or 0, end - len(self.row.old.encode()), clear=found in self.owners)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`Owner(old=...)`, `replace(value, old=...)`, and the call of a collector."""
        called = _name(node.func)
        clear = called in self.owners
        if self.row.kind != "keyword" and called in FORWARDING and node.args:
            clear = _name(node.args[0]) in self.owners or self._class_of(node.args[0]) in {
                *self.owners,
                *self.collectors,
            }
        if self.collectors and isinstance(node.func, ast.Name):
            clear = clear or self._class_of(node.func) in self.collectors
        for keyword in node.keywords:
            if keyword.arg == self.row.old and (clear or (called == FORWARDING[0] and self.mentioned)):
                self._add(keyword.lineno, keyword.col_offset, clear=clear)
        self.generic_visit(node)

    def _add(self, line: int, start: int, *, clear: bool) -> None:
        self.uses.append(Use(line, start, start + len(self.row.old.encode()), clear))


def _own_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of its branches and loops, without those of functions and classes in it."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for inner in ("body", "orelse", "finalbody"):
            yield from _own_statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _own_statements(handler.body)
