"""Rules of the abstraction: who sets attributes on whose objects, and who looks behind bound methods.

As in `rules.py`, each rule reads a folder and returns its findings, so that it can be run on a planted fault too.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.house.rules import finding, parsed

# ------------------------------------------------------------------ bound methods

MAY_LOOK_BEHIND = ("binding/link.py", "plugins/discovery.py", "plugins/old_kernels.py")  # the last binds for 0.1


def looks_behind_methods(*roots: Path) -> list[str]:
    """`__self__`, `__func__`, `MethodType` and `ismethod` outside of where kernels are bound and plugins discovered."""
    found = []
    for path, tree in parsed(*roots):
        if path.as_posix().endswith(MAY_LOOK_BEHIND):
            continue
        for node in ast.walk(tree):
            texts = [node.attr] if isinstance(node, ast.Attribute) else []
            texts = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else texts
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts = [text for text in node.value.split(".") if text in ("__self__", "__func__")]
            for text in {"__self__", "__func__", "MethodType", "ismethod"}.intersection(texts):
                found.append(
                    finding(path, getattr(node, "lineno", 1), f"looks behind a bound method ({text}); ask binding")
                )
    return found


# ------------------------------------------------------------------ attributes of others

SHARED_TYPES = frozenset({"Scratch", "LayerKV", "KVCache", "QTensor", "ModelOutput"})
"""Classes of what many functions share. Nobody sets their attributes, except who has just made the object."""
_HINT = "declare it in the object's class, return it, or keep it in once(key, make)"
_READS = ("items", "values", "keys", "get", "copy")
_PURE = ("list", "sorted", "set", "dict", "tuple", "len", "iter", "frozenset")
_PASSES_THROUGH = ("replace", "copy", "deepcopy", "filter", "zip", "enumerate", "list", "sorted", "reversed", "next")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Types = frozenset[str]
NONE: Types = frozenset()
UNKNOWN: Types = frozenset({"?"})
"""A value whose class nothing tells: who sets its attribute may set a tensor's."""
_TENSORS = frozenset({"Tensor", "Parameter", "Buffer"})


@dataclass
class _Class:
    bases: set[str] = field(default_factory=set)
    declared: set[str] = field(default_factory=set)


