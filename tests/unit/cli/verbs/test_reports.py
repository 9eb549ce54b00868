"""The verbs that need no model: devices, doctor, ops, conform."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import EntryPoint

import pytest

from inferplane.cli.main import DONE, FAILED
from tests.house.rules import IN_TREE, REPOSITORY

# ---------------------------------------------------------------- devices, doctor


def test_devices_as_json(cli, plain_devices):
    code, out, err = cli("devices", "--json")
    assert (code, err) == (DONE, "")
    data = json.loads(out)
    assert set(data) == {"schema", "devices", "quarantined", "notes"}
    assert data["schema"] == 1
    for entry in data["devices"]:
        assert set(entry) == {
            *("name", "status", "reason", "remedy", "versions", "count"),
            *("distribution", "version", "in_tree", "variant_of", "torch_device", "auto_rank"),
        }
        assert entry["reason"]
        assert bool(entry["remedy"]) == (entry["status"] != "available")
    assert {entry["name"] for entry in data["devices"]} == plain_devices


def test_devices_for_eyes(cli, plain_devices, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli("devices")
    assert code == DONE
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line != line.rstrip()]
    for name in plain_devices:
        assert re.search(rf"^{name} +(available|absent|broken) ", out, re.MULTILINE)


def test_devices_tell_of_quarantine(cli, wheels, monkeypatch):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad="raise OSError('no driver')")
    host = wheels.discover()
    monkeypatch.setattr("inferplane.plugins.host", lambda: host)
    monkeypatch.setenv("COLUMNS", "500")  # long paths are not broken
    _, out, _ = cli("devices")
    assert "homely  available  made of thin air (2 of them)" in out
    words = " ".join(out.split())
    assert f"in quarantine bad import: OSError: no driver at {wheels.folder}/fake_bad.py:1 " in words
    assert "acme-bad 0.3" in out
    assert "Traceback" not in out and "Traceback" in cli("devices", "--debug")[1]
    (record,) = json.loads(cli("devices", "--json")[1])["quarantined"]
    assert (record["entry_point"], record["stage"], record["distribution"]) == ("bad", "import", "acme-bad")
    code, out, _ = cli("doctor")
    assert code == FAILED, "a plugin that does not load is a fault"
    assert "no driver" in out


def test_doctor(cli, plain_devices):
    code, out, _ = cli("doctor", "--json")
    data = json.loads(out)
    assert code == (FAILED if data["status"] == "fail" else DONE)
    assert set(data) == {"schema", "status", "lines"}
    assert {key for line in data["lines"] for key in line} == {"subject", "status", "detail", "remedy"}
    _, out, _ = cli("doctor")
    for name in plain_devices:
        assert re.search(rf"^(ok|warn|fail) +device {name} ", out, re.MULTILINE)


def test_lines_that_say_the_same_are_one():
    from inferplane.cli.verbs.doctor import merge_lines
    from inferplane.plugins.doctor import Line

    lines = [Line("plugin a", "ok", "fine"), Line("plugin b", "ok", "fine"), Line("plugin c", "warn", "odd", "mend it")]
    assert merge_lines(lines) == [Line("plugins", "ok", "a, b: fine"), lines[2]]


# ---------------------------------------------------------------- ops


def test_ops_as_json(cli, plain_devices):
    (op,) = json.loads(cli("ops", "linear", "--json")[1])["ops"]
    assert op["op"] == "linear" and op["hot"] and op["arguments"] == ["x"]
    assert set(op["tolerance"]) == {"float32", "bfloat16", "float16"}
    assert {kernel["device"] for kernel in op["kernels"]} == plain_devices
    assert set(op["kernels"][0]) == {
        *("device", "kernel", "provider", "rank", "dtypes", "formats", "needs"),
        *("capture_safe", "batch_invariant", "note", "evidence"),
    }
    data = json.loads(cli("ops", "--json")[1])
    assert data["device"] is None and all(not op["kernels"] for op in data["ops"])


def test_ops_for_eyes(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli("ops")
    assert re.search(r"^rms_norm +y = ", out, re.MULTILINE)
    assert re.search(r"^linear +hot ", out, re.MULTILINE)
    for words in ((), ("--device", "npu"), ("linear",)):
        code, out, _ = cli("ops", *words)
        assert code == DONE
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out, "nothing is cut off"
    code, out, _ = cli("ops", "--device", "npu")
    assert re.search(r"^rms_norm +\S+:rms_norm +\d+ ", out, re.MULTILINE)


def test_evidence_is_the_highest_level_that_passed():
    from inferplane.cli.evidence import Evidence

    def file(level, *results):
        return {"level": level, "results": [{"op": op, "status": status} for op, status in results]}

    evidence = Evidence([file("L3", ("rms_norm", "passed"), ("linear", "failed")), file("L2", ("linear", "passed"))])
    assert [evidence.level(op) for op in ("rms_norm", "linear", "rope")] == ["L3", "L2", ""]
    files = [file("none", ("rope", "passed")), file("L2", ("rope", "passed"), ("rope", "refused"))]
    assert Evidence(files).level("rope") == "L2" and Evidence(files[:1]).level("rope") == ""
    assert Evidence([file("L4", ("rope", "passed"))]).level("rope") == "L3", "whole models prove ops one by one"


def test_evidence_of_an_op_is_none_of_its_other_kernels():
    from inferplane.cli.evidence import Evidence

    cases = ["ops/rope/a:rope_wide/t1", "kernels/test_agrees_with_the_oracle[b:rope-t1-float16]"]
    rows = [{"op": "rope", "case": case, "status": "passed"} for case in cases]
    evidence = Evidence([{"level": "L2", "results": rows}])
    levels = {name: evidence.level("rope", name) for name in ("a:rope_wide", "b:rope", "a:rope", "c:rope")}
    assert levels == {"a:rope_wide": "L2", "b:rope": "L2", "a:rope": "", "c:rope": ""}


EVIDENCE = [json.loads(path.read_text()) for path in REPOSITORY.glob("backends/*/evidence/*.json")]


@pytest.mark.parametrize("device", sorted({evidence["backend"] for evidence in EVIDENCE}))
def test_each_backend_finds_its_evidence(device):
    from inferplane.cli.evidence import Evidence
    from inferplane.plugins import discover

    evidence = Evidence.of(discover(IN_TREE).backend_for_explain(device))
    assert evidence.files and evidence.level("rms_norm")


# ---------------------------------------------------------------- conform


@pytest.mark.parametrize(("installed", "plugin"), [(True, []), (False, ["-p", "inferplane.conformance.plugin"])])
def test_conform_runs_pytest(monkeypatch, installed, plugin):
    from inferplane.cli.verbs import conform

    points = [EntryPoint("inferplane_conformance", conform.PLUGIN, "pytest11")] if installed else []
    monkeypatch.setattr(conform.metadata, "entry_points", lambda group: points)
    words = conform.command("homely", ["-x"])
    assert words[0] == sys.executable
    assert words[1:] == ["-m", "pytest", *plugin, "--pyargs", "inferplane.conformance", "--device", "homely", "-x"]


@pytest.mark.parametrize("more", [["-k", "rms norm", "-x"], ["--", "-k", "rms norm", "-x"]])
def test_conform_passes_on_words_and_exit_code(cli, monkeypatch, tmp_path, more):
    from inferplane.cli.verbs import conform

    code = "import sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:])); sys.exit(5)"
    passed = tmp_path / "words"
    monkeypatch.setattr(
        conform, "command", lambda device, more: [sys.executable, "-c", code, str(passed), device, *more]
    )
    assert cli("conform", "--device", "homely", *more)[0] == 5
    assert passed.read_text() == repr(["homely", "-k", "rms norm", "-x"])
