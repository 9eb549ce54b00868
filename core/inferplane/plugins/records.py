"""Records of plugins and devices."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from inferplane.errors import PluginError, in_words, place_of
from inferplane.types import Probe

OURS = "inferplane"
"""The distribution whose plugins are in-tree."""

Stage = Literal[
    "metadata",
    "import",
    "validate",
    "api-version",
    "register",
    "claim",
    "load",
    "probe",
    "open",
    "kernels",
    "format",
    "proposer",
    "event",
]
"""Where a plugin failed: reading its entry points; importing it; checking its hooks; its API version; its register
hooks; a name that another plugin serves; importing its backend; its probe; opening its device; its list of kernels; its
observer; its weight format; its proposer."""


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from.

    Args:
        distribution: the wheel's name; the top-level module's when it is not installed.
        version: the wheel's version, or a phrase such as "(not installed)".
        entry_point: the entry point's name, or the module that `INFERPLANE_PLUGINS` names.
        module: the module that is imported.
        in_tree: True if it is part of this repository.
        listed: True if `INFERPLANE_PLUGINS` names it, False if an entry point does.
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
        """Names that users would probably pass for the devices of a plugin that cannot be imported."""
        if not self.listed:
            return (self.entry_point,)
        package = self.module.partition(".")[0]
        return tuple(dict.fromkeys((package, package.removeprefix(f"{OURS}_"))))


@dataclass(frozen=True)
class Quarantined:
    """A plugin, or one of its registrations, that is excluded after a failure, with the reason.

    Args:
        stage: where it failed.
        distribution: see `Origin`, as `version` and `entry_point`.
        devices: devices that it serves or, if unknown, probably serves.
        reason: one sentence.
        remedy: what to do.
        traceback: Python's, if an exception was raised.
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
        """The error for a caller that requested `what` ("device 'toy'")."""
        return PluginError(f"{what[0].upper()}{what[1:]} is served by a quarantined plugin: {self}", remedy=self.remedy)


@dataclass(frozen=True)
class LoadedPlugin:
    """A working plugin.

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
    """A device that a plugin serves, available or not.

    Args:
        name: the value of `device=`.
        distribution: the wheel that serves it; `version` is the wheel's.
        variant_of: the family, for a "family:variant".
        probe: the result of its probe.
        torch_device: torch's name for it.
        auto_rank: `device="auto"` prefers the highest.
        in_tree: True if it is part of this repository.
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
    """A name that a plugin registered, with the registered object."""

    name: str
    target: Any
    origin: Origin


class Rejected(Exception):
    """Raised and caught inside this package: a plugin fails at a stage."""

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
    """Make the record of a failure at `stage`. `devices` is None if the devices of the plugin are unknown."""
    trace = ""
    if isinstance(error, str):
        reason = error
    elif isinstance(error, Rejected):
        stage, reason, remedy = error.stage, error.reason, error.remedy
    else:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if isinstance(error, PluginError):  # raised by a `register` callback
            reason, remedy = error.what.rstrip(".") + place_of(error), error.remedy
        else:
            reason = in_words(error)
    mend = f"report it to the author of {origin.distribution}, or leave it out by -{origin.entry_point} in"
    if origin.listed:  # perhaps the user's own
        mend = f"correct {origin.module}, or take {origin.entry_point} off"
    remedy = remedy or f"{mend} INFERPLANE_PLUGINS"
    devices = origin.likely_devices() if devices is None else devices
    return Quarantined(stage, origin.distribution, origin.version, origin.entry_point, devices, reason, remedy, trace)


def call_guarded(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of `call` and None, or None and its exception. Catches `sys.exit` too, but not Ctrl-C."""
    try:
        return call(), None
    except (Exception, SystemExit) as error:
        return None, error


def family(name: str) -> str | None:
    """The family of a "family:variant"; None if the name has no variant."""
    head, colon, _ = name.partition(":")
    return head if colon else None


def is_same_distribution(one: str, other: str) -> bool:
    """True if two names mean the same distribution: case and `-`, `_`, `.` do not matter."""
    return normalize_name(one) == normalize_name(other)


def normalize_name(distribution: str) -> str:
    """The name of a distribution in the form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
