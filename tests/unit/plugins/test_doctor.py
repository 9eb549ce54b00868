"""The doctor's report: facts, each with a status and, where something can be done, what."""

from __future__ import annotations

import json

import pytest
import torch

from inferplane.errors import install_hint
from inferplane.plugins.doctor import Line, Report, doctor
from tests.unit.plugins.test_devices import ABSENT, BROKEN, plugin
from tests.unit.support.fake_wheels import serving


def lines(report, subject):
    return [line for line in report.lines if line.subject == subject]


def test_every_subject_of_a_screen(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad="raise OSError('no driver')")
    wheels.install(
        "acme-major", "0.4", {"major": "fake_major"}, fake_major=serving("major").replace("(1, 0)", "(2, 0)")
    )
    wheels.install("acme-taken", "0.5", {"taken": "fake_taken"}, fake_taken=serving("homely"))
    source = plugin(fam_one=(ABSENT, 0), fam_two=(BROKEN, 0), odd=("1 / 0", 0))
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=source)
    report = doctor(wheels.discover("-nothing"))
    (python,), (torch_line,), (transformers,) = (lines(report, name) for name in ("python", "torch", "transformers"))
    assert python.detail.startswith("3.")
    assert torch.__version__ in torch_line.detail
    assert transformers.status in ("ok", "fail")
    assert lines(report, "plugin API")[0].detail.startswith("1.1")
    assert lines(report, "plugin homely") == [Line("plugin homely", "ok", "inferplane 9.9, API 1.0: register_backends")]
    (bad,), (major,), (works, taken) = (lines(report, f"plugin {name}") for name in ("bad", "major", "taken"))
    assert works.status == "ok"
    assert (bad.status, "acme-bad 0.3" in bad.detail, "no driver" in bad.detail) == ("fail", True, True)
    assert (major.status, "2.0" in major.detail, major.remedy) == ("fail", True, "upgrade inferplane")
    assert (taken.status, "homely@acme-taken" in taken.remedy) == ("warn", True)
    (homely,), (one,), (two,), (odd,) = (
        lines(report, f"device {name}") for name in ("homely", "fam:one", "fam:two", "odd")
    )
    assert homely == Line("device homely", "ok", "available: made of thin air [inferplane 9.9]")
    assert (one.status, one.remedy) == ("warn", "install the driver")
    assert (two.status, two.remedy) == ("fail", "upgrade the driver")
    assert (odd.status, "ZeroDivisionError" in odd.detail) == ("fail", True)
    assert len(lines(report, "plugin fam")) == 1, "what a probe raised is told once, in the device's line"
    assert "-nothing excludes nothing" in lines(report, "plugins")[0].detail
    assert "GiB free of" in lines(report, "host memory")[0].detail
    assert "cores" in lines(report, "host threads")[0].detail
    assert all(line.remedy for line in report.lines if line.status != "ok"), "each fault has a remedy"
    assert report.status == "fail"


def test_a_healthy_machine_has_no_fault(wheels):
    wheels.install("transformers", "5.0", {})
    report = doctor(wheels.discover())
    assert [line for line in report.lines if line.status == "fail"] == []
    assert lines(report, "devices") == []


def test_no_device_is_a_fault(wheels):
    report = doctor(wheels.discover("only"))
    assert lines(report, "devices")[0].status == "fail"


def test_json(wheels):
    report = doctor(wheels.discover())
    told = json.loads(json.dumps(report.to_json()))
    assert told["schema"] == 1
    assert told["status"] == report.status
    assert [Line(**line) for line in told["lines"]] == list(report.lines)
    assert all(set(line) == {"subject", "status", "detail", "remedy"} for line in told["lines"])


@pytest.mark.parametrize(
    ("statuses", "worst"), [((), "ok"), (("ok", "warn"), "warn"), (("warn", "fail", "ok"), "fail")]
)
def test_worst_status(statuses, worst):
    assert Report(tuple(Line("x", status, "y") for status in statuses)).status == worst


def test_devices_are_opened_only_when_asked(wheels):
    opened = "return DeviceState(self.torch_device, 'Toy 9', 'toy9', Features(), self.memory())"
    source = serving("toy", "sour").replace('raise AssertionError("nobody asked for it to be opened")', opened, 1)
    assert opened in source
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=source)
    assert len(lines(doctor(wheels.discover()), "device toy")) == 1
    report = doctor(wheels.discover("-homely"), open_devices=True)
    assert "Toy 9, toy9" in lines(report, "device toy")[1].detail
    sour = lines(report, "device sour")[1]
    assert (sour.status, "cannot be opened" in sour.detail) == ("fail", True)


@pytest.mark.parametrize("autoload", [None, "0"])
def test_extensions_that_torch_imports_by_itself(wheels, monkeypatch, autoload):
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    if autoload is not None:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    wheels.install("torch-vendor", "1", {})
    points = wheels.folder / "torch_vendor-1.dist-info" / "entry_points.txt"
    points.write_text("[torch.backends]\nvendor = torch_vendor:_autoload\n")
    wheels.install("acme-bad", "0.3", {})
    (wheels.folder / "acme_bad-0.3.dist-info" / "entry_points.txt").write_text("[torch.backends]\nthis is no entry\n")
    found = lines(doctor(wheels.discover()), "torch extensions")
    assert [line.status for line in found] == ([] if autoload else ["warn"])
    if found:
        assert "torch_vendor" in found[0].detail
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found[0].remedy


