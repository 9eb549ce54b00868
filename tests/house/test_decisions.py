"""Decisions have one form and fit on one page; commits since the first good one have subjects and bodies."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.rules import REPOSITORY, finding, none, plant
from tools import check_commit

DECISIONS = REPOSITORY / "docs" / "decisions"
MAX_DECISION_LINES = 40
SECTIONS = ["Status", "Context", "Decision", "Consequences"]
STATUS = re.compile(r"(Accepted|Changed|Replaced) on \d{4}-\d\d-\d\d\b")


def decision_findings(folder: Path) -> list[str]:
    """What is wrong with the decisions in a folder: names, numbers, sections, status, length, dead links."""
    found = []
    for number, path in enumerate(sorted(folder.glob("*.md")), 1):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if not re.fullmatch(rf"{number:04}(-[a-z0-9]+)+\.md", path.name):
            found.append(finding(path, 1, f"the file is to be called {number:04}-words-of-the-title.md"))
        if not re.fullmatch(rf"# {number}\. [A-Z].*[^.]", lines[0] if lines else ""):
            found.append(finding(path, 1, f"the first line is to be '# {number}. Title'"))
        if re.findall(r"^## (.*)$", text, re.MULTILINE) != SECTIONS:
            found.append(finding(path, 1, f"the sections are to be {', '.join(SECTIONS)}"))
        elif not all(part.strip() for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]):
            found.append(finding(path, 1, "a section is empty"))
        elif not STATUS.search(text.partition("## Status")[2].partition("## Context")[0]):
            found.append(finding(path, 3, "the status is to say 'Accepted on YYYY-MM-DD'"))
        if len(lines) > MAX_DECISION_LINES:
            found.append(finding(path, len(lines), f"{len(lines)} lines; at most {MAX_DECISION_LINES}"))
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            if not (path.parent / target).exists():
                found.append(finding(path, 1, f"a link to {target}, which does not exist"))
    return found


GOOD = "# 1. Title\n\n## Status\nAccepted on 2026-11-20.\n\n## Context\nx\n\n## Decision\nx\n\n## Consequences\nx\n"


def test_decisions_have_one_form():
    assert len(list(DECISIONS.glob("*.md"))) >= 31
    none(decision_findings(DECISIONS))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("0002-title.md", GOOD),
        ("0001-Title.md", GOOD),
        ("0001-title.md", GOOD.replace("# 1. Title", "# Title")),
        ("0001-title.md", GOOD.replace("## Context", "## Why")),
        ("0001-title.md", GOOD.replace("## Context\nx", "## Context")),
        ("0001-title.md", GOOD.replace(" on 2026-11-20", "")),
        ("0001-title.md", GOOD + "x\n" * 28),
        ("0001-title.md", GOOD + "[2](0002-missing.md)\n"),
    ],
)
def test_a_decision_of_another_form(tmp_path, name, text):
    assert len(decision_findings(plant(tmp_path, text, name))) == 1


def test_a_decision_of_the_right_form(tmp_path):
    none(decision_findings(plant(tmp_path, GOOD + "x\n" * 27, "0001-title.md")))


def test_commits_keep_the_rules():
    found = check_commit.check_history()
    if found is None:
        pytest.skip(f"not run: this history does not contain {check_commit.FIRST_COMMIT[:7]}")
    none(found)


@pytest.mark.parametrize(
    ("message", "files"),
    [
        ("Add " + "x" * 69, 1),
        ("Words of a decision", 1),
        ("Fixed the scheduler", 1),
        ("", 1),
        ("Fix the scheduler.", 1),
        ("Fix the scheduler\nIt was wrong.", 1),
        ("Fix the scheduler", 6),
        ("Fix the scheduler\n\nReviewed-by: A <a@b.c>", 6),
    ],
)
def test_a_commit_message_that_breaks_a_rule(message, files):
    assert len(check_commit.check_message(message, files)) == 1


@pytest.mark.parametrize("files", [5, 6])
def test_a_commit_message_that_keeps_the_rules(files):
    body = "" if files == 5 else "\n\nPadded rows were counted.\n\nReviewed-by: A <a@b.c>"
    none(check_commit.check_message("Add " + "x" * 68 + body + "\n# comment\n", files))


def test_the_history_of_a_repository(tmp_path, monkeypatch):
    """A bad commit after the first one is found; without the first one, or without git, nothing is checked."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(check_commit, "REPOSITORY", tmp_path)
    assert check_commit.check_history() is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "words of before")
    first = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "Add a thing")
    assert check_commit.check_history(first) == []
    git("commit", "-q", "--allow-empty", "-m", "a thing was added")
    (what,) = check_commit.check_history(first)
    assert "'a'" in what
    assert check_commit.check_history("0" * 40) is None


def test_the_hook_checks_the_message(tmp_path, capsys):
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("things", encoding="utf-8")
    assert check_commit.main([str(message)]) == 1
    assert "'things'" in capsys.readouterr().err