class _Index:
    """The classes of a tree with the attributes that they declare, and the types of attributes and returned values."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.classes: dict[str, _Class] = {}
        self.types: dict[str, set[str]] = {}
        trees = list(trees)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                self._add_class(node)
        for node in nodes:
            if isinstance(node, Function) and node.returns is not None:
                self.types.setdefault(node.name, set()).update(self.mentioned(node.returns))
            elif isinstance(node, ast.AnnAssign):
                name = getattr(node.target, "attr", None) or getattr(node.target, "id", "")
                self.types.setdefault(name, set()).update(self.mentioned(node.annotation))
        for tree in trees:
            for scope in _scopes(tree, self):
                for node in scope.nodes:
                    if isinstance(node, ast.Assign) and not isinstance(scope.node, ast.Module):
                        for target, value in pairs(node):
                            if isinstance(target, ast.Attribute) and scope.is_own(target.value):
                                self.types.setdefault(target.attr, set()).update(scope.types_of(value) - UNKNOWN)

    def _add_class(self, node: ast.ClassDef) -> None:
        entry = self.classes.setdefault(node.name, _Class())
        entry.bases |= {re.split(r"\W", ast.unparse(base).partition("[")[0])[-1] for base in node.bases}
        for statement in node.body:
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            names = {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}
            entry.declared |= names
            if names & {"_fields_", "__slots__"}:  # C structures, and objects without a dict, name them in strings
                entry.declared |= {x.value for x in ast.walk(statement) if isinstance(x, ast.Constant)}
            if isinstance(statement, Function):
                if any(ast.unparse(decorator).endswith(".setter") for decorator in statement.decorator_list):
                    entry.declared.add(statement.name)
                own = statement.args.args[0].arg if statement.args.args else ""
                entry.declared |= {
                    x.attr
                    for x in ast.walk(statement)
                    if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and name_of(x.value) == own
                }

    def mentioned(self, annotation: ast.AST) -> Types:
        """The classes of the tree in an annotation; `UNKNOWN` too if a member of a union names none of them."""
        found = frozenset(re.findall(r"\w+", ast.unparse(annotation))) & self.classes.keys()
        members = ast.unparse(annotation).strip("'").split(" | ")
        if ast.unparse(annotation).partition("[")[0].endswith("Union"):
            members = [ast.unparse(each) for each in getattr(annotation.slice, "elts", ())]
        whole = all(member.count("[") == member.count("]") for member in members)
        strange = [x for x in members if x != "None" and not self.classes.keys() & set(re.findall(r"\w+", x))]
        return found | UNKNOWN if found and whole and strange else found

    def ancestors(self, name: str) -> set[str]:
        found, todo = set(), [name]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self.classes[name].bases if name in self.classes else ()
        return found

    def declares(self, types: Types, attribute: str, *, made_here: bool) -> bool:
        """Whether one of these classes has the attribute, and is not shared unless the function made the object."""
        if types & UNKNOWN:
            return False
        for name in types:
            family = self.ancestors(name)
            if family & _TENSORS:
                return False
            if (made_here or not family & SHARED_TYPES) and any(
                attribute in self.classes[each].declared for each in family if each in self.classes
            ):
                return True
        return False


class _Scope:
    """A module, class or function: its own statements, and what is known of the types of its names."""

    def __init__(self, node: ast.AST, index: _Index, parent: _Scope | None) -> None:
        self.node, self.index = node, index
        self.nodes = list(own_nodes(node))
        self.names: dict[str, Types] = dict(parent.names) if parent else {}
        self.made: set[str] = set()
        self.bound_otherwise: set[str] = set()
        inside = isinstance(node, Function) and parent is not None
        self.own: set[str] = set(parent.own) if inside and parent else set()
        if isinstance(node, Function):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            for argument in filter(None, every):
                self.names[argument.arg] = index.mentioned(argument.annotation) if argument.annotation else NONE
                self.bound_otherwise.add(argument.arg)
                self.own.discard(argument.arg)
            first = next(iter((*arguments.posonlyargs, *arguments.args)), None)
            if parent and isinstance(parent.node, ast.ClassDef) and first and first.arg in ("self", "cls"):
                self.names[first.arg] = frozenset({parent.node.name})
                if not index.ancestors(parent.node.name) & _TENSORS:
                    self.own.add(first.arg)
        unknown = {name for name in self.bound_otherwise if not self.names[name]}
        for _ in range(2):  # a name may be bound after it is used, in a loop
            for each in self.nodes:
                self._bind(each)
        for name in unknown | {x for each in self.nodes for x in self._bound_to_unknown(each)}:
            self.names[name] = self.names.get(name, NONE) | UNKNOWN
        self.made -= self.bound_otherwise

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target, value in pairs(node):
                self._bind_to(target, self.types_of(value))
                if isinstance(target, ast.Name):
                    (self.made if self._makes(value) else self.bound_otherwise).add(target.id)
        elif isinstance(node, ast.AnnAssign):
            self._bind_to(node.target, self.index.mentioned(node.annotation))
            if isinstance(node.target, ast.Name) and node.value is not None and self._makes(node.value):
                self.made.add(node.target.id)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._bind_to(node.target, self.types_of(node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_to(node.optional_vars, self.types_of(node.context_expr))
        elif isinstance(node, ast.NamedExpr):
            self._bind_to(node.target, self.types_of(node.value))

    def _bound_to_unknown(self, node: ast.AST) -> Iterator[str]:
        """Names that an assignment binds to a value of no known class."""
        if isinstance(node, ast.Assign):
            for target, value in pairs(node):
                if isinstance(target, ast.Name) and ast.unparse(value) != "None" and not self.types_of(value):
                    yield target.id

    def _bind_to(self, target: ast.AST, types: Types) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = self.names.get(target.id, NONE) | types
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._bind_to(each, types)

    def is_own(self, node: ast.AST) -> bool:
        return name_of(node) in self.own or ast.unparse(node) == "super()"

    def _makes(self, value: ast.AST) -> bool:
        """Whether an expression makes a new object of a class of the tree."""
        function = value.func if isinstance(value, ast.Call) else None
        is_class = isinstance(function, ast.Name) and (function.id in self.index.classes or function.id == "cls")
        return is_class or (isinstance(function, ast.Attribute) and function.attr == "__new__")

    def types_of(self, node: ast.AST | None) -> Types:
        """Classes of the tree that an expression's value, or an item of it, may have; as far as annotations tell."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or (frozenset({node.id}) if node.id in self.index.classes else NONE)
        if isinstance(node, ast.Attribute):
            return frozenset(self.index.types.get(node.attr, ()))
        if isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.NamedExpr)):
            return self.types_of(node.value)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            if name in self.index.classes:
                return frozenset({name})
            if name == "cls":
                return self.names.get("cls", NONE)
            arguments = frozenset().union(*map(self.types_of, node.args)) - UNKNOWN
            if name in (*_PASSES_THROUGH, "__new__"):
                return arguments
            inside = self.types_of(node.func.value) - UNKNOWN if isinstance(node.func, ast.Attribute) else NONE
            return frozenset(self.index.types.get(name, ())) | inside
        parts = getattr(node, "elts", None) or getattr(node, "values", None) or ()
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            each = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            types = [self.types_of(x) or UNKNOWN for x in each if ast.unparse(x) != "None"]
            return frozenset().union(*types)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            parts = [node.elt]
        return frozenset().union(*map(self.types_of, filter(None, parts))) - UNKNOWN


