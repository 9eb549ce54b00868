"""`INFERPLANE_PLUGINS`: the user's choice of plugins."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec

from inferplane.errors import UsageError
from inferplane.plugins.records import family, normalize_name

VARIABLE = "INFERPLANE_PLUGINS"

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")
_EXCLUDED = re.compile(r"-([\w.]+([:-][\w.]+)*)")
_CLAIM = re.compile(r"(\w[\w.:-]*)@([A-Za-z0-9][\w.-]*)")


@dataclass(frozen=True)
class PluginSelection:
    """The parsed value of `INFERPLANE_PLUGINS`.

    Args:
        modules: plugins to load by module, "module" or "module:object".
        excluded: entry points, devices or families to exclude.
        claims: name -> distribution (normalized) that serves it.
        only: True if entry points are ignored.
    """

    modules: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()
    claims: dict[str, str] = field(default_factory=dict)
    only: bool = False

    def excludes(self, name: str) -> str | None:
        """The item that excludes this entry point or device, or None. The name of a family covers its variants."""
        return next((item for item in (name, family(name)) if item in self.excluded), None)


def parse(spec: str | None) -> PluginSelection:
    """Parse a comma-separated list: `module` loads a module (installed or not), `-name` excludes an entry point or a
    device, `device@distribution` chooses the distribution that serves a device, a leading `only` ignores entry points.

    Raises:
        UsageError: an item has none of these forms; one error names all such items.
    """
    items = [item for item in (part.strip() for part in (spec or "").split(",")) if item]
    modules: list[str] = []
    excluded: set[str] = set()
    claims: dict[str, str] = {}
    wrong: list[str] = []
    only = bool(items) and items[0] == "only"
    if items and not only and _like_only(items[0]):
        wrong.append(f"{items[0]!r} (no such module; perhaps 'only' was meant)")  # otherwise all would be loaded
    for item in items[1:] if only else items:
        if item == "only":
            wrong.append("'only' (it must come first)")
        elif match := _EXCLUDED.fullmatch(item):
            excluded.add(match[1])
        elif match := _CLAIM.fullmatch(item):
            name, distribution = match[1], normalize_name(match[2])
            if claims.setdefault(name, distribution) != distribution:
                wrong.append(f"{item!r} ({name!r} is already given to {claims[name]!r})")
        elif _MODULE.fullmatch(item):
            if item not in modules:
                modules.append(item)
        else:
            wrong.append(repr(item))
    if wrong:
        raise UsageError(
            f"{VARIABLE}={spec!r} cannot be read: {', '.join(wrong)}.",
            there_is="`module` loads, `-name` leaves out, `device@distribution` settles a claim, a leading `only`",
            remedy="separate such items by commas",
        )
    return PluginSelection(tuple(modules), frozenset(excluded), claims, only)


def _like_only(item: str) -> bool:
    """True if the item is a misspelling of "only" and not the name of a module."""
    close = item.isidentifier() and get_close_matches(item.lower(), ["only"], cutoff=0.7)
    return bool(close) and find_spec(item) is None
