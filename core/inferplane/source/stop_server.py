"""End the server that `start_server` has started, after its running requests, and wait for its end.

`stop_server [SECONDS]`: after so many (300) it is ended by force.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.source.running import RunningServer, server_folder

WAIT_S = 300.0


def run(words: Sequence[str], screen: Screen) -> int:
    """Stop, wait, report."""
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}")
        return 0
    if len(words) > 1 or (words and not words[0].isdecimal()):
        raise UsageError(f"stop_server {' '.join(words)}.", there_is="seconds to wait, as `stop_server 60`")
    server = RunningServer.find(server_folder())
    if server is None:
        screen.note("no server runs that start_server has started")
        return 0
    try:
        server.stop(float(words[0]) if words else WAIT_S)
    except TimeoutError:
        server.kill()
        screen.warning("the server did not end in time, and was ended by force")
    else:
        screen.note("the server has ended")
    return 0
