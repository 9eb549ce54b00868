"""A helper process for untrusted input: it may hang, crash or grow. Of this machine it can read files, and no more.

As a script, this file confines itself and then runs another script, whose path is its argument. It runs isolated and
imports nothing of Inferplane. What the kernel offers is used, and what was used is the first line that it prints:

- `no_new_privs`: no program that it starts could gain rights (Linux, prctl).
- `seccomp`: it starts no program, opens no socket, signals and reads no other process (Linux on x86-64 and AArch64).
- `landlock`: it writes and makes no file, and has no TCP (Linux 5.13, and 6.7 for TCP).
- `rlimits`: memory, open files, written files, core dumps.
- `parent`: it ends with the process that started it, also while it is busy.

Sources: prctl(2), seccomp(2), landlock(7), linux/filter.h, linux/audit.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import runpy
import selectors
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MEMORY_BYTES, OPEN_FILES = 2**30, 64
PARENT_EVERY_S = 1.0
MEASURES = ("rlimits", "parent", "no_new_privs", "landlock", "seccomp")
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Variables that a helper gets: no key and no token is among them."""


class ConfinedProcess:
    """A running helper, to which a line of JSON is sent, and which answers with one.

    Args:
        script: what it runs: it reads a line of setup first, which it answers, too.
        setup: that line, as data.
        start_s: most seconds until it has answered that.
        memory_bytes: most bytes of its address space.
        descriptors: open files that it gets, under the same numbers.

    Raises:
        TimeoutError: it takes longer.
        EOFError: it ends instead.
    """

    def __init__(
        self,
        script: str | Path,
        setup: Any,
        start_s: float,
        memory_bytes: int = MEMORY_BYTES,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(script), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            bufsize=0,
            pass_fds=descriptors,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._unread = b""
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        limit = time.monotonic() + start_s
        self.measures: tuple[str, ...] = tuple(self._exchange(b"", limit))
        """How it is confined."""
        self.setup_answer: Any = self._exchange(_line(setup), limit)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def ask(self, message: Any, seconds: float) -> Any:
        """Send a message and return the answer. A process that does not answer in time is killed.

        Raises:
            TimeoutError: it takes longer than `seconds`.
            EOFError: the process has ended.
        """
        return self._exchange(_line(message), time.monotonic() + seconds)

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self._finalizer()

    def _exchange(self, data: bytes, limit: float) -> Any:
        """Send a line, and return the next line that it prints, both by the time `limit`."""
        if not self._finalizer.alive:
            raise EOFError
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(self._stdout, selectors.EVENT_READ)
                if data:
                    ready.register(self._stdin, selectors.EVENT_WRITE)
                left = memoryview(data)
                while b"\n" not in self._unread or left:
                    found = ready.select(max(0.0, limit - time.monotonic()))
                    if not found:
                        raise TimeoutError
                    for key, _ in found:
                        if key.fileobj is self._stdout:
                            self._read()
                        else:
                            left = left[os.write(self._stdin.fileno(), left[: 1 << 16]) :]
                            if not left:
                                ready.unregister(self._stdin)
        except BaseException as error:  # an answer that comes later would be taken for the next one's
            self.close()
            if isinstance(error, BrokenPipeError):
                raise EOFError from None
            raise
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _read(self) -> None:
        more = os.read(self._stdout.fileno(), 1 << 20)
        if not more:
            raise EOFError
        self._unread += more


def _line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


# -- in the helper

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SYSCALLS = {
    # AUDIT_ARCH, then socket, connect, socketpair, execve, execveat, ptrace, process_vm_readv and _writev, kill, tkill,
    # tgkill, pidfd_open, pidfd_send_signal, io_uring_setup (which would do all of it unseen)
    "x86_64": (0xC000003E, (41, 42, 53, 59, 322, 101, 310, 311, 62, 200, 234, 434, 424, 425)),
    "aarch64": (0xC00000B7, (198, 203, 199, 221, 281, 117, 270, 271, 129, 130, 131, 434, 424, 425)),
}
"""By machine: what a helper may not call."""
X32_BIT = 0x40000000
"""Of calls in x86-64's other numbering."""
LANDLOCK_CREATE, LANDLOCK_RESTRICT = 444, 446
WRITES = 0b1_1111_1111_0010  # all of landlock(7) but execute (0), read_file (2) and read_dir (3)
TRUNCATE, TCP = 1 << 14, 0b11


def confine(memory_bytes: int) -> list[str]:
    """Give up for good what a helper does not need; return what this kernel could do."""
    steps: tuple[Callable[[], bool], ...] = (
        lambda: _limit(memory_bytes),
        _follow_parent,
        lambda: _prctl(PR_SET_NO_NEW_PRIVS, 1),
        _landlock,
        _seccomp,
    )
    done = []
    for name, measure in zip(MEASURES, steps):
        with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
            if measure():
                done.append(name)
    return done


def _limit(memory_bytes: int) -> bool:
    import resource

    limits = ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_FSIZE, 0))
    for what, most in (*limits, (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    return True


def _follow_parent() -> bool:
    """PR_SET_PDEATHSIG would do it, but it also kills when only the thread ends that started this process."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    return True


def _prctl(*arguments: int) -> bool:
    if sys.platform != "linux":
        return False
    given = (ctypes.c_ulong(x) for x in [*arguments, 0, 0, 0, 0][:5])
    return bool(ctypes.CDLL(None).prctl(*given) == 0)


def _landlock() -> bool:
    """Allow no write of files and no TCP: a ruleset without exceptions, of what this kernel's version knows."""
    if sys.platform != "linux":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    version = syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    files = WRITES | (TRUNCATE if version >= 3 else 0)
    rules = struct.pack("QQ", files, TCP) if version >= 4 else struct.pack("Q", files)
    ruleset = syscall(LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    try:
        return bool(syscall(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0)) == 0)
    finally:
        os.close(ruleset)


def _seccomp() -> bool:
    """Answer EPERM to the calls of `SYSCALLS`, and to those in another numbering."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in SYSCALLS:
        return False
    architecture, numbers = SYSCALLS[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF: load a word, jump if equal, jump if >=, return
    refuse, allow = 0x00050001, 0x7FFF0000  # EPERM; go on
    checks = [(equal, number) for number in numbers] + ([(at_least, X32_BIT)] if machine == "x86_64" else [])
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, 0)]
    code += [(jump, len(checks) - i, 0, value) for i, (jump, value) in enumerate(checks)]
    code += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    return _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


if __name__ == "__main__":
    print(json.dumps(confine(int(sys.argv[2]))), flush=True)
    sys.argv[:] = sys.argv[1:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
