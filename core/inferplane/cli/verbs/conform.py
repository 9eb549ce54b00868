"""Run the conformance suite on a device: does every kernel compute what its op promises?

Unknown options are passed to pytest (-k rms_norm, -x, -v), and the exit code is pytest's. With `--proposer` a method of
speculation is tested instead, without pytest; the exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

from inferplane.cli.arguments import AUTO, Parser, add_device, add_examples
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError, install_hint

SUITE = "inferplane.conformance"
PLUGIN = "inferplane.conformance.plugin"
PROPOSERS = "inferplane.conformance.proposers"
PASS_ON = "pytest_args"
END_S = 20.0


def add_arguments(parser: Parser) -> None:
    """Options of `conform`."""
    parser.usage = f"{parser.prog} --device X [pytest's options ...]\n       {parser.prog} --proposer NAME [--device X]"
    add_device(parser, default=None)
    words = "test a method of speculation without a network, of a plugin or of core"
    parser.add_argument("--proposer", metavar="NAME", help=words)
    words = "an option of the method, or another field of speculative_config; repeatable"
    parser.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], dest="method_options", help=words
    )
    add_examples(parser, "--device {X}", "--device {X} -k rms_norm -x", "--proposer suffix")


def command(device: str, more: list[str]) -> list[str]:
    """The command of the suite; a source tree that is not installed names the plugin that declares `--device`."""
    known = any(point.value == PLUGIN for point in metadata.entry_points(group="pytest11"))
    plugin = [] if known else ["-p", PLUGIN]
    return [sys.executable, "-m", "pytest", *plugin, "--pyargs", SUITE, "--device", device, *more]


def proposer_command(args: argparse.Namespace) -> list[str]:
    """The command that tests a method of speculation.

    Raises:
        UsageError: pytest's options are given too.
    """
    if args.pytest_args:
        raise UsageError(f"--proposer with {args.pytest_args[0]!r}.", remedy="leave pytest's options out")
    own = [word for option in args.method_options for word in ("--option", option)]
    device = ["--device", args.device or AUTO]
    return [sys.executable, "-m", PROPOSERS, "--proposer", args.proposer, *device, *own]


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Run the suite, or the cases of a proposer, in a process of its own.

    Raises:
        UsageError: pytest or the suite is not installed; neither a device nor a proposer is named.
    """
    if args.proposer is not None:
        return _run(proposer_command(args))
    if args.device is None:
        raise UsageError("conform needs --device X, or --proposer NAME.", remedy="see `inferplane conform --help`")
    if args.method_options:
        raise UsageError("--option goes with --proposer.", remedy="name a method with --proposer, or leave it out")
    if find_spec("pytest") is None:
        raise UsageError("The conformance suite needs pytest.", remedy=install_hint("test"))
    if find_spec(SUITE) is None:
        raise UsageError("This installation lacks the conformance suite.", remedy="install inferplane anew")
    more = args.pytest_args[1:] if args.pytest_args[:1] == ["--"] else args.pytest_args
    return _run(command(args.device, more))


def _run(words: list[str]) -> int:
    """Run a command in a process of its own; returns its exit code."""
    # Ctrl-C reaches both processes; pytest reports its results so far, and its exit code is ours. The signal stays
    # blocked until the suite's plugin unblocks it. The handler is a function, since the child would inherit SIG_IGN.
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.Popen(words)
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
