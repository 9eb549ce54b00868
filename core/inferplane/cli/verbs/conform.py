"""Run the conformance suite on a device: does every kernel compute what its op promises?

Unknown options are passed to pytest (-k rms_norm, -x, -v), and the exit code is pytest's.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

from inferplane.cli.arguments import Parser, add_device, add_examples
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError, install_hint

SUITE = "inferplane.conformance"
PLUGIN = "inferplane.conformance.plugin"
PASS_ON = "pytest_args"
END_S = 20.0


def add_arguments(parser: Parser) -> None:
    """Options of `conform`."""
    parser.usage = f"{parser.prog} --device X [pytest's options ...]"
    add_device(parser, required=True)
    add_examples(parser, "--device {X}", "--device {X} -k rms_norm -x")


def command(device: str, more: list[str]) -> list[str]:
    """The command of the suite; a source tree that is not installed names the plugin that declares `--device`."""
    known = any(point.value == PLUGIN for point in metadata.entry_points(group="pytest11"))
    plugin = [] if known else ["-p", PLUGIN]
    return [sys.executable, "-m", "pytest", *plugin, "--pyargs", SUITE, "--device", device, *more]


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Run the suite in a process of its own.

    Raises:
        UsageError: pytest or the suite is not installed.
    """
    if find_spec("pytest") is None:
        raise UsageError("The conformance suite needs pytest.", remedy=install_hint("test"))
    if find_spec(SUITE) is None:
        raise UsageError("This installation lacks the conformance suite.", remedy="install inferplane anew")
    more = args.pytest_args[1:] if args.pytest_args[:1] == ["--"] else args.pytest_args
    # Ctrl-C reaches both processes; pytest reports its results so far, and its exit code is ours. The signal stays
    # blocked until the suite's plugin unblocks it. The handler is a function, since the child would inherit SIG_IGN.
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.Popen(command(args.device, more))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = _wait(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, previous)
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code; if this process ends first, give the child time to end its own processes."""
    try:
        return child.wait()
    except BaseException:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
