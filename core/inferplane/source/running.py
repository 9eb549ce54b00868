"""The server that `start_server` has started: its process, its log, and whether it still runs."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SERVER_DIR = "INFERPLANE_SERVER_DIR"
STATE, LOG, HEALTH = "server.json", "server.log", "health_port"
"""Names in the folder of a server: its process, its log, and the port that answers health over HTTP."""
POLL_S = 0.1


def server_folder() -> Path:
    """The folder of the server of this user; it need not exist."""
    if given := os.environ.get(SERVER_DIR):
        return Path(given).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "inferplane"


@dataclass(frozen=True)
class RunningServer:
    """A server's process.

    Args:
        pid: its number, which is that of its process group too.
        started: when it was started, as the system counts it; another process may get the number later.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> RunningServer:
        """The process with a number, which runs now."""
        return cls(pid, _read_start(pid) or 0)

    @classmethod
    def find(cls, folder: Path) -> RunningServer | None:
        """The server of a folder if it still runs."""
        try:
            data: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
            found = cls(int(data["pid"]), int(data["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found.runs() else None

    def record(self, folder: Path) -> None:
        """Write it to the folder, for `find`."""
        (folder / STATE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def runs(self) -> bool:
        """Whether the process has not ended; one that waits for its parent to read its exit code has."""
        start = _read_start(self.pid)
        return start is not None and start == self.started

    def stop(self, wait_s: float) -> None:
        """End the server with SIGTERM, after its running requests.

        Raises:
            TimeoutError: it has not ended after `wait_s` seconds.
        """
        _signal(self.pid, signal.SIGTERM, group=False)
        limit = time.monotonic() + wait_s
        while self.runs():
            if time.monotonic() >= limit:
                raise TimeoutError(f"process {self.pid} still runs")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End the server and its whole group by force."""
        _signal(self.pid, signal.SIGKILL, group=True)
        while self.runs():
            time.sleep(POLL_S)


def _signal(pid: int, number: int, *, group: bool) -> None:
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:
        return


def _read_start(pid: int) -> int | None:
    """When a process was started, in the system's clock ticks; None if it has ended. 0 where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