def test_more_threads_than_cores(wheels, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    line = lines(doctor(wheels.discover()), "host threads")[0]
    assert line.status == "warn"
    assert line.remedy.startswith("set OMP_NUM_THREADS=")


def test_extras_say_what_they_are_for_and_what_they_lack(wheels):
    needs = ("fakesrv>=2 ; extra == 'serving'", "fakepb ; extra == 'serving'", "fakeguide>=1 ; extra == 'constrained'")
    more = "".join(f"Requires-Dist: {need}\n" for need in needs)
    (path,) = wheels.folder.glob("inferplane-*.dist-info/METADATA")
    path.write_text(path.read_text() + more)
    wheels.install("fakesrv", "1.0", {})  # too old
    wheels.install("fakeguide", "1.2", {})
    report = doctor(wheels.discover())
    assert lines(report, "extra serving") == [
        Line(
            "extra serving",
            "warn",
            "for inferplane serve: lacks fakesrv, fakepb",
            f"{install_hint('serving')} if you need it",
        )
    ]
    (constrained,) = lines(report, "extra constrained")
    assert (constrained.status, constrained.remedy) == ("ok", "")
    assert not lines(report, "extra otel"), "this wheel has none"


OPENS = {
    "sound": "return DeviceState(self.torch_device, 'Toy 9', 'toy9', Features(), self.memory())",
    "raises": "raise RuntimeError('no firmware')",
    "returns nothing": "return None",
    "refuses": "raise DeviceError('The card is busy.', remedy='end the other process')",
    "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "import os; os._exit(3)",
    "prints": "print('hello from the vendor'); return DeviceState('cpu', 'Toy 9', 'toy9', Features(), self.memory())",
}


@pytest.mark.parametrize(
    ("how", "place", "status", "words", "remedy"),
    [
        ("sound", "cpu", "ok", "Toy 9, toy9, ", ""),
        ("sound", "meta", "ok", "Toy 9, toy9, ", ""),
        ("prints", "meta", "ok", "Toy 9, toy9, ", ""),
        (
            "raises",
            "cpu",
            "fail",
            "cannot be opened: RuntimeError: no firmware at {}/fake_toy.py:",
            "correct the plugin",
        ),
        (
            "raises",
            "meta",
            "fail",
            "cannot be opened: RuntimeError: no firmware at {}/fake_toy.py:",
            "correct the plugin",
        ),
        ("returns nothing", "meta", "fail", "Fake_toy.open() returned None, not a DeviceState", "correct the plugin"),
        ("refuses", "meta", "fail", "cannot be opened: The card is busy.", "end the other process"),
        ("crashes", "meta", "fail", "cannot be opened: SIGSEGV ended its process", "correct the plugin"),
        ("exits", "meta", "fail", "cannot be opened: its process ended with exit code 3", "correct the plugin"),
    ],
)
def test_a_device_that_cannot_be_opened_is_no_available_one(wheels, how, place, status, words, remedy):
    """What is not the host is opened in a process of its own, which may crash."""
    source = serving("toy").replace('raise AssertionError("nobody asked for it to be opened")', OPENS[how])
    source = source.replace('torch_device = "meta"', f"torch_device = {place!r}")
    source = source.replace("import Backend,", "import Backend, DeviceError,")
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=source)
    probed, opened = lines(doctor(wheels.discover("-homely"), open_devices=True), "device toy")
    assert probed.status == opened.status == status
    assert words.format(wheels.folder) in opened.detail and opened.remedy.startswith(remedy)


def test_a_device_that_hangs_when_it_is_opened(wheels, monkeypatch):
    monkeypatch.setattr("inferplane.plugins.doctor.OPEN_TIMEOUT_S", 0.1)
    opened = lines(doctor(wheels.discover(), open_devices=True), "device homely")[1]
    assert (opened.status, "it takes more than 0.1 s" in opened.detail) == ("fail", True)


def test_the_command_opens_devices_unless_told_otherwise(cli, wheels, monkeypatch):
    monkeypatch.setattr("inferplane.plugins.host", wheels.discover)
    told = [json.loads(cli("doctor", "--json", *words)[1])["lines"] for words in ((), ("--no-open",), ("--open",))]
    counts = [sum(line["subject"] == "device homely" for line in found) for found in told]
    assert counts == [2, 1, 2]


@pytest.mark.parametrize("extra", ["serving", "test", "otel"])
def test_extras_are_installed_as_inferplane_was(extra, monkeypatch, wheels):
    (path,) = wheels.folder.glob("inferplane-*.dist-info/METADATA")
    path.write_text(path.read_text() + f"Requires-Dist: fakesrv ; extra == '{extra}'\n")
    monkeypatch.setattr("inferplane.plugins.doctor.install_hint", lambda extra: f"install {extra} here")
    (line,) = lines(doctor(wheels.discover()), f"extra {extra}")
    assert line.remedy == f"install {extra} here if you need it"
