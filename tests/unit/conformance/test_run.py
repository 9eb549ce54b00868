"""The suite as a run of pytest: options, exit status, strict expectations, evidence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from inferplane.conformance import evidence, xfails
from inferplane.conformance.evidence import CaseResult, Run, level
from inferplane.errors import UsageError
from tests.e2e.suite import PLUGIN, conformance, environment, told
from tests.house.rules import REPOSITORY
from tests.unit.support.subjects import subject

DEVICES = """
from inferplane.plugin import HOST, Backend, DeviceError, DeviceState, Features, Kernels, Presence, Probe, hookimpl

INFERPLANE_API = (1, 0)
KERNELS = Kernels()


@KERNELS("rms_norm", "made", rank=90)
def rms_norm(p, x):
    h = x.float()
    y = (h * (h.square().mean(-1, keepdim=True) + p.eps).rsqrt() * p.weight.float()).to(x.dtype)
    return y[..., :-1] if x.shape[-1] == 576 else y


class Made(Backend):
    name, torch_device = "made", HOST

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "made in this test", devices=1)

    def open(self):
        return DeviceState(HOST, "made", "made1", Features(["bf16"]), self.memory())

    def kernels(self):
        return KERNELS


class Promising(Made):
    name = "promising"

    def open(self):
        raise DeviceError("The driver does not answer.", remedy="start it again")


class Away(Made):
    name = "away"

    @classmethod
    def probe(cls):
        return Probe(Presence.ABSENT, "no card is in the slot", "put one in")


@hookimpl
def inferplane_register_backends(register):
    for backend in (Made, Promising, Away):
        register(backend.name, backend)
"""
LINK = "# rows of 576 lose an entry: https://example.org/issues/1\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the suite on a device of `DEVICES`, in a folder of its own."""
    folder = tmp_path_factory.mktemp("devices")
    (folder / "made_devices.py").write_text(DEVICES)
    env = environment("made_devices", paths=(str(folder),))
    return lambda device, *more: conformance(device, *more, cwd=folder, env=env)


def test_a_failure_says_all(run):
    done = run("made", "-k", "ops and 576")
    assert done.returncode == 1, told(done)
    for words in (
        "made:rms_norm does not compute rms_norm",
        "mean(x^2) + eps) * (weight + offset)",  # the op's formula
        "t17_d576, a mixed step, seed 1",
        "[17, 576] bfloat16",
        "made (made, made1)",
        "tolerance  0.008",
        "result 0 has shape [17, 575] instead of [17, 576]",
        "ops/rms_norm/made:rms_norm/t17_d576/bfloat16",
    ):
        assert words in done.stdout, f"{words!r} is not said\n{told(done)}"


def test_expected_failures_are_strict(run, tmp_path):
    """One list expects what fails and what passes; the other only what fails, and its run has a worker."""
    listed, evidence = tmp_path / "xfails.txt", tmp_path / "evidence" / "made.json"
    listed.write_text(
        f"{LINK}ops/rms_norm/*/t17_d576/*\n\n# gone: https://example.org/2\nops/rms_norm/*/strided/float32\n"
    )
    done = run("made", "-k", "ops", "--xfails", str(listed), "--evidence", str(evidence))
    assert done.returncode == 1 and "XPASS(strict)" in done.stdout, told(done)
    data = json.loads(evidence.read_text())
    jsonschema.validate(data, json.loads((REPOSITORY / "docs" / "schemas" / "evidence.json").read_text()))
    assert data["hardware"] == "made, made1" and data["level"] == "none" and data["backend"] == "made"
    ended = {r["case"].removeprefix("ops/rms_norm/made:rms_norm/"): r for r in data["results"]}
    assert (
        ended["t17_d576/float32"]["status"] == "xfailed"
        and "https://example.org" in ended["t17_d576/float32"]["detail"]
    )
    assert ended["strided/float32"]["status"] == "failed"
    assert ended["t3_d64/bfloat16"]["status"] == "passed" and 0 < ended["t3_d64/bfloat16"]["error"] <= 8e-3
    assert ended["t3_d64/bfloat16"]["op"] == "rms_norm"

    listed.write_text(f"{LINK}ops/rms_norm/*/t17_d576/*\n")
    more = ["-p", "xdist", "-n", "1"]
    done = run("made", "-k", "ops", "--xfails", str(listed), "--evidence", str(evidence), *more)
    assert done.returncode == 0 and "2 xfailed" in done.stdout, told(done)
    assert json.loads(evidence.read_text())["hardware"] == "made, made1"


def test_what_has_not_run_is_not_green(run):
    done = run("away")
    assert done.returncode == 5, told(done)
    assert "NOT RUN on away: it is absent: no card is in the slot; to do: put one in" in done.stdout
    assert "level proved: L0" in done.stdout and "failed" not in done.stdout


