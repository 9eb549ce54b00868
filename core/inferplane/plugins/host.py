"""The plugin host: every plugin that works, every one that does not, and what they serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, cast

import pluggy

from inferplane.errors import InferplaneError, PluginError
from inferplane.plugins import discovery, hookspecs
from inferplane.plugins.claims import settle
from inferplane.plugins.devices import Devices
from inferplane.plugins.hookspecs import PROJECT, Event
from inferplane.plugins.records import (
    Claim,
    DeviceEntry,
    LoadedPlugin,
    Quarantined,
    Stage,
    guarded,
    imported,
    quarantine,
    same_distribution,
)
from inferplane.plugins.registration import REGISTER_HOOKS, Registrations, checked_kernels
from inferplane.plugins.selection import VARIABLE, PluginSelection
from inferplane.types import Backend, DeviceState, Kernel

log = logging.getLogger("inferplane")


class _Carrier:
    """What pluggy is given in place of a plugin: its checked hook functions and nothing else."""

    def __init__(self, plugin: LoadedPlugin, functions: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(functions)
        self.loaded_plugin = plugin


class PluginHost:
    """Built once for a process by `inferplane.plugins.host()`. Building imports plugins, but no backend and no vendor
    package; it probes nothing. A plugin that fails is quarantined and the others work on.

    Args:
        choice: the user's choice, parsed.
        entry_points: looked at instead of the installed ones (for tests).
    """

    def __init__(self, choice: PluginSelection, entry_points: Iterable[EntryPoint] | None = None) -> None:
        candidates, self._kept_out, used = discovery.find(choice, entry_points)
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._plugins: list[LoadedPlugin] = []
        registered: list[Registrations] = []
        for candidate in candidates:
            if (registrations := self._register(candidate)) is not None:
                self._plugins.append(candidate.plugin)
                registered.append(registrations)
        claims = [claim for r in registered for claim in r.devices]
        used |= {item for claim in claims if (item := choice.excludes(claim.name)) is not None}
        devices = settle([c for c in claims if choice.excludes(c.name) is None], choice, devices=True)
        models = settle([claim for r in registered for claim in r.models], choice, devices=False)
        quantization = settle([claim for r in registered for claim in r.quantization], choice, devices=False)
        for outcome in (devices, models, quantization):
            self._kept_out += outcome.losers
        claimed = {claim.name for r in registered for claim in (*r.devices, *r.models, *r.quantization)}
        claimed |= {claim.name.partition(":")[0] for claim in claims}
        for name in sorted((choice.claims.keys() - claimed) | (choice.claims.keys() & devices.vacant.keys())):
            devices.vacant[name] = self._unserved(name, choice.claims[name])
        self._devices = Devices(devices.winners, devices.vacant, choice, self._kept_out)
        self._models = {name: claim.target for name, claim in models.winners.items()}
        self._quantization = {name: claim.target for name, claim in quantization.winners.items()}
        self._extra_kernels: list[Claim] = [claim for r in registered for claim in r.kernels]
        self._notes = [f"{VARIABLE}: -{item} leaves nothing out" for item in sorted(choice.excluded - used)]
        served = {*devices.winners, *devices.vacant}
        for claim in self._extra_kernels:
            if claim.name not in served:
                self._notes.append(f"{claim.origin} brings kernels for {claim.name!r}, which no plugin serves")

    # -- devices

    def devices(self) -> list[DeviceEntry]:
        """Every served device that loads, with its probe, sorted by name. Each is probed once for the host's life."""
        return self._devices.entries()

    def choose(self, device: str) -> DeviceEntry:
        """The available device that `device` means, without making a backend; raises what `backend` raises."""
        return self._devices.choose(device)

    def backend(self, device: str, *, index: int = 0) -> Backend:
        """A backend for the device that `device` means; not opened.

        Args:
            device: a device's exact name; a family, which takes its one variant that is available; or "auto", which
                takes the available one with the highest `auto_rank` (the in-tree one of equals) and logs one line.
            index: which one of several devices of that kind, from 0.

        Raises:
            DeviceError: it is unknown, absent, broken, left out, claimed by several plugins or ambiguous; another
                device is never taken instead.
            PluginError: the plugin that serves it is quarantined; the reason is given.
            UsageError: `device` or `index` cannot be meant.
        """
        return self._devices.instance(self._devices.choose(device), index)

    def backend_for_explain(self, device: str) -> Backend:
        """As `backend`, but also for a device whose probe says it is not here: for questions that need no hardware."""
        return self._devices.instance(self._devices.choose_for_explain(device))

    def open(self, backend: Backend) -> DeviceState:
        """Open a backend's device.

        Raises:
            DeviceError: as the backend says it. PluginError: it raised something else, or returned no state.
        """
        state, error = guarded(backend.open)
        if isinstance(error, InferplaneError):
            raise error
        if error is not None:
            raise self._devices.fail(backend.name, "open", error) from error
        if not isinstance(state, DeviceState):
            words = f"{type(backend).__name__}.open() returned {state!r}, not a DeviceState"
            raise self._devices.fail(backend.name, "open", words)
        return state

    # -- contributions

    def kernels(self, device: str | Backend) -> list[Kernel]:
        """The backend's own kernels, then those that other plugins registered for exactly this device.

        Args:
            device: as for `backend_for_explain`, or a backend.

        Raises:
            PluginError: the backend's own list raised or holds something else. Another plugin's list that does is
                quarantined and left out.
        """
        backend = self.backend_for_explain(device) if isinstance(device, str) else device
        own, error = guarded(lambda: checked_kernels(backend.kernels(), f"{type(backend).__name__}.kernels()"))
        if error is not None:
            raise self._devices.fail(backend.name, "kernels", error) from error
        out: list[Kernel] = list(own)
        for claim in list(self._extra_kernels):
            if claim.name != backend.name:
                continue
            more, error = guarded(partial(_extra, claim))
            if error is None:
                out += more
            else:
                self._extra_kernels.remove(claim)
                self._kept_out.append(quarantine(claim.origin, "kernels", error, devices=()))
                log.warning("kernels for %r are left out: %s", claim.name, self._kept_out[-1])
        return out

    def origin(self, kernel: Kernel, backend: Backend) -> str:
        """The distribution and version that a kernel of `kernels(backend)` comes from, for messages."""
        for claim in self._extra_kernels:
            more, error = guarded(partial(_extra, claim))
            if error is None and any(k is kernel or k.name == kernel.name for k in more):
                return f"{claim.origin.distribution} {claim.origin.version}"
        entry = next((d for d in self.devices() if d.name == backend.name), None)
        return f"{entry.distribution} {entry.version}" if entry is not None else f"device {backend.name}"

    def models(self) -> dict[str, str | Callable[..., Any]]:
        """Architecture -> constructor of its model, or its dotted name."""
        return dict(self._models)

    def quantization(self) -> dict[str, str | Callable[..., Any]]:
        """Name of a weight format -> its reader, or its dotted name."""
        return dict(self._quantization)

    def emit(self, event: Event) -> None:
        """Tell every observer. One that raises is quarantined and not called again; its devices work on."""
        for hook in self._manager.hook.inferplane_on_event.get_hookimpls():
            _, error = guarded(partial(hook.function, event))
            if error is not None:
                carrier = cast(_Carrier, hook.plugin)
                self._manager.unregister(carrier)
                self._kept_out.append(quarantine(carrier.loaded_plugin.origin, "event", error, devices=()))
                log.warning("an observer is no longer told of events: %s", self._kept_out[-1])

    # -- facts

    def plugins(self) -> list[LoadedPlugin]:
        """Plugins that work, in order of distribution and entry point."""
        return list(self._plugins)

    def quarantined(self) -> list[Quarantined]:
        """What is kept out, in the order in which it was found; grows as devices are loaded and probed."""
        return list(self._kept_out)

    def notes(self) -> list[str]:
        """Oddities that harm nothing: exclusions that match nothing, kernels for devices that nobody serves."""
        return list(self._notes)

    # -- building

    def _register(self, candidate: discovery.Candidate) -> Registrations | None:
        """Run one plugin's register hooks; all it registers counts, or nothing."""
        plugin = candidate.plugin
        registrations = Registrations(plugin.origin)
        carrier = _Carrier(plugin, candidate.functions)
        stage: Stage = "validate"
        _, error = guarded(partial(self._manager.register, carrier, name=f"{plugin.origin}#{id(carrier)}"))
        if error is None:
            stage = "register"
            _, error = guarded(partial(self._run, carrier, registrations))
        registrations.close()
        if error is None:
            return registrations
        if self._manager.is_registered(carrier):  # pluggy before 1.7 keeps a plugin that failed validation
            self._manager.unregister(carrier)
        devices = tuple(claim.name for claim in registrations.devices) or None
        if isinstance(error, PluginError):
            stage = "validate"
        self._kept_out.append(quarantine(plugin.origin, stage, error, devices=devices))
        return None

    def _run(self, carrier: _Carrier, registrations: Registrations) -> None:
        for name in REGISTER_HOOKS:
            for hook in getattr(self._manager.hook, name).get_hookimpls():
                if hook.plugin is carrier:
                    hook.function(registrations.callback(name))

    def _unserved(self, name: str, distribution: str) -> str:
        """Why the user's choice of a distribution for a name cannot be met."""
        records = [str(r) for r in self._kept_out if same_distribution(r.distribution, distribution)]
        state = f"is quarantined: {'; '.join(records)}" if records else "is not installed or does not serve it"
        return f"{VARIABLE} gives it to {distribution}, which {state}"


def _extra(claim: Claim) -> list[Kernel]:
    kernels = imported(claim.target)() if isinstance(claim.target, str) else claim.target
    return checked_kernels(kernels, f"{claim.origin}: kernels for {claim.name!r}")
