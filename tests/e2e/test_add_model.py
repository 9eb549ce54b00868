"""A new family is one file: the page on adding one, followed to the letter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from inferplane.models.registry import ARCHITECTURES
from tests.e2e.suite import environment, told
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import logits_of, make, prompts
from tests.house.rules import REPOSITORY

CORE = REPOSITORY / "core" / "inferplane"
MODELS = CORE / "models"
FAMILIES = MODELS / "families"
MOST_LINES = 130
"""Two thirds of the families have fewer than 60; those of several kinds of layers need more."""
MORE_LINES = {"deepseek_v4.py": 250}
"""Files of families whose published names differ from all others' as well."""
LENGTHS = (70, 9, 1)

USE = """
import sys, torch
from inferplane import LLM
from tests.e2e.tiny_models import prompts
folder, out, *lengths = sys.argv[1:]
with LLM(folder, device="cpu", dtype="float32") as llm:
    ids = prompts(llm.engine.vocab, tuple(map(int, lengths)))
    torch.save([llm.logits(ids), llm.logits(ids, chunk_tokens=7)], out)
"""


def families():
    """The file of each architecture."""
    return {name: FAMILIES / f"{make.__module__.rpartition('.')[2]}.py" for name, make in ARCHITECTURES.items()}


def test_families_are_short_files_that_nobody_names():
    assert len(set(families().values())) == len(ARCHITECTURES) >= 8
    for name, path in families().items():
        assert len(path.read_text().splitlines()) <= MORE_LINES.get(path.name, MOST_LINES), path
        lists = {"conformance", "gguf"}  # gguf: what llama.cpp calls each family
        named = {p for p in CORE.rglob("*.py") if name in p.read_text() and lists.isdisjoint(p.parts)}
        example = MODELS / "reading" / "config.py"  # whose remedy for a config without one gives an example
        assert named - {example} == {path}, named


@pytest.mark.parametrize("family", sorted(families().values(), key=lambda path: path.name), ids=lambda path: path.stem)
def test_families_say_nothing_of_hardware(family):
    imported = set(re.findall(r"^(?:from|import) (\S+)", family.read_text(), re.MULTILINE)) - {"__future__"}
    assert imported <= {
        *("collections.abc", "dataclasses", "typing", "math", "torch"),
        *(f"inferplane.{name}" for name in ("errors", "ops", "types")),
        *(".".join(path.relative_to(CORE.parent).with_suffix("").parts) for path in MODELS.rglob("*.py")),
        *(".".join(path.parent.relative_to(CORE.parent).parts) for path in MODELS.rglob("__init__.py")),
    }, imported


def test_the_page_is_enough(tmp_path):
    """Its constructor, put into one new file, runs a model with those layers as transformers does."""
    page = (REPOSITORY / "docs" / "adding-a-model.md").read_text()
    code = re.search(r"```python \S+/family\.py\n(.*?)```", page, re.DOTALL)[1]
    core = shutil.copytree(CORE, tmp_path / "core" / "inferplane", ignore=shutil.ignore_patterns("demo", "*-pytest-*"))
    (core / "models" / "families" / "family.py").write_text(code)
    folder, out = tmp_path / "model", tmp_path / "logits"
    model = make("qwen2", "tied", folder)  # layers with biases on q, k and v
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["FamilyForCausalLM"]}))
    done = subprocess.run(
        [sys.executable, "-c", USE, str(folder), str(out), *map(str, LENGTHS)],
        env=environment(paths=(str(core.parent),)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, told(done)
    for found in torch.load(out):
        for ids, got in zip(prompts(model.config.vocab_size, LENGTHS), found, strict=True):
            assert error(got, logits_of(model, ids)) <= FLOAT32
