"""Count the lines of a model's code in a Python package: the model's own files, and those that no other model imports.

Run on another project's unpacked wheel it prints the JSON that docs/models-across-vendors.md is made of:

    python tools/model_lines.py UNPACKED-WHEEL > tools/peers/vllm.json
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

VLLM_MODELS = ("vllm.models", "vllm.model_executor.models")
VLLM_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "deepseek_v32": ("vllm.models.deepseek_v32",),
    "glm_moe_dsa": ("vllm.models.deepseek_v32",),
    "deepseek_v4": ("vllm.models.deepseek_v4",),
    "kimi_linear": ("vllm.models.kimi_k3",),
    "hy_v3": ("vllm.model_executor.models.hy_v3", "vllm.model_executor.models.hy_v3_mtp"),
    "mimo_v2_flash": ("vllm.model_executor.models.mimo_v2", "vllm.model_executor.models.mimo_v2_mtp"),
    "longcat_flash": ("vllm.model_executor.models.longcat_flash", "vllm.model_executor.models.longcat_flash_mtp"),
}
"""Family, by its name here -> the modules, or folders of modules, that vLLM's registry names for its architecture."""
VLLM_HEIRS = {"vllm.models.deepseek_v4": ("vllm.models.deepseek_v41",)}
"""Models that are made of another one's files, so that their imports do not make these common property."""


@dataclass(frozen=True)
class Lines:
    """Lines of some files: all of them, and those with code (neither blank, nor a comment, nor a docstring)."""

    files: int
    all: int
    code: int


