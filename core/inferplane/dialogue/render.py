"""Renders chat templates, as transformers does: a script for a process of its own, which may hang or grow without harm.
It is started by `renderer.py`, isolated, and imports nothing of Inferplane.

The script's standard input is a line with the template, then a line per conversation; standard output, a line for each.
All lines are JSON.

A template may use what it may use in transformers: Jinja's immutable sandbox with loop controls, the `generation`
tag, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML. `tools` and `documents` are None
unless they are given.
Source: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

MAX_CHARACTERS = 16 * 2**20
"""Most characters of a rendered conversation."""
DEFAULTS = {"tools": None, "documents": None, "add_generation_prompt": True}
"""Variables that templates test for None; an undefined one is not None."""


def compile_template(source: str) -> Any:
    """Compile a template; raises jinja2's TemplateSyntaxError if it is none."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """`{% generation %}` to `{% endgeneration %}`: marks what training learns from; here it renders its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def public(name: Any) -> Any:
        if str(name).startswith("_"):
            raise SecurityError(f"the name {name!r} of a namespace begins with an underscore")
        return name

    class PublicNamespace(Namespace):
        """`namespace(...)`, whose names do not begin with an underscore. An attribute of it is one of these names."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one, too
            entries = dict(*args[1:], **kwargs)
            Namespace.__init__(args[0], {public(name): value for name, value in entries.items()})

        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(public(name), value)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = ["jinja2.ext.loopcontrols", GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["namespace"] = PublicNamespace
    return environment.from_string(source)


def render(template: Any, given: dict[str, Any], max_characters: int = MAX_CHARACTERS) -> str:
    """Render a compiled template.

    Args:
        template: of `compile_template`.
        given: its variables; those of `DEFAULTS` may be left out.
        max_characters: most characters of the result.
    """
    parts, size = [], 0
    for part in template.generate({**DEFAULTS, **given}):  # by pieces: a loop must not fill the memory before the check
        size += len(part)
        if size > max_characters:
            raise ValueError(f"it writes more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


def describe_error(error: Exception) -> str:
    """Why a template refuses a conversation, in a line."""
    return f"{type(error).__name__}: {error}"[:500]


def describe_syntax_error(error: Exception) -> str:
    """Why a template does not compile, with the line at fault if that is known, as a sentence."""
    where = f", line {line}" if (line := getattr(error, "lineno", None)) else ""
    why = getattr(error, "message", None) or str(error)  # str() has the lines of the source, too
    return f"The chat template does not compile ({type(error).__name__}: {why[:500]}{where})."


def _serve() -> None:
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    try:
        template = compile_template(setup["template"])
    except Exception as error:
        print(json.dumps({"error": describe_syntax_error(error)}), flush=True)
        return
    print(json.dumps({"text": ""}), flush=True)
    for line in sys.stdin:
        try:
            answer = {"text": render(template, json.loads(line))}
        except Exception as error:
            answer = {"error": describe_error(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
