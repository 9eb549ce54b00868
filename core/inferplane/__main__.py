"""`python -m inferplane` is the command `inferplane`, and so is the installed script."""

from __future__ import annotations

import signal


def command() -> int:
    """Run one command as a program; the exit code.

    Before `main` can answer a signal, and after it is done, there is nothing to put in order: Ctrl-C then ends the
    process as it ends any other, without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from inferplane.cli.main import main
    from inferplane.cli.signals import run_with_signals

    return run_with_signals(main)


if __name__ == "__main__":
    raise SystemExit(command())