class ImportGraph:
    """Which modules of a package import which others, read from their source; nothing is executed.

    An import from a package counts as one of the module that defines the name, so a package that lists names of its
    modules does not tie them all together. A string that holds the dotted name of a module counts as an import, too,
    since registries load modules by name.

    Args:
        root: the folder that holds the package.
        package: its name.
    """

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package = root, package
        self._trees: dict[str, ast.Module] = {}
        self._imports: dict[str, set[str]] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """Each module's file."""
        found = {}
        for path in sorted((self.root / self.package).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    def below(self, *prefixes: str) -> set[str]:
        """The modules of these names, and all in these packages."""
        return {name for name in self.files if any(name == p or name.startswith(f"{p}.") for p in prefixes)}

    def reach(self, roots: Iterable[str], without: Collection[str] = ()) -> set[str]:
        """The modules that some modules import, directly or through others, and themselves; never those `without`."""
        found: set[str] = set()
        todo = [name for name in roots if name not in without]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [other for other in self.imports_of(name) if other not in without]
        return found

    def own(self, roots: Collection[str], others: Collection[str]) -> set[str]:
        """`roots`, and what they reach and `others` do not reach but through them."""
        return {*roots} | (self.reach(roots) - self.reach(others, without=roots))

    def count(self, modules: Iterable[str]) -> Lines:
        """The lines of some modules' files."""
        return count_lines(self.files[name] for name in modules)

    def imports_of(self, name: str) -> set[str]:
        """The modules of the package that a module imports, anywhere in its code."""
        if name not in self._imports:
            self._imports[name] = {found for node in ast.walk(self._tree(name)) for found in self._imported(name, node)}
        return self._imports[name]

    def _imported(self, name: str, node: ast.AST) -> Iterable[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names if alias.name in self.files]
        if isinstance(node, ast.ImportFrom):
            base = self.base(name, node)
            names = [alias.name for alias in node.names]
            return [found for each in names if (found := self.definer(base, each)) is not None]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._named(node.value)
        return ()

    def _named(self, text: str) -> Iterable[str]:
        """The module that a string names, if it is one: `package.module`, with or without something in it behind."""
        if not re.fullmatch(rf"{self.package}(\.\w+)+(:\w+)?", text):
            return ()
        name = text.partition(":")[0]
        for found in (name, name.rpartition(".")[0]):
            if found in self.files and self.files[found].name != "__init__.py":
                return (found,)
        return ()

    def definer(self, module: str, name: str, seen: tuple[tuple[str, str], ...] = ()) -> str | None:
        """The module that defines what `from module import name` gives; None: it is not of the package."""
        if f"{module}.{name}" in self.files:
            return f"{module}.{name}"
        if module not in self.files:
            return None
        if self.files[module].name == "__init__.py" and (module, name) not in seen:
            for node in ast.walk(self._tree(module)):
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            found = self.definer(self.base(module, node), alias.name, (*seen, (module, name)))
                            if found is not None:
                                return found
        return module

    def base(self, name: str, node: ast.ImportFrom) -> str:
        """The module that `from ... import` names, relative ones too."""
        if not node.level:
            return node.module or ""
        parts = name.split(".")
        if self.files[name].name != "__init__.py":
            parts.pop()
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, node.module] if node.module else parts)

    def _tree(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = ast.parse(self.files[name].read_text(encoding="utf-8"))
        return self._trees[name]


def count_lines(paths: Iterable[Path]) -> Lines:
    """The lines of some files in Python, or in C++, where comments are those that begin a line."""
    texts = [(path.suffix, path.read_text(encoding="utf-8")) for path in paths]
    code = sum(len(find_code(text)) if suffix == ".py" else _count_native(text) for suffix, text in texts)
    return Lines(len(texts), sum(len(text.splitlines()) for _, text in texts), code)


def find_code(text: str) -> set[int]:
    """The numbers of the lines of Python code that hold more than blanks, comments and docstrings."""
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if ast.get_docstring(
                node, False
            ):
                first = node.body[0]
                documents |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found |= {*range(token.start[0], token.end[0] + 1)}
    return found - documents


def defines_kernels(path: Path) -> bool:
    """Whether a Python file holds a GPU kernel: in Triton, Gluon or CuTe."""
    return re.search(r"@(triton|gluon|cute)\.(jit|kernel)\b", path.read_text(encoding="utf-8")) is not None


def _count_native(text: str) -> int:
    return sum(bool(line.strip()) and not line.lstrip().startswith(("//", "*", "/*")) for line in text.splitlines())


def count_vllm(folder: Path) -> dict[str, Any]:
    """The lines of vLLM's families, and the vendors that have a folder in them.

    Args:
        folder: where a wheel of vLLM is unpacked.
    """
    graph = ImportGraph(folder, "vllm")
    models = graph.below(*VLLM_MODELS) - {*VLLM_MODELS, "vllm.model_executor.models.registry"}
    families = {}
    for family, prefixes in VLLM_FAMILIES.items():
        roots = graph.below(*prefixes)
        heirs = graph.below(*(heir for prefix in prefixes for heir in VLLM_HEIRS.get(prefix, ())))
        own = graph.own(roots, models - roots - heirs)
        lines = graph.count(own)
        packages = {name.removeprefix(f"{prefixes[0]}.").partition(".")[0] for name in roots if name not in prefixes}
        families[family] = {
            "modules": list(prefixes),
            "vendors": sorted(packages & {"amd", "cpu", "nvidia", "xpu"}),
            "files": lines.files,
            "lines": lines.all,
            "code": lines.code,
            "code_beside_kernels": graph.count(name for name in own if not defines_kernels(graph.files[name])).code,
        }
    stated = (folder / "vllm" / "_version.py").read_text(encoding="utf-8")
    version, commit = (re.search(rf"\b{name} = '(?:g)?([^']+)'", stated) for name in ("version", "commit_id"))
    return {
        "project": "vLLM",
        "version": version[1] if version else None,
        "commit": commit[1] if commit else None,
        "families": families,
    }


def main() -> int:
    """Print the counts of an unpacked wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where vLLM's wheel is unpacked")
    print(json.dumps(count_vllm(parser.parse_args().folder), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
