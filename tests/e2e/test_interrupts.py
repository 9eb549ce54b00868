"""Ctrl-C and SIGTERM at chosen moments of every verb: nobody is left, no file is half there, no traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from inferplane.serving.lifecycle.start import PACKAGES
from tests.e2e.processes import heeding_ctrl_c, kill
from tests.house.rules import SOURCE_PATHS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
ON = ("--device", "cpu")
LONG = ("--max-tokens", "1500", "--temperature", "1.5")
GENERATE = ("generate", *ON, "-p", "def f(", *LONG)
BENCH = ("bench", "latency", *ON, "--output-len", "8", "--repeats", "2", "--save", "out.json", "--html", "out.html")
CONFORM = ("conform", *ON, "-k", "rms_norm", "-p", "no:cacheprovider", "--evidence", "out.json")
SERVE = ("serve", *ON, "--port", "0")
SESSIONS: dict[int, set[int]] = {}
"""Process that a test started -> the sessions of all processes that it has been seen to start."""

MOMENTS = [
    ("devices", ("devices",), "import:torch"),
    ("doctor", ("doctor",), "import:numpy"),
    ("ops", ("ops",), "import:inferplane.plugins"),
    ("config", ("config", "show"), "import:inferplane.serving.settings"),
    ("explain", ("explain", *ON), "open:config.json"),
    ("estimate", ("estimate", *ON), "open:config.json"),
    ("generate importing", GENERATE, "import:numpy"),
    ("generate loading", GENERATE, "open:model.safetensors"),
    ("generate, a prompt", GENERATE, "step:1"),
    ("generate decoding", GENERATE, "step:9"),
    ("chat decoding", ("chat", *ON, *LONG), "step:9"),
    ("bench measuring", BENCH, "step:9"),
    ("bench writing", BENCH, "os.rename:out.json"),
    ("serve importing", SERVE, "import:inferplane.serving.configure"),
]
"""What is run, and when the signal comes: see `interrupted.py`."""


def start(words, folder):
    """A process in a session of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *SOURCE_PATHS]), "PYTHONUNBUFFERED": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with heeding_ctrl_c():
        return subprocess.Popen([sys.executable, *words], cwd=folder, env=env, start_new_session=True, **pipes)


def session(leader):
    """Command lines of the processes of a session that still run, and of sessions that these or their children began:
    an engine's process has one of its own, and is known by it when its parent has ended.
    """
    stats, found = {}, []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            if fields and fields[0] != "Z":
                stats[int(entry.name)] = int(fields[1]), int(fields[3])
        except OSError:  # it has ended meanwhile
            continue
    sessions = SESSIONS.setdefault(leader, {leader})
    while (
        more := {own for parent, own in stats.values() if parent in stats and stats[parent][1] in sessions} - sessions
    ):
        sessions |= more
    for number, (_, own) in stats.items():
        with contextlib.suppress(OSError):
            if own in sessions:
                found.append(Path(f"/proc/{number}/cmdline").read_text().replace("\0", " "))
    return found


def until(process, there):
    """Wait for processes of its session, known by their command lines, as long as it runs itself."""
    limit = time.monotonic() + TIMEOUT_S
    while not there(session(process.pid)):
        assert process.poll() is None and time.monotonic() < limit, kill(process)
        time.sleep(0.05)


def ended(process, said=b""):
    """Its exit code, as a shell reports it; it has left nobody behind and printed one line at most."""
    try:
        _, err = process.communicate(said, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it hangs\n{kill(process)}") from None
    patience = time.monotonic() + 10
    while (left := session(process.pid)) and time.monotonic() < patience:  # what it told to end may take a moment
        time.sleep(0.05)
    assert not left, left
    assert err.count(b"\n") <= 1 and b"Traceback" not in err, err.decode()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def whole(folder):
    """Files are there whole, and there are no others."""
    for path in folder.iterdir():
        assert path.name in ("out.json", "out.html"), path
        text = path.read_text()
        assert json.loads(text) if path.suffix == ".json" else text.rstrip().endswith("</html>")


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: looks into /proc")


@linux
@pytest.mark.parametrize("name", [name for name, _, _ in MOMENTS])
def test_a_signal_ends_it_quietly(name, tmp_path):
    """One signal of the two for each moment, in turns."""
    index, words, moment = next((i, w, m) for i, (n, w, m) in enumerate(MOMENTS) if n == name)
    number = (signal.SIGINT, signal.SIGTERM)[index % 2]
    child = start([str(ROOT / "tests/e2e/interrupted.py"), number.name, moment, *words], tmp_path)
    assert ended(child, b"def f(x):\n") == 128 + number
    whole(tmp_path)


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_ends_what_it_starts(number, tmp_path):
    """Start-up is timed in processes of their own."""
    child = start(["-m", "inferplane", "bench", "startup", *ON], tmp_path)
    until(child, lambda lines: any("startup_process" in line for line in lines))
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    assert ended(child) == 128 + number


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_conform_ends_pytest(number, tmp_path):
    """After a Ctrl-C that it answers, pytest reports what it has, with its own code; evidence is whole or not there."""
    child = start(["-m", "inferplane", *CONFORM], tmp_path)
    until(child, lambda lines: any("pytest" in line for line in lines))
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    assert ended(child) in {signal.SIGINT: (2, 130), signal.SIGTERM: (143,)}[number]
    whole(tmp_path)


@linux
@pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="not run: what serving needs is not installed")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_while_it_loads(number, tmp_path):
    """It drains, which is no failure."""
    child = start(["-m", "inferplane", *SERVE, "--log-level", "error"], tmp_path)
    until(child, lambda lines: len(lines) > 1)  # the engine's process
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    assert ended(child) == 0
