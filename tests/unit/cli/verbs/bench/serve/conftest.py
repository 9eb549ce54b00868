"""Runs `bench serve` in this process, on datasets that script the server."""

from __future__ import annotations

import json

import pytest

from inferplane.cli import main
from tests.unit.types.test_schemas import check as check_schema


@pytest.fixture
def bench(capsys, monkeypatch, tmp_path):
    """Runs the verb here; returns its exit code, its JSON (checked against the schema), its output and its errors."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    for name in ("INFERPLANE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(url: str, *words: str):
        path = tmp_path / "figures.json"
        path.unlink(missing_ok=True)
        code = main.main(["bench", "serve", "--url", url, "--save", str(path), *words])
        out, err = capsys.readouterr()
        facts = json.loads(path.read_text()) if path.exists() else None
        if facts is not None:
            check_schema("bench_serve", facts)
            for level in facts["levels"]:
                counts = level["counts"]
                assert counts["sent"] == counts["ended"] + counts["failed"] == len(level["requests"])
                assert counts["failed"] == sum(counts["failures"].values())
        return code, facts, out, err

    return run


@pytest.fixture
def prompts(tmp_path):
    """Writes a dataset of prompts, each of which says what the server is to do."""

    def write(*each: str) -> tuple[str, ...]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text, "output_len": 3}) + "\n" for text in each))
        return "--dataset", str(path), "--requests", str(len(each)), "--warmup", "0"

    return write