def pairs(node: ast.Assign) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Target and value of each assignment, `a, b = c, d` as two."""
    for target in node.targets:
        both = isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, (ast.Tuple, ast.List))
        if both and len(target.elts) == len(node.value.elts):
            yield from zip(target.elts, node.value.elts)
        else:
            yield target, node.value


def name_of(node: ast.AST) -> str:
    """The identifier that an expression is; empty for all others."""
    return node.id if isinstance(node, ast.Name) else ""


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """What is inside, without what is inside functions and classes of its own."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (*Function, ast.ClassDef)):
            yield child
            yield from own_nodes(child)


def _scopes(tree: ast.AST, index: _Index, parent: _Scope | None = None) -> Iterator[_Scope]:
    scope = _Scope(tree, index, parent)
    yield scope
    for node in [*ast.iter_child_nodes(tree), *scope.nodes]:
        if isinstance(node, (*Function, ast.ClassDef)):
            yield from _scopes(node, index, scope)
    for node in scope.nodes:  # a function inside an `if` or a loop
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*Function, ast.ClassDef)):
                yield from _scopes(child, index, scope)


def attributes_on_others(*roots: Path, allowed: Mapping[str, str] | None = None) -> list[str]:
    """Attributes set on objects of others: whatever the way, and whatever the object is called.

    Fine are `self` and `cls` in a method, and an attribute that the object's class declares, where annotations and
    constructors tell the class; but never on what many functions share (`SHARED_TYPES`), unless the same function has
    made it. All else is a finding, among it every attribute of a tensor.

    Args:
        roots: folders to read.
        allowed: `end of path: target`, both with `*` -> why it is fine, mostly whose class it is outside this tree. An
            entry that no longer occurs is a finding too.
    """
    allowed, met, found = allowed or {}, set(), set()
    trees = list(parsed(*roots))
    index = _Index(tree for _, tree in trees)
    for path, tree in trees:
        defined = {node.name for node in ast.walk(tree) if isinstance(node, (*Function, ast.ClassDef))}
        for scope in _scopes(tree, index):
            for line, target, what in _set_in(scope, defined):
                reasons = [key for key in allowed if fnmatch.fnmatch(f"{path.as_posix()}: {target}", f"*{key}")]
                met.update(reasons)
                if not reasons:
                    found.add(finding(path, line, f"{what}: {_HINT}"))
    return sorted(found) + [f"{key}: allowed, and no longer there" for key in sorted(set(allowed) - met)]


def _set_in(scope: _Scope, defined: set[str]) -> Iterator[tuple[int, str, str]]:
    """Line, target and description of each attribute that a scope sets on another's object."""
    parents = {id(child): node for node in [scope.node, *scope.nodes] for child in ast.iter_child_nodes(node)}
    for node in scope.nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            named = node.attr in ("__name__", "__doc__", "__qualname__") and name_of(node.value) in defined
            made = name_of(node.value) in scope.made
            types = scope.types_of(node.value)
            if not (named or scope.is_own(node.value) or scope.index.declares(types, node.attr, made_here=made)):
                yield node.lineno, ast.unparse(node), f"sets {ast.unparse(node)}"
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = getattr(node, "attr", None) or getattr(node, "id", "")
            parent = parents.get(id(node))
            if name in ("setattr", "delattr", "__setattr__", "__delattr__"):
                called = isinstance(parent, ast.Call) and parent.func is node
                bound = isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("object", "type")
                of = node.value if bound else parent.args[0] if called and parent.args else None
                if of is None or not called or not scope.is_own(of):
                    text = ast.unparse(parent if called else node)
                    yield node.lineno, text, f"calls {text}"
            elif name == "__dict__" and isinstance(node, ast.Attribute) and not scope.is_own(node.value):
                yield from _written_dict(node, parents)
        elif isinstance(node, ast.Call) and node.args:
            first = node.args[0]
            of_dict = name_of(node.func) == "getattr" and "'__dict__'" in ast.unparse(node)
            if (name_of(node.func) == "vars" or of_dict) and not scope.is_own(first):
                yield from _written_dict(node, parents)


def _written_dict(node: ast.expr, parents: Mapping[int, ast.AST]) -> Iterator[tuple[int, str, str]]:
    """An object's dict, unless it is only read where it stands."""
    parent = parents.get(id(node))
    reads = isinstance(parent, ast.Attribute) and parent.attr in _READS
    reads |= isinstance(parent, ast.Call) and name_of(parent.func) in _PURE
    reads |= isinstance(parent, (ast.For, ast.comprehension, ast.Compare, ast.Starred))
    reads |= isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Load)
    if not reads:
        yield node.lineno, ast.unparse(node), f"takes {ast.unparse(node)} for more than reading"
