"""The facts of the source system's documents: `tools/source_documents.py` has written them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "source_documents.json").read_text(encoding="utf-8"))
VARIABLES: dict[str, list[str]] = FACTS["variables"]


class DocumentedCommand(NamedTuple):
    """A command line of the documents.

    Args:
        text: as it stands. variables: those of the shell that it uses, as the lines above it export them.
    """

    text: str
    variables: dict[str, str]

    @property
    def words(self) -> list[str]:
        """Its words, with the values of variables in place of them, save in those that stand in single quotes."""
        return [word if f"'{word}'" in self.text else _expand(word, self.variables) for word in shlex.split(self.text)]


class DockerRun(NamedTuple):
    """A line that runs a container: its variables, its mounts, and what runs in it."""

    variables: dict[str, str]
    mounts: dict[str, str]
    words: list[str]


COMMANDS = [DocumentedCommand(found["text"], found["variables"]) for found in FACTS["commands"]]


def commands_of(*beginnings: str) -> list[DocumentedCommand]:
    """The commands that begin in one of some ways."""
    return [command for command in COMMANDS if command.text.startswith(beginnings)]


def table(*heads: str) -> list[list[str]]:
    """The rows of the tables with these first heads."""
    return [row for found in FACTS["tables"] if found["head"][: len(heads)] == list(heads) for row in found["rows"]]


def parameters(first: str) -> list[list[str]]:
    """The rows of the table of parameters that has this first name."""
    found = [t["rows"] for t in FACTS["tables"] if t["head"][0] == "字段名" and t["rows"][0][0] == first]
    return found[0]


def read_docker_run(command: DocumentedCommand) -> DockerRun:
    """The parts of a line that runs a container."""
    line = command.text.partition("&& docker logs")[0]
    words = DocumentedCommand(line, command.variables).words
    at = next(number for number, word in enumerate(words) if "paddlepaddle/paddlenlp" in word)
    pairs = list(itertools.pairwise(words[:at]))
    variables = dict(value.split("=", 1) for flag, value in pairs if flag == "-e")
    mounts = dict(value.rsplit(":", 1) for flag, value in pairs if flag == "-v")
    return DockerRun(variables, mounts, words[at + 1 :])


def _expand(word: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word)
