"""Which build of torch `make` takes: the small one where it suffices and can be had."""

import subprocess
import urllib.error

import pip_index
import pytest

from tests.house.rules import REPOSITORY

CPU = f"--extra-index-url {pip_index.CPU_INDEX}\n"


@pytest.fixture
def plain(monkeypatch):
    """Linux without a GPU, without an own index, and with a reachable one."""
    monkeypatch.setattr(pip_index.sys, "platform", "linux")
    monkeypatch.setattr(pip_index, "NVIDIA", ("/no/such/device",))
    monkeypatch.setattr(pip_index, "has_own_index", lambda: False)
    monkeypatch.setattr(pip_index, "is_reachable", lambda url: True)


@pytest.mark.parametrize(
    ("name", "value", "out", "said"),
    [
        ("NVIDIA", ("/no/such/device",), CPU, "no NVIDIA GPU is here"),
        ("NVIDIA", ("/no/such/device", "/dev/null"), "", ""),
        ("has_own_index", lambda: True, "", "indexes of its own"),
        ("is_reachable", lambda url: False, "", "cannot be reached: taking PyPI's torch"),
    ],
)
def test_what_pip_is_told(plain, monkeypatch, capsys, name, value, out, said):
    monkeypatch.setattr(pip_index, name, value)
    pip_index.main()
    printed = capsys.readouterr()
    assert printed.out == out and said in printed.err and bool(printed.err) == bool(said)


def test_other_systems_have_no_choice(plain, monkeypatch, capsys):
    monkeypatch.setattr(pip_index.sys, "platform", "darwin")
    pip_index.main()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ("", False),
        ("global.timeout='180'\n:env:.cert='/a/index-url'\n", False),
        ("global.extra-index-url='file:///a https://b'\n", True),
        ("install.index-url='https://b'\n", True),
        ("global.no-index='1'\n", True),
    ],
)
def test_own_indexes_are_found(config, own, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.CompletedProcess([], 0, stdout=config)
    monkeypatch.setattr(pip_index.subprocess, "run", lambda *words, **how: done)
    assert pip_index.has_own_index() is own
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://b")
    assert pip_index.has_own_index()


@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), TimeoutError(), ValueError("no address"), None])
def test_an_index_that_cannot_be_reached(error, monkeypatch):
    def urlopen(request, timeout):
        if error is not None:
            raise error
        return open("/dev/null")

    monkeypatch.setattr(pip_index.urllib.request, "urlopen", urlopen)
    assert pip_index.is_reachable("https://a/torch/") is (error is None)


@pytest.mark.parametrize("goal", [".venv/.installed", ".venv-serving/.installed", ".venv-gates/.installed"])
def test_make_asks_unless_it_is_told(goal):
    def shown(*words):
        command = ["make", "--dry-run", "--always-make", goal, *words]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    environment = goal.partition("/")[0]
    assert f"$({environment}/bin/python tools/pip_index.py)" in shown()
    told = shown("PIP_ARGS=--index-url https://pypi.org/simple")
    assert "pip_index.py" not in told and "--index-url https://pypi.org/simple -c constraints.txt" in told
