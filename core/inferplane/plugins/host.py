"""The plugin host: all plugins, working and quarantined, and what they serve."""

from __future__ import annotations

import importlib.metadata as metadata
import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, cast

import pluggy

from inferplane.dialogue.replies.catalog import register_reply_forms
from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.errors import InferplaneError, PluginError
from inferplane.plugins import discovery, hookspecs
from inferplane.plugins.claims import settle
from inferplane.plugins.devices import Devices
from inferplane.plugins.hookspecs import PROJECT, Event
from inferplane.plugins.old_kernels import with_stack_kernels
from inferplane.plugins.records import (
    OURS,
    Claim,
    DeviceEntry,
    LoadedPlugin,
    Origin,
    Quarantined,
    Stage,
    call_guarded,
    is_same_distribution,
    quarantine,
)
from inferplane.plugins.registration import REGISTER_HOOKS, Registrations, check_kernels
from inferplane.plugins.selection import VARIABLE, PluginSelection
from inferplane.types import Backend, DeviceState, Kernel
from inferplane.types.kernel import import_target

log = logging.getLogger("inferplane")


class _Carrier:
    """The object that pluggy gets in place of a plugin: it has the checked hook functions and nothing else."""

    def __init__(self, plugin: LoadedPlugin, functions: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(functions)
        self.loaded_plugin = plugin


class PluginHost:
    """Built once per process by `inferplane.plugins.host()`. Building imports plugins, but no backend and no vendor
    package, and probes nothing. A plugin that fails is quarantined; the others continue to work.

    Args:
        choice: the user's choice, parsed.
        entry_points: used instead of the installed ones (for tests).
    """

    def __init__(self, choice: PluginSelection, entry_points: Iterable[EntryPoint] | None = None) -> None:
        candidates, self._quarantined, used = discovery.find(choice, entry_points)
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
        in_tree = _register_in_tree()
        forms = [claim for r in (*registered, in_tree) for claim in r.reply_forms]
        reply_forms = settle(forms, choice, devices=False)
        methods = [claim for r in (*registered, in_tree) for claim in r.calibration]
        calibration = settle(methods, choice, devices=False)
        drafting = [claim for r in (*registered, in_tree) for claim in r.proposers]
        proposers = settle(drafting, choice, devices=False)
        for outcome in (devices, models, quantization, reply_forms, calibration, proposers):
            self._quarantined += outcome.losers
        claimed = {claim.name for r in registered for claim in (*r.devices, *r.models, *r.quantization)}
        claimed |= {claim.name for claim in (*forms, *methods, *drafting)}
        claimed |= {claim.name.partition(":")[0] for claim in claims}
        for name in sorted((choice.claims.keys() - claimed) | (choice.claims.keys() & devices.vacant.keys())):
            devices.vacant[name] = self._explain_unserved(name, choice.claims[name])
        self._devices = Devices(devices, choice, self._quarantined)
        self._models = {name: claim.target for name, claim in models.winners.items()}
        self._formats, self._proposers = quantization, proposers
        self._reply_forms = [claim.target for claim in forms if reply_forms.winners.get(claim.name) is claim]
        self._calibration = {c.name: c.target for c in methods if calibration.winners.get(c.name) is c}
        self._extra_kernels: list[Claim] = [claim for r in registered for claim in r.kernels]
        self._notes = [f"{VARIABLE}: -{item} excludes nothing" for item in sorted(choice.excluded - used)]
        served = {*devices.winners, *devices.vacant}
        for claim in self._extra_kernels:
            if claim.name not in served:
                self._notes.append(f"{claim.origin} brings kernels for {claim.name!r}, which no plugin serves")

    # -- devices

    def devices(self) -> list[DeviceEntry]:
        """Every served device that loads, with its probe, sorted by name. Each is probed once per host."""
        return self._devices.entries()

    def choose(self, device: str) -> DeviceEntry:
        """Return the available device that `device` names, without making a backend. Raises what `backend` raises."""
        return self._devices.choose(device)

    def backend(self, device: str, *, index: int = 0) -> Backend:
        """Return a backend for the device that `device` names; it is not opened.

        Args:
            device: a device's exact name; a family, which stands for its one available variant; or "auto", which
                chooses the available device with the highest `auto_rank` (in-tree first) and logs one line.
            index: which one of several devices of that kind, from 0.

        Raises:
            DeviceError: it is unknown, absent, broken, excluded, claimed by several plugins or ambiguous; no other
                device is ever chosen instead.
            PluginError: the plugin that serves it is quarantined; the message has the reason.
            UsageError: `device` or `index` is invalid.
        """
        return self._devices.instance(self._devices.choose(device), index)

    def backend_for_explain(self, device: str) -> Backend:
        """Like `backend`, but also for a device that is not available: for commands that need no hardware."""
        return self._devices.instance(self._devices.choose_for_explain(device))

    def open(self, backend: Backend) -> DeviceState:
        """Open a backend's device.

        Raises:
            DeviceError: the backend raised it. PluginError: it raised another exception, or returned no state.
        """
        state, error = call_guarded(backend.open)
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
            PluginError: the backend's own list raises or has other objects. Such a list of another plugin is
                quarantined and skipped.
        """
        backend = self.backend_for_explain(device) if isinstance(device, str) else device
        own, error = call_guarded(lambda: check_kernels(backend.kernels(), f"{type(backend).__name__}.kernels()"))
        if error is not None:
            raise self._devices.fail(backend.name, "kernels", error) from error
        out: list[Kernel] = list(own)
        for claim in list(self._extra_kernels):
            if claim.name != backend.name:
                continue
            more, error = call_guarded(partial(_extra, claim))
            if error is None:
                out += more
            else:
                self._extra_kernels.remove(claim)
                self._quarantined.append(quarantine(claim.origin, "kernels", error, devices=()))
                log.warning("kernels for %r are skipped: %s", claim.name, self._quarantined[-1])
        return with_stack_kernels(out)

    def origin(self, kernel: Kernel, backend: Backend) -> str:
        """The distribution and version that a kernel of `kernels(backend)` comes from, for messages. A kernel of core
        (`inferplane.kernels`) is core's, whichever backend declares it."""
        target = kernel.target
        module = target.partition(":")[0] if isinstance(target, str) else getattr(target, "__module__", "")
        if f"{module}.".startswith(f"{OURS}."):
            version, _ = call_guarded(lambda: metadata.version(OURS))
            return f"{OURS} {version or '(source tree)'}"
        for claim in self._extra_kernels:
            more, error = call_guarded(partial(_extra, claim))
            if error is None and any(k is kernel or k.name == kernel.name for k in more):
                return f"{claim.origin.distribution} {claim.origin.version}"
        entry = next((d for d in self.devices() if d.name == backend.name), None)
        return f"{entry.distribution} {entry.version}" if entry is not None else f"device {backend.name}"

    def models(self) -> dict[str, str | Callable[..., Any]]:
        """Architecture -> constructor of its model, or its dotted name."""
        return dict(self._models)

    def quantization(self) -> dict[str, str | Callable[..., Any]]:
        """Quantization method -> the weight format that a plugin registered for it, or its dotted name."""
        return {name: claim.target for name, claim in self._formats.winners.items()}

    def reply_forms(self) -> tuple[ReplyForm, ...]:
        """Forms of thoughts and tool calls in the order in which they are tried: plugins' own, then those in-tree."""
        return tuple(self._reply_forms)

    def calibration(self) -> dict[str, str | Callable[..., Any]]:
        """Calibration methods by name: each a function that returns it, or the dotted name of one."""
        return dict(self._calibration)

    def proposers(self) -> dict[str, Claim]:
        """Methods of speculation without a network: by name, the target and the plugin that registered it."""
        return dict(self._proposers.winners)

    def vacant_proposers(self) -> dict[str, str]:
        """Method of speculation that several plugins registered -> why none of them drafts, as a sentence."""
        return dict(self._proposers.vacant)

    def fail_proposer(self, method: str, error: BaseException | str) -> PluginError:
        """Quarantine a proposer that failed, and return the error for the caller."""
        record = quarantine(self._proposers.winners[method].origin, "proposer", error, devices=())
        self._quarantined.append(record)
        return record.error(f"method {method!r}")

    def vacant_formats(self) -> dict[str, str]:
        """Quantization method that several plugins registered -> why none of them reads it, as a sentence."""
        return dict(self._formats.vacant)

    def fail_format(self, method: str, error: BaseException | str) -> PluginError:
        """Quarantine a weight format that failed, and return the error for the caller."""
        record = quarantine(self._formats.winners[method].origin, "format", error, devices=())
        self._quarantined.append(record)
        return record.error(f"weight format {method!r}")

    def emit(self, event: Event) -> None:
        """Call every observer. One that raises is quarantined and not called again; its devices continue to work."""
        for hook in self._manager.hook.inferplane_on_event.get_hookimpls():
            _, error = call_guarded(partial(hook.function, event))
            if error is not None:
                carrier = cast(_Carrier, hook.plugin)
                self._manager.unregister(carrier)
                self._quarantined.append(quarantine(carrier.loaded_plugin.origin, "event", error, devices=()))
                log.warning("an observer gets no more events: %s", self._quarantined[-1])

    # -- facts

    def plugins(self) -> list[LoadedPlugin]:
        """Working plugins, in order of distribution and entry point."""
        return list(self._plugins)

    def list_quarantined(self) -> list[Quarantined]:
        """Quarantined items in order of discovery; the list grows when devices are loaded and probed."""
        return list(self._quarantined)

    def notes(self) -> list[str]:
        """Harmless oddities: exclusions that match nothing, kernels for devices that no plugin serves."""
        return list(self._notes)

    # -- building

    def _register(self, candidate: discovery.Candidate) -> Registrations | None:
        """Run the register hooks of one plugin; if one fails, none of its registrations count."""
        plugin = candidate.plugin
        registrations = Registrations(plugin.origin)
        carrier = _Carrier(plugin, candidate.functions)
        stage: Stage = "validate"
        _, error = call_guarded(partial(self._manager.register, carrier, name=f"{plugin.origin}#{id(carrier)}"))
        if error is None:
            stage = "register"
            _, error = call_guarded(partial(self._run, carrier, registrations))
        registrations.close()
        if error is None:
            return registrations
        if self._manager.is_registered(carrier):  # pluggy before 1.7 keeps a plugin that failed validation
            self._manager.unregister(carrier)
        devices = tuple(claim.name for claim in registrations.devices) or None
        if isinstance(error, PluginError):
            stage = "validate"
        self._quarantined.append(quarantine(plugin.origin, stage, error, devices=devices))
        return None

    def _run(self, carrier: _Carrier, registrations: Registrations) -> None:
        for name in REGISTER_HOOKS:
            for hook in getattr(self._manager.hook, name).get_hookimpls():
                if hook.plugin is carrier:
                    hook.function(registrations.callback(name))

    def _explain_unserved(self, name: str, distribution: str) -> str:
        """Why the distribution that the user chose for a name does not serve it."""
        records = [str(r) for r in self._quarantined if is_same_distribution(r.distribution, distribution)]
        state = f"is quarantined: {'; '.join(records)}" if records else "is not installed or does not serve it"
        return f"{VARIABLE} gives it to {distribution}, which {state}"


CALIBRATION = ("nearest", "clip", "gptq", "quantease", "smoothquant", "pss", "awq", "shift", "rotate")
"""Calibration methods of core (`inferplane.calibrate.catalog`)."""
PROPOSERS = {
    "ngram": "inferplane.engine.speculate.text.ngram:NgramProposer",
    "suffix": "inferplane.engine.speculate.text.suffix:SuffixProposer",
}
"""Methods of speculation of core that draft from text."""


def _register_in_tree() -> Registrations:
    """Register the reply forms, calibration methods and proposers of core, checked as those of plugins are."""
    registrations = Registrations(Origin(OURS, "(core)", "core", "inferplane", in_tree=True))
    register_reply_forms(registrations.callback("inferplane_register_reply_forms"))
    register = registrations.callback("inferplane_register_calibration")
    for name in CALIBRATION:
        register(name, f"inferplane.calibrate.catalog:make_{name}")
    for name, target in PROPOSERS.items():
        registrations.callback("inferplane_register_proposers")(name, target)
    registrations.close()
    return registrations


def _extra(claim: Claim) -> list[Kernel]:
    kernels = import_target(claim.target)() if isinstance(claim.target, str) else claim.target
    return check_kernels(kernels, f"{claim.origin}: kernels for {claim.name!r}")
