"""Estimates: what they add up is what loading then takes."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from inferplane import LLM
from inferplane.cli import main
from inferplane.cli.main import DONE, FAILED, WRONG_USAGE
from inferplane.cli.verbs.estimate import format_bytes
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.estimate import Estimate, estimate
from inferplane.engine.schedule.scheduler import Limits, Scheduler
from inferplane.kvcache import BlockAllocator
from inferplane.plugins import host
from inferplane.units import size_of
from tests.e2e.test_async import CONFIG, OPTIONS
from tests.house.rules import REPOSITORY

SMALL = Estimate(
    weights=1000, copies=0, workspace=100, block=64, block_tokens=16, memory=4000, max_num_seqs=2, model_positions=100
)


def test_what_fits():
    assert SMALL.left == 2900
    assert SMALL.blocks(2900) == 45
    assert (
        SMALL.max_sequence_tokens(2900) == 100
        and SMALL.max_sequence_tokens(130) == 32
        and SMALL.max_sequence_tokens(63) == 0
    )
    assert SMALL.sequences(17, 2900) == 22  # two blocks each
    assert SMALL.default_kv_bytes == min(int(3000 * 0.3), 2 * 7 * 64)


def test_what_fits_with_windows():
    """A sequence holds a window, a step's tokens, and a block that each of them cuts."""
    windowed = replace(SMALL, window=20, step_tokens=12)
    assert [windowed.sequences(n, 2900) for n in (16, 17, 33, 100)] == [45, 22, 15, 15]
    assert [replace(windowed, step_tokens=99).sequences(100, n * 64) for n in (3, 4, 7, 45)] == [1, 1, 1, 6]
    assert (
        windowed.max_sequence_tokens(3 * 64) == 48
        and windowed.max_sequence_tokens(4 * 64) == 100
        and windowed.max_sequence_tokens(63) == 0
    )


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("step", [1, 12, 99])
def test_where_one_fits_at_least_one_is_counted(window, step):
    """As far as the scheduler admits it: what is told to fit is neither refused nor counted as none."""
    estimated = replace(SMALL, window=window, step_tokens=step)
    for blocks in range(1, 12):
        max_sequence_tokens = estimated.max_sequence_tokens(blocks * SMALL.block)
        limits = Limits(max_num_seqs=2, max_num_batched_tokens=step, max_model_len=max_sequence_tokens)
        scheduler = Scheduler(BlockAllocator(blocks), SMALL.block_tokens, limits, window=window)
        for tokens in range(2, max_sequence_tokens + 1):
            scheduler.check(1, tokens - 1)
            scheduler.check(tokens - 1, 1)
            assert estimated.sequences(tokens, blocks * SMALL.block) >= 1, (blocks, tokens)


WINDOWED = {
    **{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 160, "hidden_size": 64, "intermediate_size": 112},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192},
    **{"use_sliding_window": True, "sliding_window": 512},
}


@pytest.mark.parametrize(
    ("full", "window", "share", "said"),
    [
        (0, 512, 0, "blocks before the last 512 tokens are released"),
        (1, None, 0.75, "layers with a window of 512 keep all tokens too"),
        (4, None, 0, None),
    ],
)
def test_windows_are_told_as_they_are_kept(full, window, share, said, tmp_path, capsys, monkeypatch):
    """As the scheduler keeps them: docs/decisions/0013."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**WINDOWED, "max_window_layers": full}))
    assert main.main(["estimate", str(path), "--device", "cpu", "--json"]) == DONE
    data = json.loads(capsys.readouterr().out)
    assert (data["kv_window"], data["kv_whole_windows_bytes"]) == (window, share * data["kv_block_bytes"])
    assert main.main(["estimate", str(path), "--device", "cpu"]) == DONE
    text = capsys.readouterr().out
    assert ("given back" in text, "75%" in text) == (window is not None, share == 0.75)
    assert main.main(["explain", str(path), "--device", "cpu"]) == DONE
    text = capsys.readouterr().out
    assert said in text if said else "keep all tokens" not in text and "are released" not in text


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_equals_what_is_loaded(kv_dtype):
    options = RunnerOptions(dtype="float32", kv_cache_dtype=kv_dtype, max_num_seqs=4)
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
    for bad in ("", "GiB", "-1", "1 parsec", "1e3", "1.5"):
        with pytest.raises(ValueError, match="is not a size"):
            size_of(bad)
    assert [format_bytes(n) for n in (0, 1023, 2**20, 3 * 2**40)] == ["0 B", "1023 B", "1.0 MiB", "3.0 TiB"]


def test_command(capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    schema = json.loads((REPOSITORY / "docs/schemas/estimate.json").read_text())
    for words in (("--device", "npu"), ("--device", "npu", "--memory", "1GiB"), ("--device", "cpu")):
        assert main.main(["estimate", *words, "--json"]) == DONE
        data = json.loads(capsys.readouterr().out)
        jsonschema.validate(data, schema)
        assert len(data["caches"]) == (0 if words == ("--device", "npu") else 2)
        assert data["fits"] is (None if words == ("--device", "npu") else True)
    small = ["estimate", "--device", "npu", "--memory", "12MiB"]
    assert main.main(small) == FAILED
    assert "it does not fit" in capsys.readouterr().err
    assert main.main([*small, "--json"]) == FAILED
    data = json.loads(capsys.readouterr().out)
    jsonschema.validate(data, schema)
    assert data["fits"] is False
    for wrong in ("many", "0"):
        assert main.main(["estimate", "--memory", wrong]) == WRONG_USAGE
