"""Runs docs/tutorial-backend.md: writes its files, applies its changes and compares what its commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.suite import environment
from tests.house.rules import REPOSITORY

PAGE = REPOSITORY / "docs" / "tutorial-backend.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(console: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output below it."""
    for command, _, shown in (part.partition("\n") for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]):
        yield command, shown


def missing(shown: str, output: str) -> str | None:
    """The first part of a sample that the output lacks after the parts before it; `...` leaves text out.

    Runs of blanks count as one, since the width of a column may change.
    """
    words, position = " ".join(output.split()), 0
    for part in shown.split("..."):
        wanted = " ".join(part.split())
        found = words.find(wanted, position)
        if found < 0:
            return part
        position = found + len(wanted)
    return None


def change(text: str, diff: str) -> str:
    """A file's text with the lines of a diff block replaced."""
    old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    assert text.count(old) == 1, f"the page changes lines that are in the file {text.count(old)} times:\n{old}"
    return text.replace(old, new)


class Reader:
    """Follows a page in a folder: writes files, applies changes and runs commands.

    Args:
        folder: empty, or with what the page presumes.
        paths: where Python looks before the source tree.
    """

    def __init__(self, folder: Path, *paths: Path) -> None:
        self.folder, self.exports = folder, ""
        programs = folder / ".programs"
        programs.mkdir(parents=True)
        for name, command in (("inferplane", "-m inferplane"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n', encoding="utf-8")
            (programs / name).chmod(0o755)
        self.env = environment(paths=tuple(map(str, paths))) | {
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        del self.env["INFERPLANE_PLUGINS"]

    def follow(self, language: str, name: str, body: str) -> None:
        """Do what one block says."""
        if language == "diff":
            (self.folder / name).write_text(change((self.folder / name).read_text(), body), encoding="utf-8")
        elif language == "console":
            for command, shown in commands(body):
                output = self.run(command)
                left_out = missing(shown, output)
                assert left_out is None, f"$ {command}\ndoes not print\n{left_out}\nbut\n{output}"
        else:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(body, encoding="utf-8")

    def run(self, command: str) -> str:
        """The output of a command, which must succeed; an `export` holds for those after it."""
        if command.startswith("export "):
            # The reader's own path comes first, the source tree's after it.
            self.exports = command.replace("PYTHONPATH=$PWD", "PYTHONPATH=$PWD:$PYTHONPATH")
            return ""
        script = f"set -e -o pipefail\n{self.exports}\n{command}"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    reader = Reader(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 18
    for block in blocks:
        reader.follow(*block)


def test_a_wrong_page_is_found(tmp_path):
    reader = Reader(tmp_path)
    reader.follow("text", "a.txt", "one\ntwo\n")
    reader.follow("diff", "a.txt", "-two\n+three\n")
    reader.follow("console", "", "$ cat a.txt\n...\nth...ree\n$ echo a  b\na b\n")
    with pytest.raises(AssertionError, match="0 times"):
        reader.follow("diff", "a.txt", "-two\n+three\n")
    with pytest.raises(AssertionError, match="does not print"):
        reader.follow("console", "", "$ cat a.txt\nthree\n...\none\n")
    with pytest.raises(AssertionError):
        reader.follow("console", "", "$ cat missing.txt\n")
