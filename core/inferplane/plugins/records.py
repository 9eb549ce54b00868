"""What the host knows of plugins and devices, as data."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from inferplane.errors import PluginError
from inferplane.types import Probe

OURS = "inferplane"
"""The distribution whose plugins are in-tree."""

Stage = Literal[
    "metadata", "import", "validate", "api-version", "register", "claim", "load", "probe", "open", "kernels", "event"
]
"""Where a plugin failed: reading its entry points; importing it; its form; its API version; its register hooks; a name
that another plugin serves; importing what it registered; its probe; opening its device; its list of kernels; its
observer."""


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from.

    Args:
        distribution: the wheel's name; the top-level module's when it is not installed.
        version: the wheel's version, or words in its place.
        entry_point: the entry point's name, or the module that `INFERPLANE_PLUGINS` names.
        module: the module it is loaded from.
        in_tree: it belongs to this repository.
        listed: it was named in `INFERPLANE_PLUGINS`, not found by an entry point.
    """

    distribution: str
    version: str
    entry_point: str
    module: str
    in_tree: bool = False
    listed: bool = False

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def likely_devices(self) -> tuple[str, ...]:
        """Names under which a person would ask for what a plugin serves that could not even be imported."""
        if not self.listed:
            return (self.entry_point,)
        package = self.module.partition(".")[0]
        return tuple(dict.fromkeys((package, package.removeprefix(f"{OURS}_"))))


@dataclass(frozen=True)
class Quarantined:
    """A plugin, or one thing it registered, that is kept out, and why.

    Args:
        stage: where it failed.
        distribution: see `Origin`, as `version` and `entry_point`.
        devices: devices it serves or, where that was not learned, would probably have served.
        reason: one sentence.
        remedy: what to do.
        traceback: Python's, when something was raised.
    """

    stage: Stage
    distribution: str
    version: str
    entry_point: str
    devices: tuple[str, ...]
    reason: str
    remedy: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point}), {self.stage}: {self.reason}"

    def error(self, what: str) -> PluginError:
        """The error for a caller who asked for `what` ("device 'toy'")."""
        return PluginError(f"{what[0].upper()}{what[1:]} is served by a quarantined plugin: {self}", remedy=self.remedy)


@dataclass(frozen=True)
class LoadedPlugin:
    """A plugin that works.

    Args:
        origin: where it comes from.
        api: the API version it was written for.
        hooks: names of the hooks it implements, sorted.
    """

    origin: Origin
    api: tuple[int, int]
    hooks: tuple[str, ...]


@dataclass(frozen=True)
class DeviceEntry:
    """A device that some plugin serves, whether or not it is here.

    Args:
        name: the user's word.
        distribution: who serves it, with `version`.
        variant_of: the family, for a "family:variant".
        probe: whether it can be used here.
        torch_device: what torch calls it.
        auto_rank: its place in the order of `device="auto"`; highest first.
        in_tree: it belongs to this repository.
    """

    name: str
    distribution: str
    version: str
    variant_of: str | None
    probe: Probe
    torch_device: str
    auto_rank: int
    in_tree: bool


@dataclass(frozen=True)
class Claim:
    """One name that one plugin registered, with what stands behind it."""

    name: str
    target: Any
    origin: Origin


class Rejected(Exception):
    """Inside this package: a plugin does not get past a stage."""

    def __init__(self, stage: Stage, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.stage, self.reason, self.remedy = stage, reason, remedy


def quarantine(
    origin: Origin,
    stage: Stage,
    error: BaseException | str,
    *,
    devices: tuple[str, ...] | None = None,
    remedy: str = "",
) -> Quarantined:
    """A record of `origin` failing at `stage`; `devices` None means that it is not known what it serves."""
    trace = ""
    if isinstance(error, str):
        reason = error
    elif isinstance(error, Rejected):
        stage, reason, remedy = error.stage, error.reason, error.remedy
    else:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if isinstance(error, PluginError):  # what a `register` callback found wrong
            reason, remedy = error.what.rstrip("."), error.remedy
        else:
            reason = in_words(error)
    leave_out = f"take {origin.entry_point} off" if origin.listed else f"leave it out by -{origin.entry_point} in"
    remedy = remedy or f"tell the author of {origin.distribution}, or {leave_out} INFERPLANE_PLUGINS"
    devices = origin.likely_devices() if devices is None else devices
    return Quarantined(stage, origin.distribution, origin.version, origin.entry_point, devices, reason, remedy, trace)


def in_words(error: BaseException) -> str:
    """An exception's type and words, on one line."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # an exception's __str__ is the plugin's code as well
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def guarded(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `call` returns, or what it raised. A plugin that ends the process by `sys.exit` is caught, Ctrl-C is not."""
    try:
        return call(), None
    except (Exception, SystemExit) as error:
        return None, error


def imported(target: str) -> Any:
    """What a dotted name "module:attribute" means; raises whatever importing it raises."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def family(name: str) -> str | None:
    """The family of a "family:variant"; None for a plain device."""
    head, colon, _ = name.partition(":")
    return head if colon else None


def same_distribution(one: str, other: str) -> bool:
    """Whether two names mean one distribution: case, `-`, `_` and `.` do not count."""
    return normalized(one) == normalized(other)


def normalized(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
