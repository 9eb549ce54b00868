"""Finds plugins, imports each by itself, and checks its form. One that fails is recorded and the next one is tried.

pluggy's own loading is not used: it stops at the first entry point that raises, may ask every attribute of a plugin
(which makes a lazy module import things), and passes over unknown hook names. Here pluggy gets a small object that
holds nothing but a plugin's checked hook functions.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from inferplane.errors import in_words
from inferplane.plugins.hookspecs import API_VERSION, HOOKS, PROJECT
from inferplane.plugins.records import (
    OURS,
    LoadedPlugin,
    Origin,
    Quarantined,
    Rejected,
    call_guarded,
    is_same_distribution,
    normalize_name,
    quarantine,
)
from inferplane.plugins.selection import VARIABLE, PluginSelection

GROUP = "inferplane.plugins"
"""The entry-point group."""

_UNKNOWN = "unknown"
_Points = list[metadata.EntryPoint]
_VALUE = re.compile(r"\w+(\.\w+)*\s*(:\s*\w+(\.\w+)*\s*)?(\[.*\]\s*)?")
_SOURCE_TREE = Path(__file__).resolve().parents[3] / "backends"


@dataclass(frozen=True)
class Candidate:
    """A plugin of sound form: its hook functions by attribute name, all marked."""

    plugin: LoadedPlugin
    functions: dict[str, Callable[..., Any]]


def find(
    choice: PluginSelection, entry_points: Iterable[metadata.EntryPoint] | None = None
) -> tuple[list[Candidate], list[Quarantined], set[str]]:
    """Every plugin of sound form, in order of distribution and entry point; those of other form; exclusions used.

    Args:
        choice: what the user chose.
        entry_points: used instead of the installed ones (for tests).
    """
    candidates: list[Candidate] = []
    quarantined: list[Quarantined] = []
    used: set[str] = set()
    sources: list[tuple[Origin, Callable[[], Any]]] = []
    if not choice.only:
        for point in _find_entry_points(quarantined) if entry_points is None else entry_points:
            if (item := choice.excludes(point.name)) is not None:
                used.add(item)
            else:
                sources.append((_origin_of(point), partial(_load_point, point)))
    sources.sort(key=lambda source: (normalize_name(source[0].distribution), source[0].entry_point, source[0].module))
    sources += [(_origin_of_module(item), partial(_load_module, item)) for item in choice.modules]
    seen: list[tuple[Any, str]] = []
    for origin, load in sources:
        plugin, error = call_guarded(load)
        if error is not None:
            quarantined.append(quarantine(origin, "import", error))
            continue
        distribution = normalize_name(origin.distribution)
        if any(plugin is other and (origin.listed or distribution == first) for other, first in seen):
            continue  # both installed and listed, or under two entry points: it is one plugin
        seen.append((plugin, distribution))
        candidate, error = call_guarded(partial(_examine, plugin, origin))
        if error is None:
            candidates.append(candidate)
        else:
            quarantined.append(quarantine(origin, "validate", error))
    return candidates, quarantined, used


def find_distributions(group: str) -> Iterator[tuple[metadata.Distribution, _Points, BaseException | None]]:
    """Each distribution with its entry points of a group, or the exception from reading them. `metadata.entry_points`
    fails entirely if the file of one distribution is malformed."""
    seen: set[str] = set()
    for distribution in metadata.distributions():
        text, _ = call_guarded(partial(distribution.read_text, "entry_points.txt"))
        if not text or group not in text:
            continue
        name = _header(distribution, "Name")
        if normalize_name(name) in seen and name != _UNKNOWN:  # a second copy later in sys.path
            continue
        seen.add(normalize_name(name))
        points, error = call_guarded(partial(_points_of, distribution, group))
        yield distribution, points or [], error


def _points_of(distribution: metadata.Distribution, group: str) -> _Points:
    return [point for point in distribution.entry_points if point.group == group]


def _find_entry_points(quarantined: list[Quarantined]) -> Iterator[metadata.EntryPoint]:
    for distribution, points, error in find_distributions(GROUP):
        if error is not None:
            name = _header(distribution, "Name")
            origin = Origin(name, _header(distribution, "Version"), "entry_points.txt", "")
            reason = f"its entry_points.txt cannot be read ({type(error).__name__})"
            quarantined.append(quarantine(origin, "metadata", reason, devices=(), remedy=f"install {name} again"))
        yield from points


def _header(distribution: metadata.Distribution, header: str) -> str:
    value, _ = call_guarded(lambda: distribution.metadata[header])
    return str(value) if value else _UNKNOWN


def _origin_of(point: metadata.EntryPoint) -> Origin:
    module = point.value.partition(":")[0].strip()
    if point.dist is None:
        return Origin(module.partition(".")[0], "(not installed)", point.name, module)
    name = _header(point.dist, "Name")
    return Origin(name, _header(point.dist, "Version"), point.name, module, in_tree=is_same_distribution(name, OURS))


def _origin_of_module(item: str) -> Origin:
    """The origin of a listed module, without importing it: from the file system and installed wheels."""
    module = item.partition(":")[0]
    top = module.partition(".")[0]
    spec, _ = call_guarded(lambda: importlib.util.find_spec(top))
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    if any(_SOURCE_TREE in Path(place).resolve().parents for place in places if place):
        version, _ = call_guarded(lambda: metadata.version(OURS))
        return Origin(OURS, version or "(source tree)", item, module, in_tree=True, listed=True)
    names, _ = call_guarded(lambda: metadata.packages_distributions().get(top, []))
    if names:
        version, _ = call_guarded(lambda: metadata.version(names[0]))
        ours = is_same_distribution(names[0], OURS)
        return Origin(names[0], version or _UNKNOWN, item, module, in_tree=ours, listed=True)
    return Origin(top, "(not installed)", item, module, listed=True)


def _load_point(point: metadata.EntryPoint) -> Any:
    if not _VALUE.fullmatch(point.value):
        reason = f'its entry point {point.name} = {point.value!r} is neither "module" nor "module:object"'
        raise Rejected("metadata", reason, "mend its pyproject.toml")
    return point.load()


def _load_module(item: str) -> Any:
    module, _, attribute = item.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and one of its imports fails
        remedy = (
            f"install it, put the folder that holds {error.name.partition('.')[0]} on PYTHONPATH, or take {item} off"
        )
        raise Rejected("import", in_words(error), f"{remedy} {VARIABLE}") from error
    return getattr(loaded, attribute) if attribute else loaded


# -- form


def _examine(plugin: Any, origin: Origin) -> Candidate:
    """Check the API version, then the hooks.

    Raises:
        Rejected: with the stage and the reason.
    """
    if isinstance(plugin, type):
        raise Rejected("validate", f"{plugin.__name__} is a class; a plugin is a module or an instance")
    api = inspect.getattr_static(plugin, "INFERPLANE_API", None)
    _check_version(api)
    functions = {name: function for name, function in _hook_functions(plugin)}
    if not functions:
        raise Rejected("validate", "it implements no hook", f"write one of {', '.join(HOOKS)}, under @hookimpl")
    hooks = sorted({_options(function).get("specname") or name for name, function in functions.items()})
    return Candidate(LoadedPlugin(origin, api, tuple(hooks)), functions)


def _check_version(api: Any) -> None:
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(number) is int for number in api)):
        has = "has no INFERPLANE_API" if api is None else f"has INFERPLANE_API = {api!r}, not two integers"
        raise Rejected("validate", f"it {has}", f"state what it was written for: INFERPLANE_API = {API_VERSION}")
    theirs, ours = f"{api[0]}.{api[1]}", f"{API_VERSION[0]}.{API_VERSION[1]}"
    if api[0] != API_VERSION[0]:
        newer = "upgrade inferplane" if api[0] > API_VERSION[0] else "upgrade the plugin"
        reason = f"it is written for plugin API {theirs}, this Inferplane speaks {ours}; majors must be equal"
        raise Rejected("api-version", reason, newer)
    if api[1] > API_VERSION[1]:
        reason = f"it is written for plugin API {theirs}, this Inferplane speaks {ours}, which may lack what it uses"
        raise Rejected("api-version", reason, "upgrade inferplane")


def _hook_functions(plugin: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions marked as hooks. Reads attributes statically: no property runs, no lazy module imports.

    Raises:
        Rejected: a hook is unknown, unmarked, a wrapper, or has parameters that would not arrive.
    """
    if isinstance(plugin, ModuleType):
        names = list(vars(plugin))
    else:
        names = sorted({*getattr(plugin, "__dict__", {}), *dir(type(plugin))})
    for name in names:
        static = inspect.getattr_static(plugin, name, None)
        if not (inspect.isroutine(static) or isinstance(static, (staticmethod, classmethod))):
            continue
        options = _options(static)
        if options is None:
            if name in HOOKS:
                raise Rejected("validate", f"{name} lacks @hookimpl", "write @hookimpl above it")
            continue
        hook = options.get("specname") or name
        if hook not in HOOKS:
            if options.get("optionalhook"):
                continue
            known = ", ".join(HOOKS)
            raise Rejected("validate", f"it implements an unknown hook {hook!r}; there are {known}", "mend the name")
        if options.get("wrapper") or options.get("hookwrapper"):
            reason = f"{hook} is a wrapper, and each plugin is called by itself"
            raise Rejected("validate", reason, "make it a plain function")
        function = getattr(plugin, name)
        _check_parameters(hook, function)
        yield name, function


def _options(function: Any) -> Any:
    """pluggy's options of a marked function, None for an unmarked one."""
    for holder in (function, getattr(function, "__func__", None)):
        options = getattr(holder, f"{PROJECT}_impl", None)
        if isinstance(options, dict):
            return options
    return None


def _check_parameters(hook: str, function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters]
    here, first = f"{hook}({', '.join(names)})", HOOKS[hook][0]
    if unknown := [name for name in names if name not in HOOKS[hook]]:
        there_is = ", ".join(HOOKS[hook])
        reason = f"{here} has an unknown parameter {unknown[0]!r}; there is {there_is}"
        raise Rejected("validate", reason, "mend its name")
    if first not in names or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise Rejected("validate", f"{here} takes no plain parameter {first!r}", f"write def {hook}({first})")
    if any(p.default is not p.empty for p in parameters):
        raise Rejected("validate", f"{here}: a parameter with a default never arrives", "leave the default out")
