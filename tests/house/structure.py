"""Rules of structure: circles of imports, sizes, what may look behind what, and words that names must not have.

As in `rules.py`, each rule reads a folder and returns its findings, so that it can be run on a planted fault too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.rules import finding, python_files

MAX_FILES_IN_A_FOLDER = 20
MAX_CLASS_LINES = 300
MAX_PARAMETERS = 10
CODE_SUFFIXES = (".py", ".h", ".cpp", ".cu")


def _parsed(*roots: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in python_files(*roots):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


# ------------------------------------------------------------------ imports


def import_graph(*packages: Path) -> dict[str, set[str]]:
    """Module -> modules of these packages that it imports anywhere: in functions and under TYPE_CHECKING too."""
    files = {}
    for package in packages:
        for path in python_files(package):
            parts = path.relative_to(package.parent).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in files else node.module for name in inner}
        graph[module] = {name for name in found if name in files and name != module}
    return graph


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


def crowded_folders(*roots: Path, alike: tuple[str, ...] = ()) -> list[str]:
    """Folders with more than 20 code files; those in `alike` hold a list of files of one kind (families, cases)."""
    found = []
    for root in roots:
        for folder in sorted({path.parent for path in root.rglob("*") if path.suffix in CODE_SUFFIXES}):
            files = [path for path in folder.iterdir() if path.suffix in CODE_SUFFIXES]
            if len(files) > MAX_FILES_IN_A_FOLDER and not folder.as_posix().endswith(alike or ("\0",)):
                found.append(f"{folder}: {len(files)} code files; at most {MAX_FILES_IN_A_FOLDER} that are not alike")
    return found


def long_classes(*roots: Path) -> list[str]:
    """Classes over 300 lines."""
    return [
        finding(path, node.lineno, f"class {node.name} has {lines} lines; at most {MAX_CLASS_LINES}")
        for path, tree in _parsed(*roots)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_CLASS_LINES
    ]


def long_signatures(*roots: Path, device_code: tuple[str, ...] = ()) -> list[str]:
    """Public functions with more than 10 parameters. Paths that contain one of `device_code` hold kernels' bodies."""
    found = []
    for path, tree in _parsed(*roots):
        if any(part in path.as_posix() for part in device_code):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not re.match(r"_(?!_init__)", node.name):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                if count > MAX_PARAMETERS:
                    found.append(finding(path, node.lineno, f"{node.name} has {count} parameters: make a record"))
    return found


# ------------------------------------------------------------------ the abstraction

MAY_LOOK_BEHIND = ("binding/link.py", "plugins/discovery.py")


def looks_behind_methods(*roots: Path) -> list[str]:
    """`__self__` and `__func__` outside of where kernels are bound and plugins are discovered."""
    return [
        finding(path, node.lineno, f"looks behind a bound method ({node.attr}); ask binding for what you need")
        for path, tree in _parsed(*roots)
        if not path.as_posix().endswith(MAY_LOOK_BEHIND)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("__self__", "__func__")
    ] + [
        finding(path, node.lineno, f"looks behind a bound method ({node.value})")
        for path, tree in _parsed(*roots)
        if not path.as_posix().endswith(MAY_LOOK_BEHIND)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("__self__", "__func__")
    ]


_SHARED_TYPES = re.compile(r"\b(Tensor|Batch|LayerKV|KVCache|View)\b")
_SHARED_NAMES = frozenset({"batch", "kv", "logits", "view", "x", "hidden", "residual", "p", "cache"})
_HINT = "pass a typed result, or keep it in once(key, make)"


def attributes_on_results(*roots: Path) -> list[str]:
    """Attributes that a function sets on a tensor, batch, cache or view it was given or made: they get lost on a copy.

    A name counts as one of these by its annotation, by what it is assigned from (`torch.…`), or by its usual name.
    """
    found = []
    for path, tree in _parsed(*roots):
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                shared = _shared_names(function)
                found += [finding(path, line, what) for line, what in _set_on(function, shared)]
    return sorted(set(found))


def _shared_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    names = set(_SHARED_NAMES)
    for parameter in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if parameter.annotation is not None and _SHARED_TYPES.search(ast.unparse(parameter.annotation)):
            names.add(parameter.arg)
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and _SHARED_TYPES.search(ast.unparse(node.annotation)):
            names |= {node.target.id} if isinstance(node.target, ast.Name) else set()
        elif isinstance(node, ast.Assign) and re.match(r"torch\.|make_batch\(", ast.unparse(node.value)):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names - {"self", "cls"}


