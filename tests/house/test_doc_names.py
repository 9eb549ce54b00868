"""What the pages name exists: identifiers and paths between backticks, and the words of the glossary."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.house.rules import REPOSITORY, finding, none, plant
from tests.house.structure import _defined as names_in

SOURCES = (".py", ".pyi", ".toml", ".txt", ".h", ".cpp", ".cu", ".json", ".yml", ".yaml", ".cfg", ".sh", ".js", "")
SPEAK_OF_THE_PAST = ("tools/rename.py", "tools/renames/", "CHANGELOG.md")
FOREIGN = {"_int_mm": "torch", "SignalException": "torchrun"}
"""Names of other projects that no file here contains."""
FROM_ELSEWHERE = "coming-from-"
"""Begins the names of pages whose tables have another engine's names in their first column."""
PLACEHOLDERS = re.compile(r"acme|tiny|softcap|families/family\.py|my_family|NNNN")
"""Parts of examples that readers replace by names of their own."""

ORDINARY = frozenset(
    """
    add api architectures bits build bytes cls count ctx data draw fill find ids init int list nbytes out self shape top
    """.split()  # noqa: SIM905 - a list of quoted words is hard to read
)
"""Words of Python, and English ones that mean the same everywhere."""

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?=\(|\Z)")
_LOOKS_LIKE_CODE = re.compile(r"[a-z0-9]_[a-z0-9]|[a-z][A-Z]|\.|[A-Z]_[A-Z]")
_PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)+/?")


def tracked_files(repository: Path, *patterns: str) -> list[str]:
    """Paths of the files that git knows."""
    command = ["git", "ls-files", *patterns]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.splitlines()


PAGES = tuple(
    REPOSITORY / name
    for name in tracked_files(REPOSITORY, "*.md")
    if not name.startswith(("docs/decisions/", "CHANGELOG"))
)
"""All pages but decisions and the changelog, which speak of earlier states."""


def words_of(files: Iterable[Path]) -> frozenset[str]:
    """Every word in some files: names of code, of options, of keys."""
    found: set[str] = set()
    for path in files:
        found.update(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="ignore")))
    return frozenset(found)


def names_of_nothing(
    pages: Iterable[Path], words: frozenset[str], paths: Iterable[str] = (), repository: Path = REPOSITORY
) -> list[str]:
    """Identifiers and paths between backticks of which some part is no word of the sources, and no file.

    Args:
        pages: Markdown files; fenced blocks are left out.
        words: all words of the sources.
        paths: the repository's files, for what looks like a path from one of its folders, or from the page's.
        repository: their root.
    """
    paths = list(paths)
    tops = {path.split("/")[0] for path in paths if "/" in path}
    found = []
    for page in pages:
        for line, text in _spans(page):
            if text in FOREIGN or PLACEHOLDERS.search(text):
                continue
            if (path := _PATH.fullmatch(text)) and text.split("/")[0] in tops:
                pattern = re.compile(re.escape(text.rstrip("/")).replace(r"\*", "[^/]*") + r"(/|\Z)")
                own = page.parent.relative_to(repository).as_posix() + "/"
                if not any(pattern.match(known) or pattern.match(known.removeprefix(own)) for known in paths):
                    found.append(finding(page, line, f"`{text}`: no such file"))
            elif not path and (name := _IDENTIFIER.match(text)) and _LOOKS_LIKE_CODE.search(name.group()):
                missing = [part for part in name.group().split(".") if part not in words]
                if missing:
                    found.append(finding(page, line, f"`{text}`: nothing is called {', '.join(missing)}"))
    return found


