"""Estimates: what they add up is what loading then takes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from inferplane import LLM
from inferplane.cli import main
from inferplane.cli.estimate import amount, size_of
from inferplane.cli.main import DONE, WRONG_USAGE
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.estimate import Estimate, estimate
from inferplane.errors import UsageError
from inferplane.plugins import host
from tests.e2e.test_async import CONFIG, OPTIONS
from tests.house.rules import REPOSITORY

SMALL = Estimate(
    weights=1000, copies=0, workspace=100, block=64, block_tokens=16, memory=4000, max_batch=2, model_positions=100
)


def test_what_fits():
    assert SMALL.left == 2900
    assert SMALL.blocks(2900) == 45
    assert SMALL.longest(2900) == 100 and SMALL.longest(130) == 32 and SMALL.longest(63) == 0
    assert SMALL.sequences(17, 2900) == 22  # two blocks each
    assert SMALL.default_kv_bytes == min(int(3000 * 0.3), 2 * 7 * 64)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_equals_what_is_loaded(kv_dtype):
    options = RunnerOptions(dtype="float32", kv_dtype=kv_dtype, max_batch=4)
    found = estimate(Runner.plan_only(ModelFiles(CONFIG), host(), "cpu", options), None, 2048)
    with LLM(CONFIG, **{**OPTIONS, "kv_dtype": kv_dtype}, kv_cache_bytes=10 * found.block) as llm:
        packed = {t.data_ptr(): t for t in _tensors(llm.runner.loaded.packed)}
        assert sum(t.nbytes for t in packed.values()) == found.weights
        assert llm.runner.cache.blocks == 10
        assert llm.runner.cache.block_tokens == found.block_tokens


def _tensors(found):
    import torch

    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _tensors(value)


def test_sizes():
    assert [size_of(t) for t in ("80GiB", "24G", "512 MiB", "1.5k", "7")] == [
        80 * 2**30,
        24 * 2**30,
        512 * 2**20,
        1536,
        7,
    ]
    for bad in ("", "GiB", "-1", "0", "1 parsec", "1e3"):
        with pytest.raises(UsageError):
            size_of(bad)
    assert [amount(n) for n in (0, 1023, 2**20, 3 * 2**40)] == ["0 B", "1023 B", "1.0 MiB", "3.0 TiB"]


def test_command(capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    schema = json.loads((REPOSITORY / "docs/schemas/estimate.json").read_text())
    for words in (("--device", "npu"), ("--device", "npu", "--memory", "1GiB"), ("--device", "cpu")):
        assert main.main(["estimate", *words, "--json"]) == DONE
        data = json.loads(capsys.readouterr().out)
        jsonschema.validate(data, schema)
        assert len(data["caches"]) == (0 if words == ("--device", "npu") else 2)
    assert main.main(["estimate", "--device", "npu", "--memory", "12MiB"]) == DONE
    assert "it does not fit" in capsys.readouterr().err
    assert main.main(["estimate", "--memory", "many"]) == WRONG_USAGE
