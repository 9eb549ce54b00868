"""Estimates: what they add up is what loading then takes."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from inferplane import LLM
from inferplane.cli import main
from inferplane.cli.main import DONE, FAILED, WRONG_USAGE
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.estimate import Estimate, estimate
from inferplane.engine.schedule.scheduler import Limits, Scheduler
from inferplane.kvcache import BlockAllocator, BlockPools, PoolShape
from inferplane.plugins import host
from inferplane.units import format_bytes, size_of
from tests.e2e.test_async import CONFIG, OPTIONS
from tests.house.rules import REPOSITORY

SMALL = Estimate(
    weights=1000,
    copies=0,
    workspace=100,
    pools=(PoolShape((None,), 64),),
    block_tokens=16,
    memory=4000,
    max_num_seqs=2,
    model_positions=100,
)


def with_windows(*windows, **more):
    return replace(SMALL, pools=(PoolShape(windows, 64),), **more)


def test_what_fits():
    assert SMALL.left == 2900
    assert SMALL.blocks(2900) == (45,)
    assert (
        SMALL.max_sequence_tokens(2900) == 100
        and SMALL.max_sequence_tokens(130) == 32
        and SMALL.max_sequence_tokens(63) == 0
    )
    assert SMALL.sequences(17, 2900) == 22  # two blocks each
    assert SMALL.default_kv_bytes == min(int(3000 * 0.3), 2 * 7 * 64)


def test_what_fits_with_windows():
    """A sequence holds a window and a token, wherever they begin in a block, and one of them a step's tokens."""
    windowed = with_windows(20, step_tokens=12)
    assert [windowed.sequences(n, 2900) for n in (16, 17, 33, 100)] == [45, 22, 15, 15]
    assert [replace(windowed, step_tokens=99).sequences(100, n * 64) for n in (2, 3, 7, 10, 45)] == [0, 1, 1, 2, 13]
    assert (
        windowed.max_sequence_tokens(2 * 64) == 32
        and windowed.max_sequence_tokens(3 * 64) == 100
        and windowed.max_sequence_tokens(63) == 0
    )


def test_what_fits_with_several_tables():
    """One table keeps 100 tokens in 7 blocks, two keep a window of 20 in 3 each."""
    mixed = with_windows(None, 20, 20, table_layers=(2, 2, 1))
    assert [mixed.sequences(100, n * 64) for n in (12, 13, 25, 26)] == [0, 1, 1, 2]
    assert replace(mixed, step_tokens=99).sequences(100, 34 * 64) == 2  # a prompt's step holds 21 blocks, then 13
    assert [mixed.max_sequence_tokens(n * 64) for n in (2, 3, 8, 9, 13)] == [0, 16, 32, 48, 100]
    assert mixed.kv_token == 3 * 64 / 16 and mixed.min_kv_bytes == 3 * 64
    assert mixed.data()["kv_tables"] == [{"window": w, "layers": n} for w, n in ((None, 2), (20, 2), (20, 1))]


def test_what_fits_with_several_pools():
    """Blocks of 64 bytes for all tokens, of 16 for a window of 20: 7 and 3 of a sequence of 100 tokens."""
    pools = PoolShape((None,), 64), PoolShape((20,), 16)
    mixed = replace(SMALL, pools=pools, table_layers=(1, 3))
    assert mixed.block == mixed.min_kv_bytes == 80 and mixed.windows == (None, 20)
    assert mixed.blocks(2 * (7 * 64 + 3 * 16) + 6 * 16) == (14, 12), "two sequences, and a step of 7 blocks less one"
    assert mixed.sequences(100, 79) == 0 and mixed.sequences(100, 10_000) == 2
    assert mixed.max_sequence_tokens(79) == 0 and mixed.max_sequence_tokens(10_000) == 100
    assert mixed.max_kv_bytes == 2 * 7 * 80
    assert mixed.data()["kv_pools"] == [{"tables": 1, "block_bytes": 64}, {"tables": 1, "block_bytes": 16}]


