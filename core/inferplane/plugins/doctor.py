"""One screen: what is here, what is not, what to do about it. Facts only; the command line renders them."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from inferplane.errors import InferplaneError, first_of, in_words, install_hint
from inferplane.plugins.discovery import find_distributions
from inferplane.plugins.hookspecs import API_VERSION
from inferplane.plugins.host import PluginHost
from inferplane.plugins.records import OURS, call_guarded
from inferplane.plugins.selection import VARIABLE
from inferplane.types import HOST, Backend, DeviceState, Memory, Presence
from inferplane.types.backend import host_memory

Status = Literal["ok", "warn", "fail"]

_OF_PRESENCE: dict[Presence, Status] = {
    Presence.AVAILABLE: "ok",
    Presence.ABSENT: "warn",
    Presence.BROKEN: "fail",
}
_SMALL_HOST_CORES = 8
OPEN_TIMEOUT_S = 120
"""Seconds after which opening a device in a process of its own is given up."""
_OPEN = "import sys; from inferplane.plugins import doctor; doctor.print_opened(sys.argv[1])"
EXTRAS = {
    "serving": "inferplane serve",
    "constrained": "text held to a schema, a regular expression or a grammar",
    "otel": "spans of requests",
    "test": "inferplane conform",
}
"""Extra -> what needs it; a vendor's is its device's matter."""


@dataclass(frozen=True)
class Line:
    """One finding.

    Args:
        subject: what it is about ("torch", "device toy").
        status: "ok"; "warn" where something is missing that one may want; "fail" where something is wrong.
        detail: what was found.
        remedy: what to do; empty when there is nothing to do.
    """

    subject: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """The findings of `doctor`, in the order in which they are shown."""

    lines: tuple[Line, ...]

    @property
    def status(self) -> Status:
        """The worst status of all lines."""
        found = {line.status for line in self.lines}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`: `{"schema": 1, "status", "lines": [{subject, status, detail, remedy}]}`."""
        return {"schema": 1, "status": self.status, "lines": [asdict(line) for line in self.lines]}


def doctor(host: PluginHost, *, open_devices: bool = False) -> Report:
    """Examine the environment of this process. A faulty plugin never makes it raise.

    Args:
        host: the plugin host. Its devices are loaded and probed.
        open_devices: also open each available device, which shows its name, architecture and memory, and whether it
            works. One that is not the host imports its runtime and allocates, so it is opened in a process of its own.
    """
    devices = list(_devices(host, open_devices))  # first, because loading devices may quarantine plugins
    return Report((*_python(), *_extras(), *_plugins(host), *devices, *_host()))


def _python() -> Iterator[Line]:
    yield Line("python", "ok", f"{sys.version.split()[0]}, {sys.executable}")
    facts = [(name, value) for name, value in vars(torch.version).items() if isinstance(value, str)]
    build = ", ".join(f"{name} {value}" for name, value in facts if name[0] != "_" and name != "git_version")
    yield Line("torch", "ok", torch.__version__ + (f" ({build})" if build else ""))
    loaders = [point for _, points, _ in find_distributions("torch.backends") for point in points]
    if loaders and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        names = ", ".join(sorted({point.value for point in loaders}))
        yield Line(
            "torch extensions",
            "warn",
            f"`import torch` also imports {names}; one whose runtime is missing breaks it",
            "set TORCH_DEVICE_BACKEND_AUTOLOAD=0; a backend imports its own runtime",
        )
    version, error = call_guarded(partial(metadata.version, "transformers"))
    if error is None:
        yield Line("transformers", "ok", str(version))
    else:
        yield Line("transformers", "fail", "not installed", "pip install transformers: it reads configs and tokenizers")


def _extras() -> Iterator[Line]:
    """Which extras of the wheel are complete; nothing if the wheel has no metadata here."""
    requirements, error = call_guarded(lambda: [Requirement(line) for line in metadata.requires(OURS) or ()])
    for extra, use in EXTRAS.items() if error is None else ():
        chosen = [r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra})]
        packages = {r.name: r.specifier for r in chosen}
        lacking = [name for name, versions in packages.items() if not _has(name, versions)]
        if lacking:
            remedy = f"{install_hint(extra)} if you need it"
            yield Line(f"extra {extra}", "warn", f"for {use}: lacks {first_of(lacking)}", remedy)
        elif packages:
            yield Line(f"extra {extra}", "ok", f"for {use}")


def _has(name: str, versions: SpecifierSet) -> bool:
    found, error = call_guarded(partial(metadata.version, name))
    return error is None and bool(versions.contains(str(found), prereleases=True))


