"""`inferplane bench` with the demo model, as small as it goes: that it runs, and what it writes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from inferplane.cli import main
from tests.house.rules import REPOSITORY

SCHEMA = json.loads((REPOSITORY / "docs" / "schemas" / "bench.json").read_text(encoding="utf-8"))
SMALL = ("--device", "cpu", "--warmup", "0", "--max-model-len", "128", "--input-len", "12")


@pytest.fixture
def bench(capsys, monkeypatch, tmp_path):
    """Runs the verb here; returns its table, its JSON (checked against the schema) and its page."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)

    def run(kind: str, *words: str) -> tuple[str, dict, str]:
        files = ("--save", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
        code = main.main(["bench", kind, *SMALL, *words, *files])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert "\x1b" not in out + err and sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "a.json"]
        facts = json.loads((tmp_path / "a.json").read_text())
        jsonschema.Draft202012Validator(SCHEMA).validate(facts)
        return out, facts, (tmp_path / "a.html").read_text()

    return run


def test_latency(bench):
    out, facts, page = bench("latency", "--max-batch", "3", "--output-len", "5", "--repeats", "2")
    assert [len(run["requests"]) for run in facts["runs"]] == [3, 3]
    assert {(r["prompt_tokens"], r["output_tokens"]) for run in facts["runs"] for r in run["requests"]} == {(12, 5)}
    assert facts["latencies"]["itl"]["count"] == 2 * 3 * 4 and facts["latencies"]["ttft"]["count"] == 6
    assert facts["rates"]["prefill_tokens"]["median"] > 0
    assert "time to first token" in out and page.count("<svg") == 6


def test_throughput_beside_static_batches(bench):
    words = ("--requests", "5", "--max-batch", "2", "--output-len", "2-9", "--repeats", "2", "--compare", "static")
    out, facts, page = bench("throughput", *words, "--speculate-method", "mtp", "--speculate-max-draft-token-num", "2")
    assert [run["batching"] for run in facts["runs"]] == ["continuous"] * 2 + ["static"] * 2
    asked = [[r["output_tokens"] for r in run["requests"]] for run in facts["runs"]]
    assert all(lengths == asked[0] for lengths in asked) and set(asked[0]) <= set(range(2, 10))
    assert all(max(run["steps"]["batch"]) == 2 and run["steps"]["used_blocks"][-1] == 0 for run in facts["runs"])
    assert len(facts["continuous_over_static"]["values"]) == 2
    drafts = facts["speculation"]
    assert len(drafts["drafted"]) == 2 and all(a <= d for a, d in zip(drafts["accepted"], drafts["drafted"]))
    assert "continuous over static batching" in out and "Drafts by position" in page


def test_a_dataset_with_arrivals(bench, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text('{"prompt": "def main():", "output_len": 3}\n{"prompt": [5, 6, 7]}\n')
    words = ("--dataset", str(path), "--rate", "50", "--output-len", "4", "--repeats", "1")
    _, facts, _ = bench("throughput", *words, "--temperature", "0.8", "--top-p", "0.9")
    requests = facts["runs"][0]["requests"]
    assert [r["output_tokens"] for r in requests] == [3, 4] and requests[1]["prompt_tokens"] == 3
    assert requests[0]["due_s"] == 0 < requests[1]["due_s"]


def test_startup(bench):
    out, facts, page = bench("startup", "--repeats", "1")
    phases = {name: s["median"] for name, s in facts["rates"].items()}
    parts = {"interpreter", "import", "probe", "open", "bind", "canary", "load", "link", "cache", "rest", "first_token"}
    assert set(phases) == {*parts, "total"} and not facts["runs"]
    assert sum(phases[name] for name in parts) == pytest.approx(phases["total"], rel=0.1, abs=0.2)
    assert "canary" in out and "canary" in page


def test_json_prints_the_figures_as_every_verb_does(capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    assert main.main(["bench", "latency", "demo", *SMALL, "--output-len", "2", "--repeats", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    jsonschema.Draft202012Validator(SCHEMA).validate(facts := json.loads(line))
    assert facts["benchmark"] == "latency" and "wrote" not in err
    assert main.main(["bench", "latency", "--repeats", "0", "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and json.loads(err)["error"]["what"] == "--repeats 0."


def test_what_cannot_run_writes_nothing(capsys, tmp_path):
    path = tmp_path / "a.json"
    words = ["bench", "throughput", *SMALL, "--output-len", "500", "--requests", "2", "--save", str(path)]
    assert main.main(words) == 1
    out, err = capsys.readouterr()
    assert not out and "error: " in err and "to do: " in err and not path.exists()
    assert main.main(["bench", "startup", "--device", "npu", "--repeats", "1", "--warmup", "0"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert "Device 'npu'" in err[0] and "errors." not in err[0] and "To do:" not in err[0]
    assert any(line.startswith("to do: ") for line in err)
