"""Rewrites errors of the Python API for the command line: `max_model_len = 0` becomes `--max-model-len 0`."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Sequence

from inferplane.cli.arguments import Parser
from inferplane.errors import InferplaneError

_VALUE = (
    r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\[[^\]]*\]|\{[^}]*\}|-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:nan|inf|None|True|False)\b"
)
_NAMED = rf"(?:SamplingParams: )?(?<![\w.'-])(?P<name>[a-z]\w*)(?: = |=)(?P<value>{_VALUE})"
_ALONE = r"(?<![\w.'\"/{=-])(?P<alone>[a-z]+(?:_[a-z]+)+)(?![\w.'\"/=-])"
_MENTION = re.compile(f"{_NAMED}|{_ALONE}")
_ORIGIN = re.compile(r" \(flag --[\w-]+\)")


class ErrorWording:
    """Rewrites errors with the options of one command.

    Args:
        parser: the parser of its verb.
        typed: the words after the verb.
        settings: the options are server settings, so that only those in `typed` are flags; others come from variables
            or a file.
    """

    def __init__(self, parser: Parser, typed: Sequence[str], *, settings: bool = False) -> None:
        self.typed, self.settings = typed, settings
        self.options: dict[str, argparse.Action] = {}
        for action in parser._actions:
            for name in action.option_strings:
                if name.startswith("--"):
                    self.options[name[2:].replace("-", "_")] = self.options[action.dest] = action
        for field in ("method", "model"):  # of `speculative_config`
            if f"speculative_{field}" in self.options:
                self.options[field] = self.options[f"speculative_{field}"]

    def reword(self, error: InferplaneError) -> None:
        """Make an error name the options as the user typed them, and other options by their flags."""
        mentioned = [m["name"] or m["alone"] for m in _MENTION.finditer(error.what)]
        mentioned = [name for name in mentioned if name in self.options]
        if self.settings and not any(self._find_words(name) for name in mentioned):
            return
        what = _ORIGIN.sub("", error.what) if mentioned else error.what  # the flag replaces its mention
        error.what = self._replace_names(what, as_typed=True)
        error.remedy = self._replace_names(error.remedy, as_typed=False)
        if mentioned:
            error.there_is = re.sub(r"'([\w-]+)'", r"\1", error.there_is.removeprefix("None, "))
        error.args = (error.what,)

    def _replace_names(self, words: str, *, as_typed: bool) -> str:
        def named(match: re.Match[str]) -> str:
            name = match["name"] or match["alone"]
            if name not in self.options:
                return match[0]
            if match["alone"]:
                return self._flag(name)
            return (self._find_words(name) if as_typed else "") or self._flag_with(name, match["value"])

        return _MENTION.sub(named, words)

    def _flag(self, name: str) -> str:
        """The flag as typed, else the first one in the help."""
        known = [x for x in self.options[name].option_strings if x.startswith("--")]
        return next((x for x in known if any(w.partition("=")[0] == x for w in self.typed)), known[0])

    def _find_words(self, name: str) -> str:
        """The words by which the user set an option; empty if unset."""
        action, found = self.options[name], []
        for at, word in enumerate(self.typed):
            flag, equals, value = word.partition("=")
            if flag in action.option_strings:
                rest = [value] if equals else list(self.typed[at + 1 : at + 2])
                found.append(shlex.join([flag, *rest] if action.nargs != 0 else [flag]))
        return " ".join(found if isinstance(action, argparse._AppendAction) else found[-1:])

    def _flag_with(self, name: str, value: str) -> str:
        flag = self._flag(name)
        if value == "None":
            return f"no {flag}"
        read = None if value in ("nan", "inf") else ast.literal_eval(value)
        if isinstance(read, dict):
            return " ".join(f"{flag} {key}={of}" for key, of in read.items())
        return shlex.join([flag, read if isinstance(read, str) else value])
