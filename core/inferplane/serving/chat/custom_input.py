"""Reads the input of a custom tool out of a call's arguments, as they come.

A custom tool takes one text. Templates and models know functions only, so the model is shown a function with one string
argument, and writes `{"input": "..."}`.
"""

from __future__ import annotations

import json
import re

KEY = "input"
"""The argument that holds the text."""
_BEGIN = re.compile(rf'\s*\{{\s*"{KEY}"\s*:\s*"')
_BEGUN = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
"""The beginning of `_BEGIN`, cut off anywhere."""
_CHARACTERS = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9A-Fa-f]{4}))*', re.DOTALL)
"""Whole characters and escapes of a JSON string."""
_HALF = re.compile(r"\\u[dD][89abAB][0-9A-Fa-f]{2}$")
"""The first half of a character that JSON writes as two escapes."""


def input_schema(pattern: str | None = None) -> dict[str, object]:
    """Return the JSON schema of the arguments.

    Args:
        pattern: a regular expression that the whole text matches; None: any text.
    """
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {KEY: text}, "required": [KEY], "additionalProperties": False}


class InputReader:
    """Decodes the text of one call. Arguments of another form are passed on as they are."""

    def __init__(self) -> None:
        self._pending, self._place = "", "before"

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments, and return what of the text is certain."""
        self._pending += arguments
        if self._place == "before":
            if begin := _BEGIN.match(self._pending):
                self._pending, self._place = self._pending[begin.end() :], "inside"
            elif _BEGUN.fullmatch(self._pending):
                return ""
            else:
                self._place = "other"
        if self._place == "inside":
            return self._decode()
        found, self._pending = self._pending, ""
        return found if self._place == "other" else ""

    def end(self) -> str:
        """Return what of the arguments was never certain: they were cut off, or are no JSON."""
        found, self._pending = self._pending, ""
        return found if self._place == "inside" else ""

    def _decode(self) -> str:
        found = _CHARACTERS.match(self._pending)
        assert found is not None  # it may be empty
        text = found[0]
        if half := _HALF.search(text):
            text = text[: half.start()]
        rest = self._pending[len(text) :]
        self._pending = rest
        if rest.startswith('"'):
            self._pending, self._place = "", "after"
        return json.loads(f'"{text}"', strict=False).encode("utf-8", "replace").decode() if text else ""