@pytest.mark.parametrize("windows", [(None,), (1,), (15,), (16,), (17,), (33,), (None, 17), (33, 1, 1)])
@pytest.mark.parametrize("step", [1, 12, 99])
def test_where_one_fits_at_least_one_is_counted(windows, step):
    """As far as the scheduler admits it: what is told to fit is neither refused nor counted as none."""
    estimated = with_windows(*windows, step_tokens=step)
    for blocks in range(1, 12):
        max_sequence_tokens = estimated.max_sequence_tokens(blocks * SMALL.block)
        limits = Limits(max_num_seqs=2, max_num_batched_tokens=step, max_model_len=max_sequence_tokens)
        scheduler = Scheduler(BlockPools([BlockAllocator(blocks)]), SMALL.block_tokens, limits, windows=windows)
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
    ("full", "window", "tables", "said"),
    [
        (0, 512, [(512, 4)], "blocks before the last 512 tokens are released"),
        (
            1,
            None,
            [(None, 1), (512, 1), (512, 1), (512, 1)],
            "blocks before the last 512 tokens of 3 layers are released",
        ),
        (2, None, [(None, 2), (512, 2)], "blocks before the last 512 tokens of 2 layers are released"),
        (4, None, [(None, 4)], None),
    ],
)
def test_windows_are_told_as_they_are_kept(full, window, tables, said, tmp_path, capsys, monkeypatch):
    """As the scheduler keeps them: docs/decisions/0033."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**WINDOWED, "max_window_layers": full}))
    assert main.main(["estimate", str(path), "--device", "cpu", "--json"]) == DONE
    data = json.loads(capsys.readouterr().out)
    assert (data["kv_window"], data["kv_whole_windows_bytes"]) == (window, 0)
    assert [(t["window"], t["layers"]) for t in data["kv_tables"]] == tables
    token = 4 * 2 * 2 * 16 * 4  # of four layers, K and V of two heads of 16 entries, float32
    assert data["kv_token_bytes"] == token and data["kv_block_bytes"] * len(tables) == token * data["kv_block_tokens"]
    assert main.main(["estimate", str(path), "--device", "cpu"]) == DONE
    text = capsys.readouterr().out
    windowed = sum(layers for w, layers in tables if w)
    assert (f"of {windowed} of 4 layers: what lies before it is given back" in text) == (said is not None)
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
    capsys.readouterr()
    assert main.main(["estimate", "--memory", "16"]) == WRONG_USAGE
    assert "perhaps 16GiB was meant" in capsys.readouterr().err
    assert main.main(["estimate", "--memory", "12MiB"]) == FAILED  # tries further numbers of devices
    assert capsys.readouterr().err.count("device=auto takes") == 1


BIG = {
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 4096},
    **{"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096},
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def estimated(tmp_path, capsys, monkeypatch):
    """Runs `estimate --json` on `BIG`; returns exit code, data, standard output as text, and standard error."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BIG))
    schema = json.loads((REPOSITORY / "docs/schemas/estimate.json").read_text())

    def run(*words):
        code = main.main(["estimate", str(path), "--device", "npu", *words, "--json"])
        out = capsys.readouterr().out
        data = json.loads(out) if out else None
        if data is not None:
            jsonschema.validate(data, schema)
        main.main(["estimate", str(path), "--device", "npu", *words])
        return (code, data, *capsys.readouterr())

    return run


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_devices_share_what_is_estimated(estimated, devices):
    whole, part = (estimated("--tensor-parallel-size", str(n))[1] for n in (1, devices))
    assert part["devices"] == devices and part["devices_needed"] is None
    assert whole["weight_bytes"] / devices <= part["weight_bytes"] < 1.2 * whole["weight_bytes"] / devices
    assert part["kv_token_bytes"] == whole["kv_token_bytes"] / devices


@pytest.mark.parametrize(
    ("memory", "given", "needed"),
    [("1GiB", 1, None), ("350MiB", 1, None), ("200MiB", 1, 2), ("120MiB", 1, 4), ("120MiB", 2, 4), ("1MiB", 1, None)],
)
def test_what_does_not_fit_is_told_with_the_devices_on_which_it_does(estimated, memory, given, needed):
    code, data, out, err = estimated("--memory", memory, "--tensor-parallel-size", str(given))
    assert data["fits"] is (code == DONE) and data["devices_needed"] == needed
    assert ("each of 2 devices" in out) == (given == 2)
    if needed is not None:
        assert f"it fits on {needed} such devices (--tensor-parallel-size)" in err
        assert estimated("--memory", memory, "--tensor-parallel-size", str(needed))[0] == DONE
        assert estimated("--memory", memory, "--tensor-parallel-size", str(needed // 2))[0] == FAILED
    elif code == FAILED:
        assert "no power of two of such devices up to 64 is enough" in err


def test_devices_that_cannot_share(estimated):
    code, data, _, err = estimated("--tensor-parallel-size", "3")
    assert (code, data) == (WRONG_USAGE, None) and "cannot be shared equally by 3 ranks" in err
    code, data, _, err = estimated("--tensor-parallel-size", "0")
    assert (code, data) == (WRONG_USAGE, None) and "--tensor-parallel-size 0" in err


@pytest.mark.parametrize(("rank", "answers"), [(0, True), (1, False), (3, False)])
def test_of_several_processes_one_answers(estimated, monkeypatch, rank, answers):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    code, data, out, _ = estimated("--memory", "1GiB")
    assert code == DONE and bool(data) is bool(out) is answers
    assert not answers or (data["devices"] == 4 and "each of 4 devices" in out)
