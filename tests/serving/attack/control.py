"""What an attack is compared with: the same share of a processor, used by a process that sends the server nothing."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

CLIENTS_NICE = 19
"""Priority of misbehaving clients. They run on other machines in truth and take no processor from the server; here they
share its processors, and get what it leaves. The well-behaved client has the usual priority."""
PERIOD_S = 0.02
"""The busy process uses its share of each such time: short beside a request, long beside what a sleep adds."""


def processor_s(pid: int) -> float:
    """Seconds of processors that a process has used with all its threads; 0 where there is no /proc, or no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _burn(share: Synchronized[float]) -> None:
    os.nice(CLIENTS_NICE)
    while True:
        started, used = time.monotonic(), time.process_time()
        while time.process_time() - used < PERIOD_S * share.value:
            pass
        time.sleep(max(started + PERIOD_S - time.monotonic(), 0.0))


class BusyProcess:
    """A process of the misbehaving clients' priority that sends nothing: what it adds to others' times is what sharing
    a processor costs, not what the server does with an attack.
    """

    def __enter__(self) -> BusyProcess:
        context = multiprocessing.get_context("spawn")
        self._share = context.Value("d", 0.0)
        self._process = context.Process(target=_burn, args=(self._share,), daemon=True)
        self._process.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.join()

    def use_processor(self, share: float, seconds: float) -> float:
        """Use that share of one processor for so long; the share that it got. The system may leave it less."""
        started, used = time.monotonic(), processor_s(self._process.pid or 0)
        self._share.value = min(share, 1.0)
        time.sleep(seconds)
        self._share.value = 0.0
        return (processor_s(self._process.pid or 0) - used) / (time.monotonic() - started)