def test_a_device_that_does_not_open(run):
    done = run("promising", "-k", "ops")
    assert done.returncode != 0, told(done)
    assert "The driver does not answer." in done.stdout and "claims to be available" in done.stdout
    assert done.stdout.count("The driver does not answer.") < 5, "said for every case"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("nobodys",), "Unknown device 'nobodys'"),
        (("made", "--dtype", "float12"), "--dtype 'float12' cannot be read"),
        (("made", "--xfails", "no_such_file"), "expected failures cannot be read"),
    ],
)
def test_wrong_usage(run, more, words):
    done = run(*more)
    assert done.returncode == 4 and words in done.stderr, told(done)


def test_other_runs_are_left_alone(tmp_path):
    """With the plugin loaded, a project's own --device works, and nothing heavy is imported."""
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')\n")
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_own(request):\n"
        "    assert request.config.getoption('--device') == 'theirs'\n"
        f"    assert {PLUGIN!r} in sys.modules and not {{'torch', 'inferplane.engine'}} & set(sys.modules)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        PLUGIN,
        "-p",
        "no:xdist",
        "--device",
        "theirs",
        "-q",
        "-o",
        "addopts=",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, told(done)


# -- the parts


def test_xfails_are_read(tmp_path):
    path = tmp_path / "xfails.txt"
    path.write_text(
        "\n# No bf16 on this chip,\n# see https://example.org/1\nops/a/*\n  ops/b/?  \n# Other: https://example.org/2\nmodels/c\n\n"
    )
    found = xfails.read(path)
    assert [(x.pattern, x.line) for x in found] == [("ops/a/*", 4), ("ops/b/?", 5), ("models/c", 7)]
    assert found[0].reason == found[1].reason == "No bf16 on this chip, see https://example.org/1"
    assert found[2].reason == "Other: https://example.org/2"
    assert found[0].matches("ops/a/b/c") and not found[0].matches("ops/b") and not found[1].matches("ops/b/xx")


@pytest.mark.parametrize("text", ["ops/a\n", "# no link\nops/a\n", "# https://example.org\nops/a\n\nops/b\n"])
def test_xfails_need_a_reason_and_a_link(tmp_path, text):
    (tmp_path / "xfails.txt").write_text(text)
    with pytest.raises(UsageError, match="without a reason and a link"):
        xfails.read(tmp_path / "xfails.txt")


@pytest.mark.parametrize(
    ("statuses", "complete", "proved"),
    [
        ({"hygiene": "passed"}, True, "L0"),
        ({"hygiene": "failed", "ops": "passed", "kvcache": "passed", "models": "passed"}, True, "none"),
        ({"hygiene": "passed", "ops": "passed", "kvcache": "passed", "models": "passed"}, True, "L4"),
        ({"hygiene": "passed", "ops": "passed", "kvcache": "passed", "models": "passed"}, False, "none"),
        (
            {"hygiene": "passed", "ops": "passed refused xfailed", "kvcache": "passed", "models": "passed not_run"},
            True,
            "L3",
        ),
        ({"hygiene": "passed", "ops": "passed failed", "kvcache": "passed", "models": "passed"}, True, "L0"),
        ({"hygiene": "passed", "ops": "refused", "kvcache": "passed", "models": "passed"}, True, "L0"),
        ({"hygiene": "passed", "ops": "passed", "kvcache": "not_run", "models": "passed"}, True, "L0"),
        ({}, True, "none"),
    ],
)
def test_levels(statuses, complete, proved):
    results = [
        CaseResult(group, f"{group}/{i}", status.replace("_", " "))
        for group, several in statuses.items()
        for i, status in enumerate(several.split())
    ]
    assert level(results, complete=complete) == proved
    on_emulator = "L2" if proved in ("L3", "L4") else proved
    assert level(results, complete=complete, emulated=True) == on_emulator, "an emulator proves nothing of the hardware"


def test_evidence_says_what_stood_for_the_hardware(tmp_path):
    run = Run("Some chip, x1", "pytest", complete=True, emulated="a vendor's operators on the host")
    results = [CaseResult(group, f"{group}/0", "passed") for group in ("hygiene", "ops", "kvcache", "models")]
    evidence.write(str(tmp_path / "e.json"), subject(), results, run)
    written = json.loads((tmp_path / "e.json").read_text())
    assert written["level"] == "L2"
    assert written["hardware"] == "none; Some chip, x1 emulated by a vendor's operators on the host"


def test_evidence_names_its_file_in_a_folder(tmp_path):
    """After its level, its day and the device's variant; in one that is there, and in one to be made."""
    variant = subject()
    variant.backend.name = f"{variant.name}:small"
    for of, ending in ((subject(), ""), (variant, "-small")):
        for where in (str(tmp_path), f"{tmp_path}/new{ending}/"):
            path = evidence.write(
                where, of, [CaseResult("hygiene", "hygiene/0", "passed")], Run("none", "pytest", complete=True)
            )
            written = json.loads(path.read_text())
            assert written["level"] == "L0"
            assert path == Path(where) / f"l0-{written['date']}{ending}.json"
