"""Write tests/unit/support/source_documents.json: the commands, variables and tables of the source system's documents.

    python tools/source_documents.py FOLDER

FOLDER has the four documents as text, of which only these facts are in the repository. Run it again when one changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "unit" / "support" / "source_documents.json"
PROGRAMS = "docker python curl ping start_server stop_server mpirun nvidia-smi bash git cd ls cat"
COMMAND = re.compile(rf"^\s*(?:\$ |# (?=export ))?((?:{PROGRAMS.replace(' ', '|')}|export|model_name=)\b(?! 请求).*)")
"""Begins a command, behind a prompt or as one that is commented out; "curl 请求" is a heading."""
EXPORT = re.compile(r"(?:export )?([A-Za-z_]\w*)=(.*)")
SET = re.compile(r"(?:export\s+|-e \"|^|&&\s*)([A-Za-z_]\w*)=")
REFERENCE = re.compile(r"\$\{(\w+):-(.*)\}")
DESCRIPTIONS = ("说明", "备注")
"""Heads of columns of sentences, which are left out: names, types and defaults are facts."""
DESCRIBED = re.compile(r"([a-z_]{3,})\s*")


def logical_lines(lines: list[str]) -> list[str]:
    """The commands of a document, each on one line: a backslash goes on, and so does a line of options of docker."""
    found: list[str] = []
    at = 0
    while at < len(lines):
        match = COMMAND.match(lines[at])
        at += 1
        if match is None:
            continue
        text = match[1].strip()
        while at < len(lines):
            following = lines[at].strip()
            is_docker = text.startswith("docker") and following.startswith("-")
            if not (text.endswith("\\") or text.count("'") % 2 or is_docker):
                break
            text = text.removesuffix("\\").rstrip() + " " + following
            at += 1
        found.append(re.sub(r"\s*#.*$", "", " ".join(text.split())))
    return found


def read_commands(lines: list[str]) -> list[dict[str, Any]]:
    """The commands of a document that run something, with the variables that the lines above them export."""
    found: list[dict[str, Any]] = []
    values: dict[str, str] = {}
    for text in logical_lines(lines):
        if (export := EXPORT.fullmatch(text)) is None:
            used = {name: values[name] for name in re.findall(r"\$\{?(\w+)", text) if name in values}
            found.append({"text": text, "variables": used})
            continue
        name, value = export[1], export[2]
        while (reference := REFERENCE.fullmatch(value)) is not None:
            value = reference[2].strip('"')
        values[name] = value.strip('"')
    return found


def tables(lines: list[str]) -> list[dict[str, Any]]:
    """The tables of a document: heads and rows."""
    found: list[dict[str, Any]] = []
    for at, line in enumerate(lines):
        if re.fullmatch(r"(---\|)+", line.strip()):
            rows: list[list[str]] = []
            for row in lines[at + 1 :]:
                if "|" not in row:
                    break
                rows.append(_cells(row))
            found.append({"head": _cells(lines[at - 1]), "rows": rows})
    return found


def without_descriptions(table: dict[str, Any]) -> dict[str, Any]:
    """A table without the columns of sentences, and a row without the cells that are sentences."""
    columns = [number for number, head in enumerate(table["head"]) if head not in DESCRIPTIONS]
    rows = [[row[number] for number in columns if number < len(row)] for row in table["rows"]]
    return {"head": [table["head"][number] for number in columns], "rows": rows}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removesuffix("|").split("|")]


def read(folder: Path) -> dict[str, Any]:
    """The facts of the documents in a folder."""
    commands: list[dict[str, Any]] = []
    variables: dict[str, list[str]] = {}
    flags: dict[str, None] = {}
    docker: dict[str, None] = {}
    found: list[dict[str, Any]] = []

    def add(name: str, value: str = "") -> None:
        values = variables.setdefault(name, [])
        if value and value.isascii() and "$" not in value and value not in values:
            values.append(value)

    for path in sorted(folder.glob("*.txt")):
        lines = path.read_text(encoding="utf-8").splitlines()
        commands += [command for command in read_commands(lines) if command not in commands]
        for text in logical_lines(lines):
            if export := EXPORT.fullmatch(text):
                default = REFERENCE.fullmatch(export[2])
                add(export[1], (default[2] if default else export[2]).strip('"'))
            for name in SET.findall(text):
                add(name)
            if text.startswith("python"):
                flags.update(dict.fromkeys(re.findall(r" --(\w+)", text)))
            elif text.startswith("docker run"):
                docker.update(dict.fromkeys(re.findall(r" (--?[a-zA-Z][\w-]*)", text.partition("/bin/bash")[0])))
        for name, words in itertools.pairwise(lines):
            if (described := DESCRIBED.fullmatch(name)) and re.match(r"(\(.*?\))?:", words):
                flags.setdefault(described[1])
        found += tables(lines)
        for renamed in re.findall(r"自行修改([A-Z_、和]+)", "\n".join(lines)):
            for name in re.findall(r"[A-Z_]+", renamed):
                add(name)
    for table in found:
        if table["head"][0] == "字段名" and table["rows"][0][0].isupper():
            for row in table["rows"]:
                add(row[0], "" if row[4:5] == ["无"] else "".join(row[4:5]))
                for older in re.findall(r"使用\s*([A-Z_]+)", row[-1]):
                    add(older)
    return {
        "commands": commands,
        "variables": dict(sorted(variables.items())),
        "flags": sorted(flags),
        "docker_flags": sorted(docker),
        "tables": [without_descriptions(table) for table in found],
    }


def main() -> int:
    """Read the documents, and write the facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    facts = read(parser.parse_args().folder)
    OUT.write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    counts = ", ".join(f"{len(value)} {name}" for name, value in facts.items())
    print(f"wrote {os.path.relpath(OUT, ROOT)}: {counts}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
