"""Expected failures: groups of case ids below a comment with the reason and a link. A case that passes is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from inferplane.errors import UsageError

_LINK = re.compile(r"https?://\S+")


@dataclass(frozen=True)
class Expected:
    """One line of the file.

    Args:
        pattern: a case id as failures print it; `*` and `?` are wildcards.
        reason: the comment above its group, on one line.
        line: its number in the file.
    """

    pattern: str
    reason: str
    line: int

    def matches(self, case: str) -> bool:
        """True if the line applies to this case."""
        return fnmatchcase(case, self.pattern)


def read(path: Path) -> list[Expected]:
    """Read a file. A blank line ends a group, and a comment after a case begins one.

    Raises:
        UsageError: the file cannot be read, or a group has no comment with a link; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            f"The list of expected failures cannot be read: {error}.", remedy="check its path and form"
        ) from error
    found: list[Expected] = []
    comment: list[str] = []
    ended = False
    for number, text in enumerate(map(str.strip, lines), 1):
        if not text:
            comment, ended = [], False
        elif text.startswith("#"):
            comment, ended = ([] if ended else comment) + [text.lstrip("# ")], False
        else:
            reason, ended = " ".join(comment), True
            if not _LINK.search(reason):
                raise UsageError(
                    f"{path}:{number}: {text} is expected to fail without a reason and a link.",
                    remedy="write a comment above it with the reason and a link to an issue",
                )
            found.append(Expected(text, reason, number))
    return found
