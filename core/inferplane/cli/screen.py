"""Writes the output of the command line: results to standard output, remarks about them to standard error.

Only capable terminals get colour, progress bars and cursor control: a pipe, `NO_COLOR` and `TERM=dumb` get plain text.
With `--json` both streams carry JSON, one object per line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any

from inferplane.errors import InferplaneError, InferplaneWarning

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_COLUMNS = 100
"""Width of tables outside terminals, unless COLUMNS is set."""
MIB = 2**20

_CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(128, 160), 0x2426)


class Screen:
    """The output streams of one command.

    Args:
        json: write JSON.
        debug: show tracebacks.
    """

    def __init__(self, *, json: bool = False, debug: bool = False) -> None:
        self.json, self.debug = json, debug
        self.log: Callable[[Exception], None] | None = None  # receives errors if set; warnings then go to the log

    @cached_property
    def out(self) -> Console:
        """Standard output."""
        return _console(sys.stdout)

    @cached_property
    def err(self) -> Console:
        """Standard error."""
        return _console(sys.stderr)

    # -- facts

    def show(self, *renderables: RenderableType) -> None:
        """Print tables and text on standard output."""
        terminal = sys.stdout.isatty()
        for renderable in renderables:
            if terminal:
                self.out.print(renderable)
                continue
            with self.out.capture() as captured:
                self.out.print(renderable)
            # Tables are padded to their width, which would disturb searching and comparing.
            sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def facts(self, data: Mapping[str, Any]) -> None:
        """Print one JSON object on standard output: on one line, or indented at a terminal."""
        indent = 2 if sys.stdout.isatty() else None
        sys.stdout.write(json.dumps(data, indent=indent, ensure_ascii=indent is None) + "\n")

    def stream(self, text: str, *, style: str = "") -> None:
        """Write generated text. A terminal shows control characters as signs, so that the text cannot control it."""
        if sys.stdout.isatty():
            text = escape_controls(text)
        if style:
            from rich.text import Text

            self.out.print(Text(text, style), end="", soft_wrap=True)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    # -- words about them

    def note(self, words: str, label: str = "note", style: str = "dim") -> None:
        """Print a note on standard error."""
        if self.json:
            self._json_line({label: words})
        else:
            self._print_labelled([(label, words, style)])

    def warning(self, words: str) -> None:
        """Print a warning on standard error."""
        self.note(words, "warning", "yellow")

    def print_remark(self, words: str) -> None:
        """Print a dim line without a label; nothing with `--json`, whose object has the same content."""
        if not self.json:
            self.err.print(words, style="dim", soft_wrap=not sys.stderr.isatty())

    def error(self, error: InferplaneError) -> None:
        """Print an error: what is wrong, what there is, what to do."""
        if self.log is not None:
            self.log(error)
            return
        if self.json:
            data = {"kind": type(error).__name__, "what": error.what, "there_is": error.there_is}
            self._json_line({"error": {**data, "remedy": error.remedy}})
            return
        parts = [("error", error.what, "bold red"), ("there is", error.there_is, "bold")]
        parts.append(("to do", error.remedy, "bold green"))
        self._print_labelled([(label, _tidy(words), style) for label, words, style in parts if words])

    def crash(self, error: Exception) -> None:
        """Print an unexpected error; its traceback is already printed, or goes into the JSON."""
        if self.log is not None:
            self.log(error)
            return
        what, remedy = f"{type(error).__name__}: {error}", "report it, with the traceback and the command"
        if self.json:
            import traceback

            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            kind = type(error).__name__
            error_data = {"kind": kind, "what": what, "there_is": "", "remedy": remedy, "traceback": trace}
            self._json_line({"error": error_data})
            return
        self._print_labelled(
            [("error", f"{what} (a bug in Inferplane or in a plugin)", "bold red"), ("to do", remedy, "bold")]
        )

    def _json_line(self, data: Mapping[str, Any]) -> None:
        sys.stderr.write(json.dumps(data) + "\n")

    def _print_labelled(self, lines: list[tuple[str, str, str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        if not sys.stderr.isatty():  # one line each, for searching logs
            for label, words, style in lines:
                self.err.print(Text.assemble((f"{label}:", style), f" {words}"), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 1, 0, 0))
        for label, words, style in lines:
            grid.add_row(Text(f"{label}:", style, no_wrap=True), Text(words, "dim" if style == "dim" else ""))
        self.err.print(grid)

    # -- while it works

    @contextmanager
    def show_warnings(self) -> Iterator[None]:
        """Show Inferplane's log messages and warnings as notes and warnings while the context lasts."""
        handler = _Notes(self)
        logger = logging.getLogger("inferplane")
        logger.addHandler(handler)
        propagate, logger.propagate = logger.propagate, False
        try:
            with warnings.catch_warnings():
                previous = warnings.showwarning

                def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
                    if not issubclass(category, InferplaneWarning):
                        previous(message, category, *where, **more)
                    elif self.log is not None:
                        logging.getLogger("inferplane.serving").warning("%s", message)
                    else:
                        self.warning(str(message))

                warnings.showwarning = show
                yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate

    @contextmanager
    def loading(self, what: str) -> Iterator[Loading]:
        """Show a progress bar if standard error is a terminal."""
        if self.json or not sys.stderr.isatty() or not self.err.is_terminal or self.err.is_dumb_terminal:
            yield Loading(lambda words: None, lambda done, total: None)
            return
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(pulse_style="dim"))
        with Progress(*columns, TextColumn("{task.fields[size]}"), console=self.err, transient=True) as progress:
            task = progress.add_task(what, total=None, size="")

            def bar(done: int, total: int) -> None:
                size = f"{done / MIB:,.0f} of {total / MIB:,.0f} MiB"
                progress.update(task, completed=done, total=total, size=size)

            def phase(words: str) -> None:
                nonlocal task
                progress.remove_task(task)
                task = progress.add_task(words, total=None, size="")

            yield Loading(phase, bar)

    @contextmanager
    def progress_counter(self, what: str, total: int | None) -> Iterator[Callable[[], None]]:
        """Show a progress bar over `total` items, if it is known; each call of the yielded function counts one."""
        if self.json or not sys.stderr.isatty() or not self.err.is_terminal or self.err.is_dumb_terminal:
            yield lambda: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.err, transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)


@dataclass(frozen=True)
class Loading:
    """The functions that report the progress of loading a model.

    Args:
        phase: takes the name of the current phase.
        bar: takes the bytes done and the bytes in all.
    """

    phase: Callable[[str], None]
    bar: Callable[[int, int], None]


class _Notes(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:
            self._screen.warning(record.getMessage())
        else:
            self._screen.note(record.getMessage())


def plural(number: int, what: str) -> str:
    """Format a number of things: "1 repeat", "3 repeats"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _tidy(words: str) -> str:
    """Collapse blanks inside lines, keep indents, drop empty lines."""
    lines = [(line[: len(line) - len(line.lstrip())], line.split()) for line in words.splitlines()]
    return "\n".join(indent + " ".join(line) for indent, line in lines if line)


def escape_controls(text: str) -> str:
    """Replace control characters except line ends and tabs by signs, so that text cannot control a terminal."""
    return text.translate(_CONTROLS)


def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if terminal or os.environ.get("COLUMNS") else PIPE_COLUMNS,
        # rich keeps bold and dim under NO_COLOR, which means plain text.
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )
