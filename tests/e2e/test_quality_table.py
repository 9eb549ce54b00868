"""The benchmark of formats' losses on the demo model: two rows, and going on with a table that is begun."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane import LLM
from inferplane.engine import ModelFiles
from tests.e2e.tiny_models import llama_config, random_model

REPOSITORY = Path(__file__).resolve().parents[2]


def run(out: Path, *rows: str) -> str:
    words = ["--model", str(ModelFiles("demo").folder), "--texts", str(REPOSITORY / "docs" / "decisions")]
    words += ["--out", str(out), "--windows", "4", "--calibration-windows", "2", "--rows", *rows]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "quality.py"), *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_two_rows_and_a_third_later(tmp_path):
    table = run(tmp_path, "KV int4", "int4")
    first = json.loads((tmp_path / "plain-KV-int4.json").read_text())
    assert first["windows"] == 4 and first["tokens"] == 4 * 511
    assert 0 < first["divergence"]["value"] < 0.5 and first["row"] == "KV int4"
    assert table.count("\n| ") == 2 and "| KV cache in int4 |" in table and "KV int4: " in table
    changed = {**first, "perplexity": {**first["perplexity"], "value": 12345.0}}
    (tmp_path / "plain-KV-int4.json").write_text(json.dumps(changed))
    again = run(tmp_path, "KV int4", "KV int8")
    assert "12345.00" in again, "a row that is there is not measured again"
    assert not list(tmp_path.glob("copy-*"))


@pytest.mark.parametrize("base", ["rotated", "planted"])
def test_another_base_computes_the_same(base, tmp_path):
    """What is changed in a model changes no result but by rounding to bfloat16."""
    random_model(llama_config(hidden_size=128, tie_word_embeddings=True), seed=3).save_pretrained(tmp_path / "model")
    spec = importlib.util.spec_from_file_location("quality", REPOSITORY / "benchmarks" / "quality.py")
    quality = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = quality  # dataclasses look their module up
    spec.loader.exec_module(quality)
    make = {"rotated": quality.write_rotated, "planted": quality.write_planted}[base]
    make(tmp_path / "model", tmp_path / "other")
    found = []
    for model in ("model", "other"):
        with LLM(tmp_path / model, device="cpu", dtype="float32") as llm:
            found.append(llm.logits([list(range(40, 80))])[0])
    want, got = found
    assert 0 < (got - want).abs().max() <= 0.05 * want.abs().max()
