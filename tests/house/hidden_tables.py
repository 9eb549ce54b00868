"""Rules on state that outlives a call where no signature shows it: `_scratch`, and tables of modules and classes.

As in `rules.py`, each rule reads a folder and returns its findings, so that it can be run on a planted fault too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.abstraction import Function, name_of, own_nodes, pairs
from tests.house.rules import finding, parsed

_CHANGES = re.compile(r"__setitem__|setdefault|update|append|appendleft|extend|insert|add")
_TABLES = re.compile(r"[\[{]|(\w+\.)*(dict|list|set|deque|defaultdict|OrderedDict|Counter|Weak\w+)\(")
_ANY = re.compile("")


def touches_scratch(*roots: Path) -> list[str]:
    """`_scratch` anywhere but in `types/scratch.py`: others say `once(key, make)`."""
    return [
        finding(path, node.lineno, "touches _scratch: keep it in once(key, make)")
        for path, tree in parsed(*roots)
        if not path.as_posix().endswith("types/scratch.py")
        for node in ast.walk(tree)
        if getattr(node, "attr", None) == "_scratch" or (isinstance(node, ast.Constant) and node.value == "_scratch")
    ]


def hidden_tables(*roots: Path, allowed: Mapping[str, str] | None = None) -> list[str]:
    """Tables of modules and classes that functions fill: a way for one kernel to leave another something unseen.

    Args:
        roots: folders to read.
        allowed: `end of path: table` -> why it is fine. An entry that no longer occurs is a finding too.
    """
    allowed, met, found = allowed or {}, set(), []
    for path, tree in parsed(*roots):
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        modules = {
            alias.asname or alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
        }
        modules |= {node.name for node in classes}
        shared = modules | {name for node in (tree, *classes) for name in _names_bound_in(node)}
        shared |= {f"self.{name}" for node in classes for name in _names_bound_in(node, _TABLES)}
        functions = [node for node in ast.walk(tree) if isinstance(node, (*Function, ast.Lambda))]
        for line, table in (each for scope in functions for each in _tables_filled_in(scope, shared, modules)):
            reasons = [key for key in allowed if f"{path.as_posix()}: {table}".endswith(key)]
            met.update(reasons)
            if not reasons:
                found.append(finding(path, line, f"fills {table}, a table that outlives the call: return the value"))
    return sorted(set(found)) + [f"{key}: allowed, and no longer there" for key in sorted(set(allowed) - met)]


def _names_bound_in(scope: ast.AST, values: re.Pattern[str] = _ANY) -> Iterator[str]:
    """What a module or class binds to such values, and what it imports; a field without value is none."""
    for node in own_nodes(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = getattr(node, "targets", None) or [node.target]
            yield from map(name_of, targets if values.match(ast.unparse(node.value)) else ())
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def _tables_filled_in(scope: ast.AST, shared: set[str], modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each table that a function fills and did not make; `torch.add(x)` is no filling."""
    nodes = list(own_nodes(scope))
    arguments = scope.args
    local = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    aliases: dict[str, str] = {}
    for node in nodes:
        for target, value in pairs(node) if isinstance(node, ast.Assign) else ():
            if name_of(target) and name_of(value) in shared - local:
                aliases[name_of(target)] = name_of(value)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
    local -= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}

    def table(node: ast.AST) -> str:
        """The shared name at the root of `table[a][b]`, `module.table` or `Class.table`; else nothing."""
        while isinstance(node, (ast.Subscript, ast.Attribute)) or (
            isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("get", "setdefault")
        ):
            if re.sub(r"^cls\b", "self", ast.unparse(node)) in shared:
                return ast.unparse(node)
            node = node.func if isinstance(node, ast.Call) else node.value
        name = name_of(node)
        return aliases.get(name, "" if name in local or name not in shared else name)

    for node in nodes:
        filled = node.value if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else None
        if isinstance(node, ast.Call) and _CHANGES.fullmatch(getattr(node.func, "attr", "")):
            filled = node.func.value if name_of(node.func.value) not in modules else None
        if filled is not None and table(filled):
            yield node.lineno, table(filled)
