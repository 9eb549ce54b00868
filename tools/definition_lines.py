"""Count the lines of functions, classes and constants that some functions alone need, across modules and packages."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from model_lines import ImportGraph, Lines, find_code


class Definition(NamedTuple):
    """A name that a module defines at its top level."""

    module: str
    name: str


class Definitions:
    """Which definitions of some packages name which others, read from their source; nothing is executed.

    Args:
        graphs: package -> the graph of its modules.
    """

    def __init__(self, graphs: Mapping[str, ImportGraph]) -> None:
        self.graphs = graphs
        self._nodes = cache(self._find_nodes)
        self._imports = cache(self._find_imports)

    def own(self, roots: Collection[Definition], others: Iterable[Definition]) -> set[Definition]:
        """`roots`, and what they need and `others` do not."""
        return {*roots} | (self.reach(roots) - self.reach(others))

    def reach(self, roots: Iterable[Definition]) -> set[Definition]:
        """The definitions that some name, directly or through others, and themselves."""
        found: set[Definition] = set()
        todo = [*roots]
        while todo:
            item = todo.pop()
            if item in found:
                continue
            if item.name in self._nodes(item.module):
                found.add(item)
                todo += self._named(item)
            elif item.name in (imported := self._imports(item.module)):  # passed on
                todo.append(imported[item.name])
        return found

    def count(self, items: Iterable[Definition]) -> Lines:
        """The lines of some definitions, with their decorators; those of imports are not among them."""
        every, code = set[tuple[str, int]](), set[tuple[str, int]]()
        for module, name in items:
            with_code = find_code(self._text(module))
            for node in self._nodes(module)[name]:
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                lines = {*range(first, (node.end_lineno or first) + 1)}
                every |= {(module, line) for line in lines}
                code |= {(module, line) for line in lines & with_code}
        return Lines(len({module for module, _ in every}), len(every), len(code))

    def _graph(self, module: str) -> ImportGraph | None:
        return self.graphs.get(module.partition(".")[0])

    def _text(self, module: str) -> str:
        return self.graphs[module.partition(".")[0]].files[module].read_text(encoding="utf-8")

    def _find_nodes(self, module: str) -> dict[str, list[ast.stmt]]:
        """The statements at a module's top level that define each name."""
        graph = self._graph(module)
        out: dict[str, list[ast.stmt]] = {}
        if graph is None or module not in graph.files:
            return out
        for node in ast.parse(self._text(module)).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                out.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                for name in names:
                    out.setdefault(name, []).append(node)
        return out

    def _find_imports(self, module: str) -> dict[str, Definition]:
        """What each name is that a module imports from the packages; of a module, it has no name."""
        graph = self._graph(module)
        out: dict[str, Definition] = {}
        if graph is None or module not in graph.files:
            return out
        for node in ast.walk(ast.parse(self._text(module))):
            if isinstance(node, ast.ImportFrom):
                base = graph.base(module, node)
                for alias in node.names:
                    if (other := self._graph(base)) and (found := other.definer(base, alias.name)):
                        is_module = found == f"{base}.{alias.name}"
                        out[alias.asname or alias.name] = Definition(found, "" if is_module else alias.name)
        return out

    def _named(self, item: Definition) -> Iterable[Definition]:
        here, imported = self._nodes(item.module), self._imports(item.module)
        for statement in here[item.name]:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    yield imported.get(node.id, Definition(item.module, node.id))
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    whole = imported.get(node.value.id)
                    if whole is not None and not whole.name:
                        yield Definition(whole.module, node.attr)
