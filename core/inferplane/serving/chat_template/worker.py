"""Renders chat templates in a process of its own, which may hang or grow without harm; `template.py` starts it.

It runs as an isolated script and imports nothing of Inferplane. Standard input: a line with the template, then a line
per conversation; standard output: a line for each. All lines are JSON.

A template may use what it may use in transformers: Jinja's immutable sandbox with loop controls, the `generation`
tag, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML.
Source: https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

MEMORY_BYTES = 2**30


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except (ImportError, ValueError, OSError):
        pass  # the limits of time and of the text's size still apply


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` to `{% endgeneration %}`: marks what training learns from; here it renders its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
        separators, sort_keys = more.get("separators"), more.get("sort_keys", False)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = ["jinja2.ext.loopcontrols", GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _render(template: Any, given: dict[str, Any], max_characters: int) -> str:
    parts, size = [], 0
    for part in template.generate(**given):  # piece by piece, so that a loop cannot fill the memory before the check
        size += len(part)
        if size > max_characters:
            raise ValueError(f"it writes more than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


def _serve() -> None:
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    template = _environment().from_string(setup["template"])
    print(json.dumps({"text": ""}), flush=True)
    for line in sys.stdin:
        try:
            answer = {"text": _render(template, {**setup["tokens"], **json.loads(line)}, setup["max_characters"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _limit_memory()
    _serve()
