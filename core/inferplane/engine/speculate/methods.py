"""The names of methods of speculation, core's and plugins', and what options they have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from inferplane import plugins
from inferplane.engine.request.arguments import DRAFT_METHODS, as_bool, as_integer, as_number
from inferplane.errors import UsageError
from inferplane.types.kernel import import_target


def list_methods() -> tuple[str, ...]:
    """Every method of speculation that there is: core's, then those of plugins."""
    return (*DRAFT_METHODS, *sorted(plugins.host().proposers().keys() - {*DRAFT_METHODS}))


def check_method(method: str, options: Mapping[str, Any]) -> None:
    """Check a method that loads no network, and its own options.

    Raises:
        UsageError: there is no such method, or several plugins claim it; an option is unknown or of another type.
        PluginError: its plugin cannot be imported.
    """
    host = plugins.host()
    if why := host.vacant_proposers().get(method):
        raise UsageError(f"method = {method!r} is served by no plugin: {why}.")
    if method not in host.proposers():
        raise UsageError(f"method = {method!r}.", there_is=", ".join(list_methods()))
    known = _own_options(find_maker(method))
    if known is None:
        return
    for name, value in options.items():
        if name not in known:
            raise UsageError(
                f"speculative_config names {name!r}, which method {method!r} does not have.",
                there_is=", ".join(known) or "none of its own",
            )
        check = {bool: as_bool, int: lambda n, v: as_integer(n, v, 0), float: as_number}.get(type(known[name]))
        if check is not None:
            check(name, value)
        elif isinstance(known[name], str) and not isinstance(value, str):
            raise UsageError(f"{name} = {value!r:.80}.", there_is="texts")
    required = [name for name, default in known.items() if default is inspect.Parameter.empty]
    if missing := [name for name in required if name not in options]:
        raise UsageError(
            f"method = {method!r} lacks {missing[0]!r}.",
            remedy="pass it in `speculative_config` of LLM or AsyncLLM: the command line has no option for it",
        )


def find_maker(method: str) -> Callable[..., Any]:
    """What a method that loads no network registered, which makes its proposer; imported if it is a dotted name.

    Raises:
        PluginError: that fails.
    """
    found = plugins.host().proposers()[method].target
    if not isinstance(found, str):
        return found
    try:
        return import_target(found)
    except Exception as error:
        raise plugins.host().fail_proposer(method, error) from error


def _own_options(maker: Callable[..., Any]) -> dict[str, Any] | None:
    """The options of a method with their defaults: the parameters of its maker but the first; None if it takes any."""
    try:
        parameters = list(inspect.signature(maker).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
