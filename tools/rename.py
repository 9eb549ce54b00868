"""Carry work begun before the renames of 0.2 over to the new names: moves files and renames what is in them.

    python tools/rename.py                 # every table of tools/renames
    python tools/rename.py engine serving  # these tables only

Copy this file, rename_members.py and tools/renames/ into a checkout of the old names, run it there, commit, and merge:
what both sides renamed is then the same text. Running it again changes nothing. It stays for one minor release. A table
is a text file with a row a line; `#` begins a comment:

    move OLD NEW             a file or folder; imports, dotted names and paths that name it follow
    name OLD NEW [in GLOB…]  an identifier: in Python code, braces of f-strings, between backticks, Markdown's code
    var  OLD NEW in GLOB…    the same, but in Python code alone, and not after a dot: parameters and local variables
    word OLD NEW [in GLOB…]  a whole word wherever it stands, prose and data included
    member OLD NEW of CLASS…  an attribute, method or field of a class, by its old name (`rename_members.py`)
    keyword OLD NEW of CALL…  a keyword argument of functions or classes, by their old names
    gone OLD of CLASS WORDS…  what no longer exists: each use is listed with these words, and nothing is changed

Globs match paths from the repository's root, after all moves; `*` matches any number of folders. Members are renamed
where the class is clear from the file alone; what else has the name is listed with file and line, for you to judge.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rename_members import Hint, carry_members

REPOSITORY = Path(__file__).resolve().parents[1]
TABLES = "tools/renames"
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".h", ".cpp", ".cfg", ".sh", ".html", ".js", ""}
FROZEN = ("tests/compat/*_v1_0.*", "backends/*/evidence/*", "CHANGELOG.md", "LICENSE")
KEPT = ("tools/rename*.py", f"{TABLES}/*", *FROZEN)
"""What is never rewritten: this file and its tables, the frozen plugin, dated evidence, and what speaks of the past."""
SOURCE_ROOTS = ("core/", *(f"backends/{path.name}/" for path in (REPOSITORY / "backends").iterdir()))


@dataclass(frozen=True)
class Row:
    """One line of a table; `owners` and `advice` are those of members, keywords and what is gone."""

    kind: str
    old: str
    new: str
    globs: tuple[str, ...]
    owners: tuple[str, ...] = ()
    advice: str = ""

    def covers(self, path: str) -> bool:
        """Whether it applies to a file."""
        return not self.globs or any(fnmatch.fnmatch(path, glob) for glob in self.globs)


def rows_of(table: Path) -> Iterator[Row]:
    """The rows of a table.

    Raises:
        SystemExit: a line is of none of these kinds.
    """
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        kind, globs = words[0], tuple(words[4:])
        if kind in ("member", "keyword") and len(words) >= 5 and words[3] == "of":
            yield Row(kind, words[1], words[2], (), owners=globs)
            continue
        if kind == "gone" and len(words) >= 5 and words[2] == "of":
            yield Row(kind, words[1], "", (), (words[3],), " ".join(words[4:]))
            continue
        right = kind in ("move", "name", "var", "word") and len(words) >= 3 and (len(words) == 3 or words[3] == "in")
        if not right or (kind == "var" and not globs) or (kind == "move" and globs):
            raise SystemExit(f"{table.name}:{number}: not a row: {line.strip()}")
        yield Row(kind, words[1], words[2], globs)


# ------------------------------------------------------------------ moves


def move(row: Row, repository: Path) -> None:
    """Move a file or folder with git; nothing where it has been moved already."""
    old, new = repository / row.old, repository / row.new
    if not old.exists():
        return
    new.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", "-k", row.old, row.new], cwd=repository, check=True)


def dotted(path: str) -> str:
    """The module's name for a path of a Python file or folder."""
    for root in SOURCE_ROOTS:
        path = path.removeprefix(root)
    return path.removesuffix(".py").replace("/", ".")


def exported(row: Row, repository: Path) -> bool:
    """Whether the package that a module leaves exports something of the same name: then that is what is imported."""
    init = repository / Path(row.old).parent / "__init__.py"
    return init.exists() and f'"{Path(row.old).stem}",' in init.read_text(encoding="utf-8")


def follow_move(row: Row, text: str, path: str, repository: Path) -> str:
    """A text in which dotted names and paths follow a move."""
    old, new = dotted(row.old), dotted(row.new)
    if row.old.endswith(".py") or "." not in Path(row.old).name:
        folder = repository / row.old.removesuffix(".py")  # a package now, whose modules are not moved again
        names = "|".join(path.stem for path in folder.glob("*"))
        again = rf"(?!(?:\.| import )(?:{names})\b)" if new.startswith(f"{old}.") else ""
        if path.endswith(".py") and not exported(row, repository):
            text = follow_from_imports(text, old, new)
        text = re.sub(rf"(?<![\w.]){re.escape(old)}\b{again}(?!/)", new, text)
    shorter = lambda p: re.sub(r"^(core/inferplane|backends/\w+)/", "", p)  # noqa: E731
    for before, after in ((row.old, row.new), (shorter(row.old), shorter(row.new))):
        if before.count("/") and before != after:
            text = re.sub(rf"(?<![\w/.-]){re.escape(before)}(?![\w-])", after, text)
    return text


def follow_from_imports(text: str, old: str, new: str) -> str:
    """`from package import module` follows the module; other names of the statement stay."""
    package, _, name = old.rpartition(".")
    target, _, renamed = new.rpartition(".")
    if f"from {package} import" not in text:
        return text
    lines = text.splitlines(keepends=True)
    for node in reversed([n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]):
        if node.module != package or node.level or name not in [alias.name for alias in node.names]:
            continue
        indent = " " * node.col_offset
        moved = next(alias for alias in node.names if alias.name == name)
        known = moved.asname or name
        statements = [f"from {target} import {renamed}" + (f" as {known}" if known != renamed else "")]
        kept = [a.name + (f" as {a.asname}" if a.asname else "") for a in node.names if a is not moved]
        if kept:
            statements.append(f"from {package} import {', '.join(kept)}")
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{statement}\n" for statement in statements]
    return "".join(lines)


