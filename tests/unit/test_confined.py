"""What a confined helper can still do, which is little, and what becomes of it when it misbehaves.

Kind of advisory: a program that comes with a model or a request (a template, a grammar) runs code outside its sandbox.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferplane import confined
from inferplane.confined import MEASURES, ConfinedProcess

SCRIPT = """
import json, os, sys
for line in sys.stdin:
    try:
        answer = repr(eval(json.loads(line)))
    except BaseException as error:
        answer = type(error).__name__
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def helper(script: Path) -> Iterator[ConfinedProcess]:
    process = ConfinedProcess(script, "1 + 1", 60)
    yield process
    process.close()


REFUSED = {
    "a socket": ("__import__('socket').socket()", "seccomp"),
    "a pair of sockets": ("__import__('socket').socketpair()", "seccomp"),
    "a program": ("__import__('subprocess').run(['id'])", "seccomp"),
    "a program in place of this one": ("os.execv('/bin/true', ['true'])", "seccomp"),
    "a signal": ("os.kill(os.getppid(), 0)", "seccomp"),
    "a new file": ("open({new!r}, 'w')", "landlock"),
    "an old file": ("open({old!r}, 'a')", "landlock"),
    "a deleted file": ("os.unlink({old!r})", "landlock"),
    "a folder": ("os.mkdir({new!r})", "landlock"),
    "another name": ("os.rename({old!r}, {new!r})", "landlock"),
    "a link": ("os.symlink({old!r}, {new!r})", "landlock"),
    "memory": ("len(bytearray(2 ** 31))", "rlimits"),
    "many files": ("[open({old!r}) for _ in range(99)]", "rlimits"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_cannot_have(what: str, helper: ConfinedProcess, tmp_path: Path) -> None:
    code, measure = REFUSED[what]
    if measure not in helper.measures:
        pytest.skip(f"not run: this kernel has no {measure}")
    old = tmp_path / "old"
    old.write_text("kept")
    said = helper.ask(code.format(old=str(old), new=str(tmp_path / "new")), 30)
    assert said in {"PermissionError", "MemoryError", "OSError"}, said
    assert old.read_text() == "kept" and not (tmp_path / "new").exists()
    assert helper.ask("2 + 2", 30) == "4", "it goes on"


def test_it_cannot_go_around_the_filter(helper: ConfinedProcess) -> None:
    """A ring of io_uring would open sockets that seccomp does not see."""
    if "seccomp" not in helper.measures:
        pytest.skip("not run: this kernel has no seccomp")
    code = "((c := __import__('ctypes')).CDLL(None, use_errno=True).syscall(425, 1, 0), c.get_errno())"
    assert helper.ask(code, 30) == "(-1, 1)"


def test_it_says_how_it_is_confined(helper: ConfinedProcess) -> None:
    assert helper.setup_answer == "2"
    assert set(helper.measures) <= set(MEASURES) and {"rlimits", "parent"} <= set(helper.measures)


def test_it_gets_no_key_and_no_token(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERPLANE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, "s3cret")
    process = ConfinedProcess(script, "os.environ", 60)
    assert "s3cret" not in process.setup_answer
    assert not set(eval(process.ask("list(os.environ)", 30))) - {*confined.ENVIRONMENT, "LC_CTYPE"}
    process.close()


@pytest.mark.parametrize("code", ["__import__('time').sleep(600)", "[0 for _ in iter(int, 1)]", "2 ** 9 ** 9"])
def test_one_that_hangs_is_killed(code: str, helper: ConfinedProcess) -> None:
    with pytest.raises(TimeoutError):
        helper.ask(code, 0.3)
    assert not helper.alive
    with pytest.raises(EOFError):
        helper.ask("1", 30)


def test_one_that_is_stopped_takes_no_message_and_is_killed(helper: ConfinedProcess) -> None:
    """Its pipe is full before the message has gone."""
    os.kill(helper.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        helper.ask("x" * 2**22, 0.5)
    assert not helper.alive


@pytest.mark.parametrize("code", ["os._exit(3)", "__import__('ctypes').string_at(0)"])
def test_one_that_ends_says_so(code: str, helper: ConfinedProcess) -> None:
    with pytest.raises(EOFError):
        helper.ask(code, 30)
    assert not helper.alive


def test_long_messages_and_answers(helper: ConfinedProcess) -> None:
    assert helper.ask(f"len('{'x' * 3_000_000}')", 60) == "3000000"
    assert len(helper.ask("'y' * 5_000_000", 60)) == 5_000_002


def test_it_outlives_the_thread_that_started_it(script: Path) -> None:
    made: list[ConfinedProcess] = []
    thread = threading.Thread(target=lambda: made.append(ConfinedProcess(script, "0", 60)))
    thread.start()
    thread.join()
    time.sleep(2 * confined.PARENT_EVERY_S)
    assert made[0].ask("5", 30) == "5"
    made[0].close()


def test_it_ends_with_its_parent_even_while_it_is_busy(script: Path) -> None:
    code = f"""
import os, threading
from inferplane.confined import ConfinedProcess
p = ConfinedProcess({str(script)!r}, "0", 60)
threading.Thread(target=p.ask, args=("[0 for _ in iter(int, 1)]", 600), daemon=True).start()
print(p.pid, flush=True)
os.read(0, 1)
os._exit(0)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    limit = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit
        time.sleep(0.1)