def _plugins(host: PluginHost) -> Iterator[Line]:
    ours = f"{API_VERSION[0]}.{API_VERSION[1]}"
    listed = os.environ.get(VARIABLE)
    yield Line("plugin API", "ok", f"{ours}; {VARIABLE}" + (f"={listed}" if listed else " is not set"))
    for plugin in host.plugins():
        api = f"{plugin.api[0]}.{plugin.api[1]}"
        what = ", ".join(hook.removeprefix("inferplane_") for hook in plugin.hooks)
        yield Line(f"plugin {plugin.origin.entry_point}", "ok", f"{plugin.origin}, API {api}: {what}")
    for record in host.list_quarantined():
        if record.stage == "probe":
            continue  # the line of the device has it
        status: Status = "warn" if record.stage == "claim" else "fail"
        detail = f"{record.distribution} {record.version} is in quarantine ({record.stage}): {record.reason}"
        yield Line(f"plugin {record.entry_point}", status, detail, record.remedy)
    for note in host.notes():
        yield Line("plugins", "warn", note, f"mend {VARIABLE}" if VARIABLE in note else "install the plugin it extends")


def _devices(host: PluginHost, open_devices: bool) -> Iterator[Line]:
    entries = host.devices()
    for entry in entries:
        probe = entry.probe
        detail = f"{probe.presence.value}: {probe.reason} [{entry.distribution} {entry.version}]"
        if probe.versions:
            detail += "; " + ", ".join(f"{name} {version}" for name, version in probe.versions.items())
        status = "warn" if probe.available and probe.remedy else _OF_PRESENCE[probe.presence]
        opened = []
        if open_devices and probe.available:
            on_host = entry.torch_device == HOST
            opened = [open_device(entry.name, host) if on_host else _open_elsewhere(entry.name)]
        failed = any(line.status == "fail" for line in opened)
        yield Line(f"device {entry.name}", "fail" if failed else status, detail, probe.remedy)
        yield from opened
    if not any(entry.probe.available for entry in entries):
        yield Line("devices", "fail", "none is available", "follow a remedy above, or install a device's plugin")


def open_device(name: str, host: PluginHost) -> Line:
    """Open a device in this process; the line says what it is, or why it cannot be opened."""
    state, error = call_guarded(lambda: _open(host.backend(name)))
    if error is None:
        return Line(f"device {name}", "ok", f"{state.name}, {state.arch}, {_in_gib(state.memory)}")
    if isinstance(error, InferplaneError):
        return Line(f"device {name}", "fail", f"cannot be opened: {error.what}", error.remedy or _REPORT)
    return Line(f"device {name}", "fail", f"cannot be opened: {in_words(error)}", _REPORT)


_REPORT = "correct the plugin, or report it to its author"


def _open(backend: Backend) -> DeviceState:
    state = backend.open()
    if not isinstance(state, DeviceState):
        raise TypeError(f"{type(backend).__name__}.open() returned {state!r}, not a DeviceState")
    return state


def _open_elsewhere(name: str) -> Line:
    """`open_device` in another process, which survives a runtime that hangs or crashes."""
    command = [sys.executable, "-c", _OPEN, name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=OPEN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        reason = f"it takes more than {OPEN_TIMEOUT_S} s"
    else:
        if done.returncode == 0:
            return Line(**json.loads(done.stdout.splitlines()[-1]))
        last = (done.stderr.splitlines() or [""])[-1]
        by_signal = f"{signal.Signals(-done.returncode).name} ended its process" if done.returncode < 0 else ""
        reason = by_signal or last or f"its process ended with exit code {done.returncode}"
    return Line(f"device {name}", "fail", f"cannot be opened: {reason}", _REPORT)


def print_opened(name: str) -> None:
    """Print the line of `open_device` as JSON: the other process's part of the report."""
    from inferplane.plugins import host

    print(json.dumps(asdict(open_device(name, host()))))


def _host() -> Iterator[Line]:
    memory, error = call_guarded(host_memory)
    if error is None:
        yield Line("host memory", "ok", _in_gib(memory))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.sysconf("SC_NPROCESSORS_ONLN")
    threads, explicit = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    setting = f"= {explicit}" if explicit else "is not set"
    detail = f"torch uses {threads} of {cores} cores; OMP_NUM_THREADS {setting}"
    if threads > cores:
        yield Line("host threads", "warn", f"{detail}: they wait for each other", f"set OMP_NUM_THREADS={cores}")
    elif cores <= _SMALL_HOST_CORES and threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        # A two-thread GEMV beside a busy core was measured at 7.1 ms with spinning threads and at 0.5 ms without.
        remedy = "set OMP_WAIT_POLICY=passive where other work runs beside it"
        yield Line("host threads", "ok", f"{detail}; idle threads spin", remedy)
    else:
        yield Line("host threads", "ok", detail)


def _in_gib(memory: Memory) -> str:
    return f"{memory.free_bytes / 2**30:.1f} GiB free of {memory.total_bytes / 2**30:.1f}"
