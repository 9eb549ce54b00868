"""The process of an engine as its owner sees it: its start, its end, and its end by force."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from inferplane.engine.clients.process import messages
from inferplane.engine.clients.process.messages import FromCaller
from inferplane.errors import UsageError

MAX_ADDRESS_BYTES = 103  # of a Unix socket's path on the strictest system, without the zero at the end
KILL_S = 2.0
"""Seconds that are waited for the end of a process that was killed."""
_START = """import sys
sys.path[:] = sys.argv[1].split("\\n")
from inferplane.engine.clients.process.memory import gc_paused
with gc_paused():
    from inferplane.engine.clients.process.server import main
main()
"""


class EngineProcess:
    """A new process for an engine, connected by a socket pair; it waits for `load_model`. `model` and `options` are
    those of `LLM`. Attributes: `address`, path of the socket for other callers, in a folder of its own; `socket`, this
    caller's end of the pair. UsageError: an argument cannot be sent, or the platform has no Unix sockets.
    """

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise UsageError("process=True on this platform.", remedy="leave it out: the engine runs in a thread")
        self._folder = tempfile.mkdtemp(prefix="inferplane-")  # readable by this user only
        self.address = os.path.join(self._folder, "engine")
        if len(os.fsencode(self.address)) > MAX_ADDRESS_BYTES:
            os.rmdir(self._folder)
            raise UsageError(
                f"The path of the folder for temporary files is too long for the engine's socket: {self._folder}.",
                there_is=f"{MAX_ADDRESS_BYTES} bytes for a socket's path, here {len(os.fsencode(self.address))}",
                remedy="set TMPDIR to a shorter path",
            )
        load = messages.LoadModel(*plain_arguments(model, options), address=self.address)
        self.socket, theirs = socket.socketpair()
        try:
            self._first_message = frame(load)
            command = [sys.executable, "-c", _START, "\n".join(sys.path), str(theirs.fileno())]
            # Ctrl-C and SIGTERM are for this process; the other one inherits the mask before it can do anything itself.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                # A group of its own: what it starts (compilers of constraints) can be killed with it.
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        _started.add(self)

    def load_model(self) -> None:
        """Send the message that makes the process load the model; does not wait for the model."""
        self.socket.sendall(self._first_message)

    def exit_reason(self) -> str:
        """How the process ended, for a message (" with code 1"); waits up to 5 s, "" if the process still runs."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with code {code}"

    def dispose(self, wait_s: float) -> None:
        """Wait for the end of the process, kill it after `wait_s` seconds with all that it has started, and remove its
        folder.
        """
        _started.discard(self)
        try:
            self._process.wait(max(wait_s, 0.0))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it for longer
                self._process.wait(KILL_S)
        shutil.rmtree(self._folder, ignore_errors=True)


_started: set[EngineProcess] = set()


def kill_engines() -> None:
    """Kill the processes of all engines that this process has started and not closed, for an end without closing: a
    process that is stopped would not see that its caller has gone.
    """
    for process in list(_started):
        process.dispose(0.0)


def plain_arguments(model: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Model and options as plain data: names for dtypes, mappings for configs, strings for paths; no `progress`."""
    if isinstance(model, (str, Path)):
        model = str(model)
    else:
        from inferplane.models import as_config

        model = dict(as_config(model))
    torch = sys.modules.get("torch")  # a caller with one of its dtypes has imported it
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if torch is not None and isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, Path):
            value = str(value)
        elif is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        if name != "progress":
            plain[name] = value
    return model, plain


def frame(message: FromCaller) -> bytes:
    """A message as bytes; UsageError if it holds a value that cannot be sent."""
    try:
        return messages.frame(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"An argument cannot be sent to the engine's process: {error}.",
            there_is="strings, numbers, lists and mappings of them",
        ) from error
