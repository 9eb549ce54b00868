"""Parses the command line, runs one verb and turns its error into an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage; 130 after Ctrl-C, 143 after SIGTERM and 141 when the reader of a pipe has
closed it, as a shell reports them for programs that these signals end.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from inferplane import __version__
from inferplane.cli.arguments import PROGRAM, Parser, device_words
from inferplane.cli.error_wording import ErrorWording
from inferplane.cli.screen import Screen
from inferplane.cli.signals import INTERRUPTED, TERMINATED, Terminated
from inferplane.engine.request.other_engines import OTHER_VERBS
from inferplane.errors import CapacityError, InferplaneError, UsageError
from inferplane.hub.settings import OFFLINE_VARIABLE, forbid_downloads

VERBS = {
    "generate": "continue a prompt",
    "chat": "hold a conversation with a model",
    "serve": "serve a model over HTTP",
    "pull": "download a model, or its newest revision",
    "list": "list the models in the cache, and the short names",
    "export": "write a model with its weights packed for one device, for faster starts",
    "quantize": "write a quantized copy of a model",
    "eval": "measure what a format costs: perplexity, divergence from a reference",
    "audit": "show where in a network an error arises, against a reference",
    "convert": "write a GGUF model as a folder in the Hugging Face layout",
    "show": "show what a name stands for, where it lies and which files it has",
    "rm": "remove a model from the cache",
    "config": "show the settings of `serve` and where each comes from",
    "devices": "list devices: which are here, and what the others lack",
    "doctor": "check this machine; each problem comes with its remedy",
    "explain": "show which kernel runs each part of a model on a device, and why",
    "estimate": "show how much memory a model takes and how many sequences fit",
    "ops": "list the operations of models and the kernels that implement them",
    "conform": "run the conformance suite on a device",
    "tune": "measure the fastest kernels on this machine and write a lock file",
    "bench": "measure latency, throughput and start-up",
}
"""Verb -> what it does; each is a module of `verbs` with `add_arguments(parser)` and `run(args, screen)`."""

SETTINGS = ("serve", "config")
"""Verbs whose options are server settings, which variables and a file can set too."""

SUBVERBS = {("bench", "serve")}
"""Verbs of two words whose options are their own: modules in the package of the first."""

DONE, FAILED, WRONG_USAGE, PIPE_CLOSED = 0, 1, 2, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None takes the process's.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    screen = Screen(json="--json" in words, debug="--debug" in words)
    return guard(lambda: _run(words, screen), screen)


def guard(run: Callable[[], int], screen: Screen) -> int:
    """Run a command, and turn its error into words on the screen and an exit code."""
    try:
        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Terminated:
        code = TERMINATED
    except BrokenPipeError:
        _discard_stdout()
        code = PIPE_CLOSED
    except InferplaneError as error:
        if screen.debug:
            traceback.print_exc()
        screen.error(error)
        code = WRONG_USAGE if isinstance(error, UsageError) else FAILED
    except MemoryError:
        screen.error(CapacityError("This process cannot get more memory.", remedy="raise its limit (`ulimit -v`)"))
        code = FAILED
    except OSError as error:
        if _is_stdout_error(error):
            _discard_stdout()
            remedy = "free space where it is written, or redirect it"
            screen.error(InferplaneError(f"Standard output cannot be written: {error.strerror}.", remedy=remedy))
            code = FAILED
        else:
            code = _report_crash(error, screen)
    except Exception as error:
        code = _report_crash(error, screen)
    return code


def _report_crash(error: Exception, screen: Screen) -> int:
    """Report an unexpected error: a bug here or in a plugin, so the user needs the traceback."""
    if not screen.json and screen.log is None:
        traceback.print_exception(error)
    screen.crash(error)
    return FAILED


def _is_stdout_error(error: OSError) -> bool:
    """Whether writing to standard output failed: the error names no file, and only this module and the screen write."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return error.filename is None and frames[-1].f_globals.get("__name__") in (__name__, Screen.__module__)


def verb_parser(verb: str) -> tuple[Parser, Any]:
    """The parser of one verb, and its module; `verb` is one of `VERBS`, or of `SUBVERBS` with a blank between."""
    module = importlib.import_module(f"inferplane.cli.verbs.{verb.replace(' ', '.')}")
    parser = Parser(prog=f"{PROGRAM} {verb}", description=f"{module.__doc__}".strip())
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, module


