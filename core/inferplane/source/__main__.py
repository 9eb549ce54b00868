"""`python -m inferplane.source COMMAND [flags]`."""

from __future__ import annotations

import os
import signal
import sys

from inferplane.cli.main import guard, prepare
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.source import download_model, export_model, launch, predictor, start_server, stop_server

COMMANDS = {
    "predictor": predictor,
    "export_model": export_model,
    "download_model": download_model,
    "launch": launch,
    "start_server": start_server,
    "stop_server": stop_server,
}
"""Command -> its module, whose docstring says what it does, and which has `run(words, screen)`."""


def main(words: list[str]) -> int:
    """Run one command; the exit code."""
    screen = Screen()
    return guard(lambda: _run(words, screen), screen)


def _run(words: list[str], screen: Screen) -> int:
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<16}{str(module.__doc__).splitlines()[0]}" for name, module in COMMANDS.items()]
        sys.stdout.write("\n".join(("usage: python -m inferplane.source COMMAND [flags]", "", *lines, "")))
        return 0 if words else 2
    if words[0] not in COMMANDS:
        raise UsageError(f"There is no command {words[0]!r}.", there_is=", ".join(COMMANDS))
    prepare(os.environ)
    try:
        with screen.show_warnings():
            return COMMANDS[words[0]].run(words[1:], screen)
    except SystemExit as end:  # --help has printed
        return int(end.code or 0)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(main(sys.argv[1:]))
