"""From a device name to a backend: loading, probing, families, `auto`. No other device is ever chosen instead."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from inferplane.errors import DeviceError, InferplaneError, PluginError, UsageError, in_words, log_choice
from inferplane.plugins.claims import Settlement
from inferplane.plugins.records import (
    DeviceEntry,
    Quarantined,
    Stage,
    call_guarded,
    family,
    is_same_distribution,
    quarantine,
)
from inferplane.plugins.registration import AUTO, unfit
from inferplane.plugins.selection import VARIABLE, PluginSelection
from inferplane.types import HOST, Backend, Presence, Probe
from inferplane.types.kernel import import_target

log = logging.getLogger("inferplane")

_ANY_ACCELERATOR = ("gpu", "accelerator")


class Devices:
    """Every device that a plugin serves.

    Args:
        settled: which plugin serves each device, and why none serves some.
        choice: the user's choice.
        quarantined: the host's list, to which this object adds failures.
    """

    def __init__(self, settled: Settlement, choice: PluginSelection, quarantined: list[Quarantined]) -> None:
        self._claims, self._vacant, self._choice = dict(settled.winners), dict(settled.vacant), choice
        self._quarantined = quarantined
        self._classes: dict[str, type[Backend]] = {}
        self._entries: dict[str, DeviceEntry] = {}
        self._failed: dict[str, Quarantined] = {}

    @property
    def names(self) -> list[str]:
        """Served devices, sorted; some may fail to load later."""
        return sorted(self._claims.keys() - self._failed.keys())

    def entries(self) -> list[DeviceEntry]:
        """Every device that loads, probed, sorted by name."""
        return self._load_entries(self.names)

    def choose(self, device: str) -> DeviceEntry:
        """Return the available device that `device` names.

        Raises:
            DeviceError, PluginError, UsageError: see `PluginHost.backend`.
        """
        if device == AUTO:
            return self._choose_auto()
        entry = self._find_exact(device)
        if entry is None:
            entry = self._variant(device, explain=False)
        if not entry.probe.available:
            raise self._not_available(entry)
        return entry

    def choose_for_explain(self, device: str) -> DeviceEntry:
        """Return the device that `device` names, available or not. If no variant of a family is available, return the
        in-tree variant with the highest rank and log a warning."""
        if device == AUTO:
            return self._choose_auto()
        return self._find_exact(device) or self._variant(device, explain=True)

    def instance(self, entry: DeviceEntry, index: int = 0) -> Backend:
        """Make a backend for the device with this index.

        Raises:
            UsageError: `index` is no device number.
            DeviceError: there are fewer devices.
            PluginError: the backend's constructor raised.
        """
        if type(index) is not int or index < 0:
            raise UsageError(f"Device index {index!r} is not a number from 0.", remedy="pass index=0, 1, ...")
        seen = entry.probe.devices
        if entry.probe.available and seen is not None and index >= seen:
            raise DeviceError(f"No device {entry.name!r} has index {index}.", there_is=f"{seen}, counted from 0")
        made, error = call_guarded(partial(self._classes[entry.name], index))
        if error is not None:
            raise self.fail(entry.name, "load", error) from error
        return made

    def fail(self, name: str, stage: Stage, error: BaseException | str) -> PluginError:
        """Quarantine a device that failed, and return the error for the caller."""
        claim = self._claims.get(name)
        if claim is None:  # the caller passed a backend that no plugin registered
            words = error if isinstance(error, str) else in_words(error)
            return PluginError(f"Device {name!r} failed at {stage}: {words}.")
        record = quarantine(claim.origin, stage, error, devices=(name,))
        if name not in self._failed:
            self._failed[name] = record
            self._quarantined.append(record)
        return record.error(f"device {name!r}")

    # -- one device

    def _load_entries(self, names: Iterable[str]) -> list[DeviceEntry]:
        """The entries of these devices, without those that fail to load."""
        found = []
        for name in names:
            with contextlib.suppress(PluginError):  # it is quarantined now
                found.append(self._entry(name))
        return found

    def _entry(self, name: str) -> DeviceEntry:
        if name in self._failed:
            raise self._failed[name].error(f"device {name!r}")
        if name not in self._entries:
            backend, origin = self._load(name), self._claims[name].origin
            self._entries[name] = DeviceEntry(
                name=name,
                distribution=origin.distribution,
                version=origin.version,
                variant_of=family(name),
                probe=self._probe(name, backend),
                torch_device=backend.torch_device,
                auto_rank=backend.auto_rank,
                in_tree=origin.in_tree,
            )
        return self._entries[name]

    def _load(self, name: str) -> type[Backend]:
        if name not in self._classes:
            target = self._claims[name].target
            found, error = call_guarded(partial(import_target, target)) if isinstance(target, str) else (target, None)
            if error is not None:
                raise self.fail(name, "load", error) from error
            if problem := unfit(name, found):
                raise self.fail(name, "load", problem)
            self._classes[name] = found
        return self._classes[name]

    def _probe(self, name: str, backend: type[Backend]) -> Probe:
        found, error = call_guarded(backend.probe)
        if error is None and isinstance(found, Probe):
            return found
        reason = "its probe " + (f"returned {found!r}, not a Probe" if error is None else f"raised {in_words(error)}")
        record = quarantine(self._claims[name].origin, "probe", error or reason, devices=(name,))
        self._quarantined.append(record)
        return Probe(Presence.BROKEN, reason, remedy=record.remedy)

    # -- names

    def _find_exact(self, device: Any) -> DeviceEntry | None:
        """The device of exactly this name; None if it is the name of a family."""
        if not isinstance(device, str) or not device:
            raise UsageError(f"device={device!r} is not a device's name.", there_is=", ".join(self.names))
        if (item := self._choice.excludes(device)) is not None:
            raise DeviceError(f"Device {device!r} is left out.", remedy=f"take -{item} off {VARIABLE}")
        if device in self._vacant:
            raise DeviceError(
                f"No plugin serves device {device!r}: {self._vacant[device]}.",
                remedy=f"name one of them, {VARIABLE}={device}@distribution",
            )
        if device in self._claims:
            return self._entry(device)
        if self._variants(device):
            return None
        for record in self._quarantined:
            if device in record.devices or device in map(family, record.devices):
                raise record.error(f"device {device!r}")
        raise self._unknown(device)

    def _variants(self, device: str) -> list[str]:
        """Served variants of a family, including those that failed to load."""
        names = [name for name in sorted(self._claims) if family(name) == device]
        chosen = self._choice.claims.get(device)
        if chosen is None:
            return names
        return [name for name in names if is_same_distribution(self._claims[name].origin.distribution, chosen)]

    def _variant(self, device: str, *, explain: bool) -> DeviceEntry:
        entries = self._load_entries(self._variants(device))
        available = [entry for entry in entries if entry.probe.available]
        if len(available) == 1:
            return available[0]
        if available:
            raise DeviceError(
                f"Device {device!r} means more than one here.",
                there_is=", ".join(f"{entry.name} ({entry.probe.reason})" for entry in available),
                remedy="name one of them",
            )
        if explain and entries:
            first = min(entries, key=lambda entry: (not entry.in_tree, -entry.auto_rank, entry.name))
            others = ", ".join(entry.name for entry in entries if entry is not first) or "none"
            log.warning("device %r has no available variant; explaining %r (others: %s)", device, first.name, others)
            return first
        records = [r for r in self._quarantined if r.stage != "probe" and device in map(family, r.devices)]
        states = _as_list([*map(_state, entries), *map(str, records)])
        raise DeviceError(f"Device {device!r} has no available variant.{states}", there_is=self._available())

    def _choose_auto(self) -> DeviceEntry:
        available = [entry for entry in self.entries() if entry.probe.available]
        if not available:
            states = _as_list(map(_state, self.entries())) or " No plugin serves one."
            raise DeviceError(f"No device is available.{states}", remedy="run `inferplane doctor`")
        best = max((entry.auto_rank, entry.in_tree) for entry in available)
        first = [entry for entry in available if (entry.auto_rank, entry.in_tree) == best]
        if len(first) > 1:
            raise DeviceError(
                f"device={AUTO!r} cannot decide.",
                there_is=", ".join(f"{entry.name} ({entry.probe.reason})" for entry in first) + ", equally preferred",
                remedy="name one of them",
            )
        taken = first[0]
        log_choice(f"device={AUTO} takes {taken.name}: {taken.probe.reason}")
        return taken

    # -- errors

    def _available(self) -> str:
        return ", ".join(entry.name for entry in self.entries() if entry.probe.available)

    def _not_available(self, entry: DeviceEntry) -> InferplaneError:
        return DeviceError(
            f"Device {entry.name!r} of {entry.distribution} {entry.version} is {entry.probe.presence.value}: "
            f"{entry.probe.reason.rstrip('.')}.",
            there_is=self._available(),
            remedy=entry.probe.remedy,
        )

    def _unknown(self, device: str) -> InferplaneError:
        head, _, tail = device.partition(":")
        known = sorted({*self.names, *(head for head in map(family, self.names) if head)})
        if tail.isdigit() and head in known:
            return UsageError(
                f"device={device!r}: what follows the colon is a variant, not a number.",
                remedy=f"pass device={head!r} and index={int(tail)}",
            )
        there_is = ", ".join(known) or "no device"
        if self._quarantined:
            there_is += f" (quarantined: {'; '.join(map(str, self._quarantined))})"
        close = difflib.get_close_matches(device.lower(), known, n=1)
        remedy = f"install the plugin that serves it, or name its module in {VARIABLE}"
        remedy = f"perhaps {close[0]!r} was meant; otherwise {remedy}" if close else remedy
        if device.lower() in _ANY_ACCELERATOR:  # a similar spelling means nothing here
            kinds = sorted((e for e in self.entries() if e.torch_device != HOST), key=lambda e: -e.auto_rank)
            if kinds:
                remedy = f"name the kind: {', '.join(e.name for e in kinds)}; `inferplane devices` shows which is here"
        return DeviceError(f"Unknown device {device!r}.", there_is=there_is, remedy=remedy)


def _state(entry: DeviceEntry) -> str:
    state = f"{entry.name} is {entry.probe.presence.value}: {entry.probe.reason.rstrip('.')}."
    return f"{state}\n  To do: {entry.probe.remedy}." if entry.probe.remedy else state


def _as_list(states: Iterable[str]) -> str:
    """One line per state, to follow a message."""
    return "".join(f"\n- {state}" for state in states)