def _run(words: list[str], screen: Screen) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # go on where a terminal cannot show a character
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # reading a prompt refuses bytes that are no text
    while words and words[0] == "--debug":
        words = words[1:]
    if not words:
        sys.stderr.write(_help())
        return WRONG_USAGE
    verb, rest = words[0], words[1:]
    if verb == "help":
        verb, rest = (rest[0], ["--help"]) if rest else ("--help", [])
    if verb in ("-h", "--help"):
        sys.stdout.write(_help())
        return DONE
    if verb in ("-V", "--version"):
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return DONE
    if verb not in VERBS:
        raise _unknown(verb)
    first = next((i for i, word in enumerate(rest) if word not in ("--json", "--debug")), 0)
    if (verb, *rest[first : first + 1]) in SUBVERBS:
        verb, rest = f"{verb} {rest[first]}", [*rest[:first], *rest[first + 1 :]]
    parser, module = verb_parser(verb)
    try:
        args = parser.parse_all(rest, pass_on=getattr(module, "PASS_ON", None))
    except SystemExit as end:  # --help has printed
        return int(end.code or 0)
    prepare(os.environ)
    try:
        with screen.show_warnings(), _offline(os.environ, getattr(args, "offline", False)):
            return int(module.run(args, screen))
    except InferplaneError as error:
        ErrorWording(parser, rest, settings=verb in SETTINGS).reword(error)
        raise


@contextmanager
def _offline(environment: MutableMapping[str, str], offline: bool) -> Iterator[None]:
    """Forbid downloads if `offline`, in processes of the command too, while the context lasts."""
    before = environment.get(OFFLINE_VARIABLE)
    if offline:
        forbid_downloads(environment)
    try:
        yield
    finally:
        if offline:
            environment.pop(OFFLINE_VARIABLE, None)
            environment.update({} if before is None else {OFFLINE_VARIABLE: before})


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads at import; only a program's entry point may do so.

    Idle OpenMP threads that spin take the core from their neighbour: on a busy host a two-thread product was measured
    at 7.1 ms with spinning threads and at 0.5 ms with passive ones.
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def _help() -> str:
    width = max(map(len, VERBS)) + 2
    devices = device_words()
    lines = [
        f"usage: {PROGRAM} VERB [MODEL] [options]",
        "",
        "Runs large language models on any accelerator.",
        "",
        "verbs:",
        *(f"  {verb:<{width}}{words}" for verb, words in VERBS.items()),
        "",
        f"  {PROGRAM} VERB --help lists a verb's options; {PROGRAM} --version prints the version",
        "",
        "MODEL is a folder in the Hugging Face layout, a GGUF file, or a name that is downloaded (hf:ORG/NAME,",
        "qwen3:0.6b); left out, it is the demo model that ships with Inferplane.",
    ]
    if devices:
        lines += ["", f"devices with an installed plugin: {', '.join(devices)}"]
        examples = ("generate -p 'def main():'", f"chat --device {devices[0]}", f"explain --device {devices[-1]}")
        lines += ["", "examples:", *(f"  {PROGRAM} {example}" for example in examples)]
    return "\n".join(lines) + "\n"


def _unknown(verb: str) -> UsageError:
    if verb.startswith("-"):
        remedy = f"options stand behind the verb: {PROGRAM} VERB {verb}"
    elif verb in OTHER_VERBS:
        remedy = OTHER_VERBS[verb]
    elif close := difflib.get_close_matches(verb.lower(), VERBS, n=1):
        remedy = f"perhaps `{PROGRAM} {close[0]}` was meant"
    elif verb == "demo" or Path(verb).exists():
        remedy = f"a model stands behind the verb: {PROGRAM} generate {verb}"
    else:
        remedy = f"see `{PROGRAM} --help`"
    return UsageError(f"There is no verb {verb!r}.", there_is=", ".join(VERBS), remedy=remedy)


def _discard_stdout() -> None:
    """Send the final flush of standard output to the null device: the closed pipe would raise once more."""
    with suppress(OSError, ValueError):  # where it is no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