def _set_on(function: ast.AST, shared: set[str]) -> Iterator[tuple[int, str]]:
    def is_shared(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in shared

    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                on_shared = isinstance(target, ast.Attribute) and is_shared(target.value) and target.attr != "data"
                if on_shared or (isinstance(target, ast.Subscript) and _is_dict_of_another(target.value)):
                    yield node.lineno, f"sets {ast.unparse(target)}: {_HINT}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            on_shared = called in ("setattr", "object.__setattr__") and bool(node.args) and is_shared(node.args[0])
            in_dict = isinstance(node.func, ast.Attribute) and _is_dict_of_another(node.func.value)
            if on_shared or (in_dict and called.endswith((".setdefault", ".update", ".pop"))):
                yield node.lineno, f"{ast.unparse(node)}: {_HINT}"


def _is_dict_of_another(node: ast.AST) -> bool:
    """Whether an expression is `name.__dict__` of something else than `self`."""
    is_dict = isinstance(node, ast.Attribute) and node.attr == "__dict__"
    return is_dict and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def compares_op_names(*roots: Path, names: frozenset[str]) -> list[str]:
    """Comparisons with an op's name: an op says what it is by an attribute of its class.

    Args:
        roots: folders to read.
        names: the names of all ops.
    """
    found = []
    for path, tree in _parsed(*roots):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            parts = [x for side in sides for x in (getattr(side, "elts", None) or [side])]
            named = [x.value for x in parts if isinstance(x, ast.Constant) and x.value in names]
            about_ops = re.search(r"\b(op|kernel|child|site)\w*(\.name|\.op)?\b|\.name\b", ast.unparse(node))
            if named and about_ops:
                found.append(finding(path, node.lineno, f"compares an op's name ({', '.join(named)}): give Op a trait"))
    return found


# ------------------------------------------------------------------ words

BANNED_WORDS: dict[str, str] = {
    "asked": "requested",
    "asks": "requests",
    "chain": "layers, decoder_stack or model",
    "coded": "quantized",
    "codes": "quantized values, or quantizes_to",
    "crowd": "oversubscription",
    "crowded": "oversubscribed",
    "cut": "limit, truncate, chunk or slice",
    "cuts": "limits, chunks or slices",
    "door": "admission or gate",
    "ends": "end_tokens, boundaries or stops",
    "everybody": "all, or what they are",
    "fixed": "batch_invariant or constant",
    "gone": "closed, removed or lost",
    "guess": "estimate",
    "hand": "pass, attach or return",
    "handed": "given, or the type of what is passed",
    "kept": "stored, remaining or filtered",
    "let": "allow, or what it does",
    "likeliest": "argmax or top-k",
    "meant": "intended or requested",
    "nobody": "none",
    "offered": "available or supported",
    "offers": "supports",
    "riddle": "what it means",
    "room": "capacity, free blocks or arena",
    "said": "message or reason",
    "sixteens": "multiple_of_16",
    "somebody": "caller, user or request",
    "told": "explicit, reported or requested",
    "turn": "lock, order, repeat or chat message",
    "turns": "lock, order, repeats or chat messages",
    "uncoded": "not_quantized",
    "usual": "expected or default",
    "varied": "reorderable",
    "wanted": "requested",
    "wants": "requests",
    "weigh": "token_weights or compare",
    "whoever": "caller",
}
"""Words that nobody would search for, and what to say instead."""


def banned_names(*roots: Path, allowed: Mapping[str, str] | None = None) -> list[str]:
    """Names of modules, classes, functions, parameters and fields that contain a banned word.

    Args:
        roots: folders to read.
        allowed: names that may stay, each with its reason: an entry that no longer occurs is a finding too.
    """
    allowed = allowed or {}
    found, met = [], set()
    for path, tree in _parsed(*roots):
        for line, name in (*_defined(tree), (1, path.stem)):
            words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
            for word in words:
                if word not in BANNED_WORDS:
                    continue
                if name in allowed:
                    met.add(name)
                else:
                    found.append(finding(path, line, f"{name}: {word!r} says little; say {BANNED_WORDS[word]}"))
    return found + [f"{name}: allowed, and no longer there" for name in sorted(set(allowed) - met)]


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
