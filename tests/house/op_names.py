"""The rule that code decides by what an op's class says of itself, never by the op's name.

As in `rules.py`, it reads a folder and returns its findings, so that it can be run on a planted fault too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.abstraction import Function, name_of, pairs
from tests.house.rules import finding, parsed

# `op.name`, `kernel.op`, `site.op.name`, `entry["op"]`, `type(op).__name__`: an op's name, or a kernel's op.
_OP_NAME = re.compile(
    r"(\b(\w*op|child|parent|site)(\[.*\]|\(.*\))?\.name|\.op|\btype\(.*\)\.__(qual)?name__"
    r"|\.__class__\.__(qual)?name__|\bgetattr\(.*, '(name|op)'\)|\['op'\]|\.(get|pop)\('op'.*\))$"
)
_ABOUT_OPS = re.compile(r"\b(op|kernel|child|site)\w*(\.name|\.op)?\b|\.name\b|\['(name|op)'\]")
_STRING_METHODS = re.compile(
    r"__(contains|eq|ne)__|count|r?(find|index|partition|split)|startswith|endswith|remove(prefix|suffix)"
)
_BY_NAME = {"getattr": 1, "hasattr": 1, "attrgetter": 0, "methodcaller": 0}
"""Function -> which of its arguments is the name of an attribute."""
_NAMESPACES = re.compile(r"^(globals|locals|vars)\(.*\)$|\.__dict__$")


def compares_op_names(*roots: Path, names: frozenset[str], allowed: tuple[str, ...] = ()) -> list[str]:
    """Whatever decides by an op's name or its class's name: an op says what it is by an attribute of its class.

    Comparisons, `in`, `match`, methods of strings and sets, tables indexed by names, attributes called by names, and
    parts of names; with names as literals, as constants of modules and classes, and as a function's own constants and
    defaults.

    Args:
        roots: folders to read.
        names: the names of all ops.
        allowed: ends of paths of files that may: those that carry old plugins over.
    """
    found = set()
    trees = list(parsed(*roots))
    shared = {
        name: value for _, tree in trees for name, value in _constants_of(tree, names, (ast.Module, ast.ClassDef))
    }
    parts = frozenset(part for name in names for part in (name, *name.split("_")) if len(part) > 2)
    for path, tree in trees:
        if allowed and path.as_posix().endswith(allowed):
            continue
        aliases = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target, value in pairs(node)
            if isinstance(target, ast.Name) and target.id != "op" and _OP_NAME.search(ast.unparse(value))
        }
        constants = shared | dict(_constants_of(tree, names, Function))
        for node in ast.walk(tree):
            what = _decides_by_name(node, names, parts, constants, aliases)
            if what:
                found.add(finding(path, node.lineno, f"decides by an op's name ({what}): give Op a trait"))
    return sorted(found)


def _constants_of(tree: ast.Module, names: frozenset[str], scopes: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    """Constants and defaults that hold names of ops, in scopes of these kinds, with one of the names."""
    for scope in ast.walk(tree):
        if not isinstance(scope, scopes):
            continue
        bound = []
        for node in ast.walk(scope) if isinstance(scope, Function) else scope.body:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            bound += [(target, getattr(node, "value", None)) for target in targets]
        if isinstance(scope, Function):
            arguments = scope.args
            places = [*arguments.posonlyargs, *arguments.args]
            bound += zip(places[len(places) - len(arguments.defaults) :], arguments.defaults)
            bound += zip(arguments.kwonlyargs, arguments.kw_defaults)
        for target, value in bound:
            if isinstance(value, ast.Call) and name_of(value.func) in ("frozenset", "tuple", "set", "MappingProxyType"):
                value = value.args[0] if value.args else None
            held = {x.value for x in _strings(value) if x.value in names}
            name = target.arg if isinstance(target, ast.arg) else name_of(target)
            if name and held:
                yield name, min(held)


def _strings(node: ast.AST | None) -> list[ast.Constant]:
    """A string, or the strings of a literal collection; of a table its keys."""
    parts = [node] if not isinstance(node, ast.Dict) else node.keys
    parts = getattr(node, "elts", None) or parts
    return [x for x in parts if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def _decides_by_name(
    node: ast.AST, names: frozenset[str], parts: frozenset[str], constants: Mapping[str, str], aliases: set[str]
) -> str:
    """The names by which a node decides; empty if by none."""

    def is_name(expression: ast.AST) -> bool:
        """Whether it is a name of an op, or made of one: a part of it, its lower case."""
        return any(
            name_of(each) in aliases
            or (isinstance(each, (ast.Attribute, ast.Call, ast.Subscript)) and _OP_NAME.search(ast.unparse(each)))
            for each in ast.walk(expression)
        )

    def held(expression: ast.AST) -> list[str]:
        last = getattr(expression, "attr", None) or getattr(expression, "id", "")
        own = [x.value for x in _strings(expression) if x.value in names]
        return own or ([f"{last}: {constants[last]}, ..."] if last in constants else [])

    def has_part(*expressions: ast.AST) -> bool:
        """Whether a literal is a name of an op, or a word or several of one, such as `mla_` or `:linear`."""
        return any(x.value.strip(":_.*/- ") in parts for each in expressions for x in _strings(each))

    def is_any_name(*expressions: ast.AST) -> bool:
        """Whether one is somebody's name, perhaps an op's."""
        inside = (x for each in expressions for x in ast.walk(each))
        return any(isinstance(x, ast.Attribute) and x.attr == "name" for x in inside)

    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        named = [name for side in sides for name in held(side)]
        if named and (any(map(is_name, sides)) or _ABOUT_OPS.search(ast.unparse(node))):
            return ", ".join(named)
        if (any(map(is_name, sides)) and any(map(_strings, sides))) or (is_any_name(*sides) and has_part(*sides)):
            return ast.unparse(node)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.Sub)):
        if (is_name(node.left) and held(node.right)) or (is_name(node.right) and held(node.left)):
            return ast.unparse(node)
    elif isinstance(node, ast.Subscript):
        of = ast.unparse(node.value)
        if (is_name(node.slice) and (held(node.value) or _NAMESPACES.search(of))) or (of == "OPS" and held(node.slice)):
            return ast.unparse(node)
    elif isinstance(node, ast.Call):
        called, arguments = node.func, node.args
        at = _BY_NAME.get(getattr(called, "attr", None) or name_of(called), len(arguments))
        if any(map(is_name, arguments[at : at + 1])):
            return ast.unparse(node)
        if isinstance(called, ast.Attribute):
            of = called.value
            is_string = is_name(of) or (is_any_name(of) and has_part(*arguments))
            if is_string and _STRING_METHODS.fullmatch(called.attr):
                return ast.unparse(node)
            if (held(of) and any(map(is_name, arguments))) or (is_name(of) and any(map(held, arguments))):
                return ast.unparse(node)
            by_pattern = name_of(of) in ("re", "fnmatch", "operator")
            if by_pattern and any(map(is_name, arguments)) and any(map(_strings, arguments)):
                return ast.unparse(node)
    elif isinstance(node, ast.Match):
        patterns = [x.value for case in node.cases for x in ast.walk(case.pattern) if isinstance(x, ast.MatchValue)]
        named = [name for value in patterns for name in held(value)]
        if (named and _ABOUT_OPS.search(ast.unparse(node.subject))) or (is_name(node.subject) and patterns):
            return ", ".join(named) or ast.unparse(node.subject)
    return ""
