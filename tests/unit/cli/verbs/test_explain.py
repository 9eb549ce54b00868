"""`inferplane explain` on a bare machine: what is missing, and the plan all the same, for every device."""

from __future__ import annotations

import json
import re
import time

import jsonschema
import pytest

from inferplane.binding import explain_text
from inferplane.cli import main
from inferplane.engine import ModelFiles, Runner, RunnerOptions, describe_captured_steps
from tests.house.rules import DEVICES, IN_TREE, REPOSITORY

FULL_SIZE = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
"""What DeepSeek-V3's config.json has in place of the demo model's sizes."""


@pytest.fixture
def cli(capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str) -> tuple[int, str, str]:
        code = main.main(["explain", *words])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def in_tree(monkeypatch):
    """A host that serves the in-tree devices, whatever is installed."""
    from inferplane.plugins import discover

    host = discover(IN_TREE)
    monkeypatch.setattr("inferplane.plugins.host", lambda: host)
    return host


@pytest.fixture
def config(tmp_path):
    """A folder with nothing but DeepSeek-V3's config."""
    demo = json.loads((REPOSITORY / "core/inferplane/models/demo/config.json").read_text())
    folder = tmp_path / "v3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**demo, **FULL_SIZE}))
    return folder


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_is_explained_without_being_there(cli, in_tree, device):
    code, out, _ = cli("--device", device)
    assert code == main.DONE
    name = out.split(" ", 1)[0]
    assert name.partition(":")[0] == device
    (entry,) = (entry for entry in in_tree.devices() if entry.name == name)
    words = " ".join(out.split())
    status = entry.probe.presence.value
    assert words.startswith(f"{name} is {status} here: {' '.join(entry.probe.reason.split())}")
    if not entry.probe.available:
        assert f"to do: {' '.join(entry.probe.remedy.split())}" in words, "what is missing, and how to mend it"
    for site in ("model", "embed", "layers.0", "layers.1-7", "mlp", "head", "sample"):
        assert re.search(rf"^[! ] +{re.escape(site)} ", out, re.MULTILINE)
    assert "(assumed" in out


@pytest.mark.parametrize("device", DEVICES)
def test_as_json(cli, device):
    code, out, _ = cli("--device", device, "--json")
    assert code == main.DONE
    data = json.loads(out)
    jsonschema.validate(data, json.loads((REPOSITORY / "docs/schemas/explain.json").read_text()))
    assert data["assumed"] is True
    assert data["device"].partition(":")[0] == device
    assert data["probe"]["status"] == "available" or data["probe"]["remedy"]


def test_a_model_of_full_size_needs_a_second_and_no_weights(cli, config):
    cli("--device", "npu")  # imports are not counted
    start = time.process_time()  # not the wall's, which a busy machine stretches
    code, out, _ = cli(str(config), "--device", "npu")
    assert time.process_time() - start < 2
    assert code == main.DONE
    assert re.search(r"^ +layers\.3-60 ", out, re.MULTILINE)
    assert "GiB" in out
    for path in (config / "config.json", (config / "config.json").rename(config / "other.json")):
        if path.exists():
            assert cli(str(path), "--device", "npu")[0] == main.DONE


def test_options_reach_the_plan(cli, in_tree):
    options = RunnerOptions(dtype="float32", kv_cache_dtype="int8", arch="310p", ops={"layers.*.mlp": "decomposition"})
    runner = Runner.plan_only(ModelFiles("demo"), in_tree, "npu", options)
    words = "--device npu --dtype float32 --kv-dtype int8 --arch 310p --op layers.*.mlp=decomposition --json"
    data = json.loads(cli(*words.split())[1])
    del data["probe"]
    told = runner.explain()
    assert data == json.loads(json.dumps(told))


def test_python_tells_a_plan_in_the_same_words(cli, in_tree):
    options = RunnerOptions(dtype="float32", ops={"moe_experts": "reference"})
    runner = Runner.plan_only(ModelFiles("demo"), in_tree, "npu", options)
    words = ["--device", "npu", "--dtype", "float32", "--op", "moe_experts=reference"]
    for more, verbose in (((), False), (("--verbose",), True)):
        text = explain_text(runner.plan, "demo", verbose=verbose, decode_steps=describe_captured_steps(runner))
        lines = cli(*words, *more)[1].partition("\n\n")[2].splitlines()
        plain = [line.replace(lines[0][lines[0].index("; --arch") : -1], "") for line in lines[:1]] + lines[1:]
        assert " ".join(" ".join(plain).split()) == " ".join(text.split())


def test_narrow_terminals_cut_nothing_off(cli, monkeypatch):
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = cli("--device", "npu", "--verbose")
        assert max(map(len, out.splitlines())) <= columns
        assert "…" not in out


def test_losers_are_shown_when_asked(cli):
    assert " not torch:linear_float32 (rank " not in cli("--device", "npu")[1]
    assert " not torch:linear_float32 (rank " in cli("--device", "npu", "--verbose")[1]


def test_one_step_kind(cli):
    data = json.loads(cli("--device", "npu", "--step", "decode", "--json")[1])
    assert {site["step_kind"] for site in data["sites"]} == {"decode"}
    assert "steps: mixed\n" in cli("--device", "npu", "--step", "mixed")[1]


def test_step_kinds_that_differ_are_both_shown(cli):
    """A pin by pattern does not tell step kinds apart, so two plans are laid side by side by hand."""
    from inferplane.binding.plan_text import site_rows

    data = json.loads(cli("--device", "npu", "--json")[1])
    decode, mixed = ([s for s in data["sites"] if s["step_kind"] == kind] for kind in ("decode", "mixed"))
    assert [row.content(verbose=True) for row in site_rows(decode)] == [
        row.content(verbose=True) for row in site_rows(mixed)
    ]
    mixed[3]["chosen"]["kernel"] = "another"
    assert [row.content(verbose=True) for row in site_rows(decode)] != [
        row.content(verbose=True) for row in site_rows(mixed)
    ]
    assert [(row.depth, row.label) for row in site_rows(decode)][:4] == [
        (0, "model"),
        (1, "embed"),
        (1, "layers"),
        (2, "layers.0"),
    ]


def test_a_pin_to_the_reference_is_marked(cli):
    code, out, _ = cli("--device", "npu", "--op", "moe_experts=reference")
    assert code == main.DONE
    assert re.search(r"^! +experts +moe_experts +reference +pinned", out, re.MULTILINE)
    assert "hot ops on their slow reference: moe_experts" in out
    code, _, err = cli("--device", "npu", "--op", "moe_experts=reference", "--strict")
    assert code == main.FAILED
    assert "moe_experts" in err


def test_an_architecture(cli):
    _, out, _ = cli("--device", "npu", "--arch", "310p")
    assert "planned for 310p (assumed" in out
    code, _, err = cli("--device", "npu", "--arch", "31Op")
    assert code == main.WRONG_USAGE
    assert "perhaps '310p' was meant" in err


def test_files_that_are_no_config(cli, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "odd.json").write_bytes(b"\xff\x00")
    for name in ("list.json", "odd.json"):
        code, _, err = cli(str(tmp_path / name))
        assert (code, "error: " in err, "Traceback" in err) == (main.FAILED, True, False)
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    code, _, err = cli(str(tmp_path))
    assert code == main.FAILED
    assert "'NobodyKnowsForCausalLM' is not known" in err
