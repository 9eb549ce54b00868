"""Chat templates that a user brings: the name of a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

from inferplane.dialogue.render import compile_template, describe_syntax_error
from inferplane.errors import UsageError

MAX_CHARACTERS = 2**18
"""Most characters of a template: the longest of published checkpoints have some 30,000."""


def read_template(given: str) -> str:
    """Return the source of a chat template.

    Args:
        given: the name of a file that holds it, or the template itself: what has a brace or a line end is none.

    Raises:
        UsageError: the file cannot be read, or the template does not compile.
    """
    source = given
    if not any(character in given for character in "{}\n"):
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "pass the name of a file with a Jinja template, or the template itself"
            raise UsageError(f"The chat template {given} cannot be read ({error}).", remedy=remedy) from error
    if len(source) > MAX_CHARACTERS:
        raise UsageError(
            f"The chat template has {len(source)} characters.", there_is=f"templates of at most {MAX_CHARACTERS}"
        )
    check_template(source)
    return source


def check_template(source: str) -> None:
    """Raise UsageError if a template does not compile."""
    from jinja2 import TemplateError

    try:
        compile_template(source)
    except (TemplateError, RecursionError) as error:
        raise UsageError(
            describe_syntax_error(error), remedy="mend it: it is a Jinja template as transformers renders them"
        ) from error
