"""The samples of docs/cli.md are what the commands say today, wherever that does not depend on the machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from inferplane.cli import main
from inferplane.plugins import discover
from inferplane.serving.settings import FIELDS
from tests.house.rules import IN_TREE

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
MACHINES = re.compile(r"generate -p 'import |\| inferplane |> serving|inferplane (serve|devices|doctor|bench) ")
"""Samples that show a machine's speed, its own devices or texts that it rounds to."""


def samples(page: str) -> dict[str, str]:
    """Command -> what is shown of its output."""
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)```", page, re.DOTALL)
    return {command: shown for command, shown in blocks if not MACHINES.search(f"{command} ")}


def settings_tables() -> str:
    """The tables of the server's settings, as the page has them."""
    lines, section = [], ""
    for name, f in FIELDS.items():
        if name == "model":
            continue
        if f.metadata["section"] != section:
            section = f.metadata["section"]
            heading = f"**{section[0].upper()}{section[1:]}**"
            lines += ["", heading, "", "| option | default | is |", "|---|---|---|"]
        flag, value = f"--{name.replace('_', '-')}", f.default
        flag = f"{flag} {f.metadata['metavar']}" if f.metadata.get("metavar") else flag
        option = f"`{flag}`, `--no-{flag[2:]}`" if value is True else f"`{flag}`"
        default = ("on" if value else "off") if isinstance(value, bool) else "" if value in (None, ()) else value
        words = f.metadata["words"].replace("%%", "%").replace("'layers.*.mlp'", "`layers.*.mlp`")
        lines.append(f"| {option} | {default} | {words} |")
    return "\n".join(lines)


def test_the_tables_are_the_settings():
    assert settings_tables() in PAGE.read_text(), f"renew docs/cli.md:\n{settings_tables()}"


def missing(shown: str, said: str) -> str | None:
    """The first stretch of a sample that is not in the output behind those before it; `...` leaves lines out."""
    at = 0
    for stretch in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        found = said.find(stretch, at)
        if found < 0:
            return stretch
        at = found + len(stretch)
    return None


@pytest.mark.parametrize("command", samples(PAGE.read_text()))
def test_a_sample_is_what_the_command_says(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    host = discover(IN_TREE)
    if "npu" in command and any(d.name == "npu" and d.probe.available for d in host.devices()):
        pytest.skip("not run: the sample is of a machine without this device, which is here")
    monkeypatch.setattr("inferplane.plugins.host", lambda: host)
    *variables, words = re.split(r"^((?:[A-Z_]+=\S+ )+)", command)[1:] or ["", command]
    for variable in shlex.split(variables[0]):
        monkeypatch.setenv(*variable.split("=", 1))
    program, *words = shlex.split(words)
    assert program == "inferplane"
    main.main(words)
    said = "".join(capsys.readouterr())
    assert missing(samples(PAGE.read_text())[command], said) is None, f"renew docs/cli.md: {command} says\n{said}"


def test_what_is_missing_is_found():
    assert missing("a\n...\nc\n", "a\nb\nc\n") is None
    assert missing("a\nc\n", "a\nb\nc\n") == "a\nc\n"
    assert missing("b\n...\na\n", "a\nb\nc\n") == "a\n"
    assert len(samples(PAGE.read_text())) >= 8