# ------------------------------------------------------------------ names


def in_python(row: Row, text: str) -> str:
    """Python source with an identifier renamed."""
    word = re.compile(rf"(?<!\w){re.escape(row.old)}(?!\w)")
    if not word.search(text):
        return text
    lines = text.splitlines(keepends=True)
    before: tokenize.TokenInfo | None = None
    promised = re.search(r"^__all__ = \[.*?^\]", text, re.MULTILINE | re.DOTALL)
    first, last = (text[:at].count("\n") + 1 for at in promised.span()) if promised else (0, 0)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        made = token.string
        after_dot = before is not None and before.string == "."
        if token.type == tokenize.NAME and made == row.old and not (row.kind == "var" and after_dot):
            made = row.new
        elif made == f'"{row.old}"' and first <= token.start[0] <= last:
            made = f'"{row.new}"'
        elif token.type == tokenize.STRING and re.match(r"(?i)r?f", made):
            made = re.sub(r"\{[^{}]*\}", lambda m: word.sub(row.new, m.group()), made)
        if row.kind == "name" and token.type in (tokenize.STRING, tokenize.COMMENT):
            made = in_backticks(word, row.new, made)
        if made != token.string:
            edits.append((token.start, token.end, made))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token
    for (top, left), (bottom, right), made in reversed(edits):
        whole = lines[top - 1][:left] + made + lines[bottom - 1][right:]
        lines[top - 1 : bottom] = whole.splitlines(keepends=True)
    return "".join(lines)


def in_backticks(word: re.Pattern[str], new: str, text: str) -> str:
    """A text with a word replaced between backticks."""
    return re.sub(r"`[^`\n]+`", lambda m: word.sub(new, m.group()), text)


def in_markdown(row: Row, text: str) -> str:
    """Markdown with an identifier renamed in fenced code and between backticks."""
    word = re.compile(rf"(?<!\w){re.escape(row.old)}(?!\w)")
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(word.sub(row.new, p) if p.startswith("```") else in_backticks(word, row.new, p) for p in parts)


def rename(row: Row, text: str, path: str, repository: Path) -> str:
    """A file's text after a row; the text itself where the row says nothing of it."""
    if row.kind == "move":
        return follow_move(row, text, path, repository)
    if not row.covers(path):
        return text
    if row.kind == "word":
        return re.sub(rf"(?<!\w){re.escape(row.old)}(?!\w)", row.new, text)
    by_suffix: dict[str, Callable[[Row, str], str]] = {".py": in_python}
    if row.kind == "name":
        by_suffix[".md"] = in_markdown
    act = by_suffix.get(Path(path).suffix)
    return text if act is None else act(row, text)


def apply(rows: list[Row], repository: Path) -> list[str]:
    """Apply rows to a checkout; returns the files that changed."""
    for row in rows:
        if row.kind == "move":
            move(row, repository)
    members = [row for row in rows if row.owners]
    changed = []
    for path, before in texts(repository):
        text = carry_members(members, before, path)[0] if path.endswith(".py") else before
        for row in rows:
            if not row.owners and Path(row.old).stem in text:
                text = rename(row, text, path, repository)
        if text != before:
            (repository / path).write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def texts(repository: Path) -> Iterator[tuple[str, str]]:
    """Path and text of every tracked file that may be rewritten."""
    listed = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=True).stdout
    for path in listed.splitlines():
        file = repository / path
        if file.suffix not in TEXT or not file.is_file() or any(fnmatch.fnmatch(path, kept) for kept in KEPT):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            yield path, file.read_text(encoding="utf-8")


def hints(rows: list[Row], repository: Path) -> list[Hint]:
    """What is left to the user in a checkout that rows were applied to."""
    names = {row.old: row.new for row in rows if row.kind == "name"}
    members = [replace(row, owners=(*row.owners, *(names.get(o, o) for o in row.owners))) for row in rows if row.owners]
    python = ((path, text) for path, text in texts(repository) if path.endswith(".py"))
    return [hint for path, text in python for hint in carry_members(members, text, path)[1]]


def tables() -> list[Path]:
    """Every table, sorted by name."""
    return sorted((REPOSITORY / TABLES).glob("*.txt"))


def main(names: list[str]) -> None:
    """Apply the tables named, or all of them; imports are sorted anew where ruff is at hand."""
    known = tables()
    if unknown := set(names) - {table.stem for table in known}:
        raise SystemExit(f"no such table: {', '.join(sorted(unknown))}; there are {', '.join(t.stem for t in known)}")
    rows = [row for table in known if not names or table.stem in names for row in rows_of(table)]
    changed = apply(rows, REPOSITORY)
    python = [path for path in changed if path.endswith(".py")]
    ruff = Path(sys.executable).with_name("ruff")
    if python and ruff.exists():
        subprocess.run([ruff, "check", "--quiet", "--fix-only", "--select", "I", *python], cwd=REPOSITORY, check=False)
        subprocess.run([ruff, "format", "--quiet", *python], cwd=REPOSITORY, check=False)
    left = hints(rows, REPOSITORY)  # now, because sorting imports moves lines
    for hint in left:
        print(hint)
    print(f"{len(changed)} files changed by {len(rows)} rows; {len(left)} places left to you")


if __name__ == "__main__":
    main(sys.argv[1:])
