"""The words of names, of sentences that users read, and of comments; each rule is proved on planted faults."""

from __future__ import annotations

import subprocess

import pytest

import inferplane.plugin
from tests.house import words
from tests.house.rules import BACKEND_PACKAGES, CORE_PACKAGE, REPOSITORY, SHIPPED, none, plant

NATIVE = tuple(folder for package in BACKEND_PACKAGES if (folder := package.parent / "csrc").is_dir())
ALLOWED_NAMES = {"let": "a keyword of JavaScript", "toFixed": "a method of its numbers"}


@pytest.mark.parametrize(
    "fault",
    [
        "class CutRows: ...",
        "class A:\n    room: int = 0",
        "class A:\n    def f(self):\n        self.room = 0",
        "def is_told(): ...",
        "def f(whoever): ...",
        "def f(*, told=1): ...",
        "def f(*wanted): ...",
        "def f(**wanted): ...",
        "f = lambda wanted: 0",
        "def f():\n    wanted = 1",
        "def f():\n    wanted: int = 1",
        "def f():\n    a, (b, wanted) = 1, (2, 3)",
        "def f():\n    for wanted in (): ...",
        "def f():\n    with f() as wanted: ...",
        "def f():\n    return [wanted for wanted in ()]",
        "def f():\n    return (wanted := 1)",
        "def f():\n    try: ...\n    except ValueError as wanted: ...",
        "def f(x):\n    match x:\n        case [wanted]: ...",
        "import os as wanted",
        "from os import path as wanted_path",
    ],
)
def test_banned_names_are_found(fault, tmp_path):
    assert len(words.banned_names(plant(tmp_path, fault))) == 1


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("", "crowd.py"),
        ("", "room_for.h"),
        ("int wanted = 0;", "a.h"),
        ("bool is_kept[4];", "a.cpp"),
        ("constexpr int kCutRows = 1;", "a.cu"),
        ("const isKept = 1;", "a.js"),
        ("function told(x) {}", "a.js"),
        ("rows.map((wanted) => 1);", "a.js"),
        ("#define KEPT 1", "a.cuh"),
    ],
)
def test_banned_names_of_files_and_native_code_are_found(fault, name, tmp_path):
    assert len(words.banned_names(plant(tmp_path, fault, name))) == 1


def test_words_in_native_comments_and_strings_are_free(tmp_path):
    none(words.banned_names(plant(tmp_path, '// kept\n/* wanted\n kept */ int a = f("kept \\" told");\n', "a.h")))
    none(words.banned_names(plant(tmp_path, "// kept\nconst a = 'kept' + `told ${a}` + \"wanted\";\n", "a.js")))


def test_names_may_be_allowed_with_a_reason(tmp_path):
    plant(tmp_path, "def is_told(): ...")
    none(words.banned_names(tmp_path, allowed={"is_told": "a reason"}))
    assert words.banned_names(tmp_path / "none", allowed={"old": "a reason"}) == ["old: allowed, and no longer there"]


def test_names_are_words_that_one_would_search_for():
    none(words.banned_names(*SHIPPED, *NATIVE, allowed=ALLOWED_NAMES))


@pytest.mark.parametrize(
    "fault",
    [
        "def f(x): ...",
        "async def f(*, x): ...",
        "def f(*p): ...",
        "def f(**k): ...",
        "def f(_x): ...",
        "class A:\n    def f(self, x): ...",
        "class A:\n    def __init__(self, x): ...",
        "if True:\n    def f(x): ...",
    ],
)
def test_letters_for_parameters_are_found(fault, tmp_path):
    assert len(words.one_letter_parameters(plant(tmp_path, fault))) == 1


def test_parameters_have_words(tmp_path):
    none(
        words.one_letter_parameters(
            plant(tmp_path, "def _f(x): ...\ndef f(xs): ...\nclass _A:\n    def f(self, x): ...")
        )
    )
    none(words.one_letter_parameters(*(CORE_PACKAGE / name for name in ("engine", "serving", "cli", "plugins"))))


@pytest.mark.parametrize(
    "fault",
    [
        "parser.add_argument('-n', help='left out: what has room')",
        "parser.add_argument('-n', help=f'{x}; left out: drawn and told')",
        "raise UsageError('There is no room for this.')",
        "raise UsageError(what, remedy=f'ask whoever made {x}')",
        "warnings.warn(f'{x} was handed over')",
        "LEGEND = {'*': 'what nobody reads'}",
        "class EngineOptions:\n    '''Args:\n    a: the likeliest of all.'''",
    ],
)
def test_riddles_are_found(fault, tmp_path):
    assert len(words.riddles(plant(tmp_path, fault))) == 1


def test_texts_say_what_they_mean(tmp_path):
    none(words.riddles(plant(tmp_path, "def f():\n    '''Whoever reads it.'''\n    return 'told', 'by hand'")))
    none(words.riddles(*SHIPPED))


class Told:
    """A class of which nothing is said."""

    @property
    def size(self):
        """How many want it."""

    @classmethod
    def make(cls):
        """Whoever makes one."""

    def run(self):
        """Run what was asked for, `told`."""

    def _run(self):
        """What nobody reads."""


def test_riddles_in_docstrings_are_found():
    found = words.riddles_in_docstrings({"Told": Told, "COUNT": 3, "draft": test_texts_say_what_they_mean})
    assert sorted(line.partition(":")[0] for line in found) == ["Told.make", "Told.run", "Told.size"]


def test_docstrings_for_authors_of_plugins_say_what_they_mean():
    none(words.riddles_in_docstrings({name: getattr(inferplane.plugin, name) for name in inferplane.plugin.__all__}))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("The caller is told so.\n", "a.md"),
        ("Something that cannot be meant; `told`\n", "a.md"),
        ("| the device that was asked for | x |\n", "a.md"),
        ("```\nno riddle\n```\nNobody reads it.\n", "a.md"),
        ('{"description": "Left out if there is no room."}', "a.json"),
        ('{"description": "As it was asked for."}', "a.json"),
    ],
)
def test_riddles_in_pages_are_found(fault, name, tmp_path):
    assert words.riddles_in_pages([plant(tmp_path, fault, name) / name])


def test_pages_say_what_they_mean(tmp_path):
    page = "`told`, by hand\n```\nasked for\n```\n\n## Words of earlier versions\n| told | reported |\n"
    none(words.riddles_in_pages([plant(tmp_path, page, "a.md") / "a.md"]))
    docs = REPOSITORY / "docs"
    none(words.riddles_in_pages([REPOSITORY / "README.md", *docs.glob("*.md"), *docs.glob("schemas/*.json")]))


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("# he reads it\n", "a.py"),
        ('"""The kernel and his view."""\n', "a.py"),
        ("The engine keeps her blocks.\n", "a.md"),
        ("// She waits for him\n", "a.h"),
    ],
)
def test_persons_are_found(fault, name, tmp_path):
    assert words.persons([plant(tmp_path, fault, name) / name])


def test_code_is_no_person(tmp_path):
    none(words.persons([plant(tmp_path, "The `he` of this\nthe, hers2, cache/he\n", "a.md") / "a.md"]))
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.h", "*.cpp"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    here = ("tests/house/words.py", "tests/house/test_words.py")
    none(words.persons(REPOSITORY / name for name in listed.stdout.split() if name not in here))