def _spans(page: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            if page.name.startswith(FROM_ELSEWHERE) and line.startswith("|"):
                line = line[1:].partition("|")[2]
            yield from ((number, span) for span in _SPAN.findall(line))


def glossary_words(page: Path) -> Iterator[tuple[int, str]]:
    """The words of the tables, without those of earlier versions."""
    text = page.read_text(encoding="utf-8").partition("\n## Words of earlier versions")[0]
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 4 and not set(cells[1]) <= {"-"} and cells[1] != "word":
            for word in re.sub(r"\([^)]*\)", "", cells[1]).split(","):
                yield number, word.strip(" `")


def missing_words(page: Path, *roots: Path, packages: int = 8, ordinary: frozenset[str] = ORDINARY) -> list[str]:
    """Words that stand in names of at least so many packages, are not ordinary, and have no row in the glossary."""
    defined = set(re.findall(r"[a-z0-9]+", page.read_text(encoding="utf-8").lower()))
    homes: dict[str, set[str]] = {}
    for root in roots:
        for path in root.rglob("*.py"):
            home = path.relative_to(root).parts[0] if root.name == "inferplane" else root.name
            for _, name in names_in(ast.parse(path.read_text(encoding="utf-8"))):
                for word in re.findall(r"[a-z]{3,}", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()):
                    homes.setdefault(word, set()).add(home)
    return [
        f"{word}: in names of {len(found)} packages, and not in the glossary"
        for word, found in sorted(homes.items())
        if len(found) >= packages and word not in ordinary and not {word, word.removesuffix("s"), f"{word}s"} & defined
    ]


def _apart(text: str) -> str:
    """Names in CamelCase as words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower()


def unused_words(page: Path, files: Iterable[Path]) -> list[str]:
    """Words of the glossary that no source uses, in either number or as a participle."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = f" {re.sub(r'[^a-z0-9]+', ' ', _apart(text))} "
    return [
        finding(page, line, f"{word!r} is used nowhere in core or backends")
        for line, word in glossary_words(page)
        if not re.search(f" {re.sub('[^a-z0-9]+', ' ', _apart(word))}(s|es|d|ed|ted|ing)? ", text)
    ]


@pytest.fixture(scope="module")
def files() -> list[str]:
    return tracked_files(REPOSITORY)


def test_pages_name_what_there_is(files):
    sources = [path for path in files if Path(path).suffix in SOURCES and not path.startswith(SPEAK_OF_THE_PAST)]
    words = words_of(REPOSITORY / path for path in sources) | frozenset(re.findall(r"\w+", " ".join(files)))
    none(names_of_nothing(PAGES, words, files))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("`Engine.step` and `max_len` of `inferplane.engine`, run by `step()` with `--flag` as `x = 1`", 0),
        ("`core/a.py`, `core/b/`, `core/*/c.py` and beside the page `tests/d.py`", 0),
        ("`Engine.stop` of `EngineClient`, called `max_length` in `inferplane.motor`", 4),
        ("`core/gone.py` and `core/b/*.txt`; `MAX_LENGTH` and `stop_all()` too", 4),
    ],
)
def test_names_of_nothing_are_found(text, faults, tmp_path):
    plant(tmp_path, f"{text}\n```\n`NoName.at_all`\n```\n", "docs/page.md")
    words = frozenset({"Engine", "step", "max_len", "inferplane", "engine"})
    files = ["core/a.py", "core/b/c.py", "docs/page.md", "docs/tests/d.py", "tests/e.py"]
    found = names_of_nothing([tmp_path / "docs" / "page.md"], words, files, tmp_path)
    assert len(found) == faults, found


def test_the_glossary_has_words_in_use(files, tmp_path):
    sources = [REPOSITORY / path for path in files if path.startswith(("core/", "backends/")) and path.endswith(".py")]
    glossary = REPOSITORY / "docs" / "glossary.md"
    none(unused_words(glossary, sources))
    none(missing_words(glossary, REPOSITORY / "core" / "inferplane", *(REPOSITORY / "backends").glob("*/inferplane_*")))
    rows = (
        "| word | meaning |\n|---|---|\n| block table, `ScheduledChunk`, rank (of a kernel) | x |\n| turnstile | x |\n"
    )
    page = plant(tmp_path, f"{rows}\n## Words of earlier versions\n| riddle | now |\n", "page.md") / "page.md"
    plant(tmp_path, "block_tables = ScheduledChunk(ranks=1)\n")
    assert missing_words(page, tmp_path, packages=1, ordinary=ORDINARY) == []
    plant(tmp_path, "def balance_turnstiles(knob): ...\n", "more/a.py")
    assert [found.split(":")[0] for found in missing_words(page, tmp_path, packages=1)] == ["balance", "knob"]
    assert [found.split(": ")[1].split(" ")[0] for found in unused_words(page, tmp_path.glob("*.py"))] == [
        "'turnstile'"
    ]
