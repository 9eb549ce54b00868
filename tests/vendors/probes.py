"""What every backend of an accelerator must do where its device is, and where it is not.

A backend's own tests derive a `Test...` class from `RecognitionTests`, or from what is below it here. They bring the
fixture `machine`, a folder that stands for the root of a machine without the device, and the fixture `done`: the same
machine with two devices that can be used, as the list of what opening one did to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from inferplane.kernels import probes
from inferplane.plugin import API_VERSION, Accelerator, Backend, DeviceError, Presence
from tests.house.rules import VENDOR_PACKAGES

LIGHT = """
import sys
import torch  # which looks for some of these packages itself
sys.path.insert(0, SITE)
import {package}.plugin
early = [m for m in sys.modules if m.startswith("{package}.") and m.endswith("backend")]
assert not early, "the plugin imports its backend"
from {module} import {name}
from inferplane.plugin import KVRequest
{before}
backend = {name}()
probe = backend.probe()
backend.kernels(), backend.features(), backend.comm(), backend.kv_layouts(KVRequest("mla", 1, 576), torch.bfloat16)
assert not set({vendors!r}) & set(sys.modules), "a vendor's package was imported"
assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized(), "a device was started"
{after}
"""


def install(site: Path, module: str, version: str, *, distribution: str = "", code: str = "") -> None:
    """Install a package into a folder of packages, with its metadata; importing it runs `code`."""
    (site / module).mkdir()
    (site / module / "__init__.py").write_text(code)
    info = site / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution or module}\nVersion: {version}\n")


def forget_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no vendor's package be imported already."""
    for package in VENDOR_PACKAGES:
        monkeypatch.delitem(sys.modules, package, raising=False)


class RecognitionTests:
    """For every backend."""

    backend: type[Accelerator]
    plugin: ModuleType
    registered: Sequence[str]
    """Names that the plugin registers."""
    versions: dict[str, str]
    """What the probe reports where the device is."""
    count: int | None = 2
    """How many devices the probe counts there."""
    nodes: Sequence[str] = ()
    """Device nodes below `machine`, without which the device is absent."""
    no_node: tuple[str, str] = ("", "")
    """What the probe's reason and remedy then say."""
    opened: tuple[str, str, str]
    """torch's name, the device's own name and the architecture of the second device."""
    fp8: bool | None = False
    memory: tuple[int, int]
    """Bytes in all and free."""
    imported: Sequence[Any] = ()
    """What opening does before it selects the device."""
    called: str
    """What the error calls the third device: "acme:2"."""
    variables: Sequence[str]
    """Of the environment, by each of which devices are hidden."""
    look: str
    """Where a user is told to look when opening fails."""
    absent: str
    """The probe's reason on a machine without the device."""
    collectives: str
    before = after = ""
    """Statements around the check of what is imported."""

    def test_it_registers_what_it_can_import(self):
        found: dict[str, str] = {}
        self.plugin.inferplane_register_backends(found.__setitem__)
        assert list(found) == list(self.registered) and self.plugin.INFERPLANE_API == API_VERSION
        for name, target in found.items():
            module, _, attribute = target.partition(":")
            backend = getattr(import_module(module), attribute)
            assert issubclass(backend, Backend) and backend.name == name

    def test_this_machine_is_explained(self):
        probe = self.backend.probe()
        assert probe.reason and (probe.available or probe.remedy)
        assert probe.versions["torch"] == torch.__version__
        if not probe.available:
            with pytest.raises(DeviceError) as caught:
                self.backend().open()
            assert caught.value.remedy == probe.remedy

    def test_the_probe_is_cheap(self):
        def once() -> float:
            start = time.perf_counter()
            self.backend.probe()
            return time.perf_counter() - start

        assert min(once() for _ in range(5)) < 0.1

    def test_available(self, done):
        before = set(sys.modules)
        probe = self.backend.probe()
        assert probe.presence is Presence.AVAILABLE and not probe.remedy
        assert (probe.versions, probe.devices) == (self.versions, self.count)
        assert not (set(sys.modules) - before) & VENDOR_PACKAGES

    def test_no_device_nodes(self, done, machine):
        for node in self.nodes:
            (machine / node).unlink()
        probe = self.backend.probe()
        assert probe.presence is Presence.ABSENT
        assert self.no_node[0] in probe.reason and self.no_node[1] in probe.remedy

    def test_opening_describes_the_device(self, done):
        state = self.backend(1).open()
        assert (state.torch_device, state.name, state.arch) == self.opened
        assert state.features["bf16"].present and state.features["fp8"].present is self.fp8
        assert (state.memory.total_bytes, state.memory.free_bytes) == self.memory
        expected = [*self.imported, 1, self.opened[0], "synchronize"]
        assert done == expected, "current device set, one allocation, waited for"

    def test_opening_when_the_allocation_fails(self, done, monkeypatch):
        """Stub libraries answer every question and can do nothing."""

        def fail(self):
            raise RuntimeError("no kernel image\n  at line 1")

        monkeypatch.setattr(self.backend, "touch", fail)
        with pytest.raises(DeviceError, match="RuntimeError: no kernel image at line 1") as caught:
            self.backend().open()
        assert self.look in caught.value.remedy

    @pytest.mark.parametrize("value", ["0,1", None], ids=["chosen", "all"])
    def test_opening_an_index_that_is_too_high(self, done, monkeypatch, value):
        if value:
            monkeypatch.setenv(self.variables[0], value)
        with pytest.raises(DeviceError, match=f"{self.called} was requested") as caught:
            self.backend(2).open()
        assert f"{self.variables[0]}={value or 'not set'}" in caught.value.there_is

    def test_opening_an_absent_device_gives_the_probes_reason(self, machine):
        with pytest.raises(DeviceError, match=self.absent) as caught:
            self.backend().open()
        assert caught.value.remedy == self.backend.probe().remedy

    def test_every_declared_kernel_exists(self):
        kernels = self.backend().kernels()
        assert kernels and all(callable(kernel.function()) for kernel in kernels)

    def test_collectives(self):
        assert self.backend().comm() == self.collectives

    def test_nothing_of_a_vendor_is_imported(self, tmp_path):
        """Each vendor's package is there, with metadata, and fails when imported."""
        for vendor in VENDOR_PACKAGES:
            code = f"raise SystemExit('{vendor} was imported')"
            install(tmp_path, vendor, torch.__version__, code=code)
        (tmp_path / "node").touch()
        words = {"module": self.backend.__module__, "name": self.backend.__name__}
        words |= {"package": self.backend.__module__.partition(".")[0], "vendors": tuple(VENDOR_PACKAGES)}
        code = LIGHT.format(before=self.before, after=self.after, **words).replace("SITE", repr(str(tmp_path)))
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


class PackageTests(RecognitionTests):
    """For a backend whose device is added to torch by a vendor's package; importing it in `machine` fails."""

    package: str
    device: tuple[str, str]
    """What one device is called, with its article and without."""
    remedies: Sequence[str]
    """What the remedy says where the package is missing."""
    import_error: str
    """What importing the package says."""

    def restore_import(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let opening import the package that `machine` has."""
        raise NotImplementedError

    def test_nothing_installed(self, machine, monkeypatch):
        monkeypatch.setattr(probes, "is_installed", lambda module: False)
        probe = self.backend.probe()
        assert probe.presence is Presence.ABSENT
        assert f"{self.package} is not installed, and no {self.device[1]} is visible" in probe.reason
        assert all(words in probe.remedy for words in self.remedies)
        (machine / self.nodes[0]).touch()
        assert f"{self.device[0]} is there" in self.backend.probe().reason

    def test_chosen_devices_are_counted_by_the_runtime_alone(self, done, monkeypatch):
        for variable in self.variables:
            with monkeypatch.context() as patch:
                patch.setenv(variable, "1")
                assert self.backend.probe().devices is None

    def test_opening_when_the_import_fails(self, done, monkeypatch):
        self.restore_import(monkeypatch)
        with pytest.raises(DeviceError, match=f"ImportError: {self.import_error}") as caught:
            self.backend().open()
        assert self.look in caught.value.remedy


class OutsideDeviceTests(PackageTests):
    """For a device that torch knows as PrivateUse1, of which it has one in a process."""

    rival: str
    """Another package that takes that place."""
    runtime = staticmethod(Accelerator.runtime)
    """The backend's own, which imports its package."""

    def restore_import(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.backend, "runtime", self.runtime)

    def test_opening_beside_another_package_of_the_kind(self, done, monkeypatch):
        monkeypatch.setitem(sys.modules, self.rival, ModuleType(self.rival))
        with pytest.raises(DeviceError, match=f"'{self.rival}' occupies it in this process") as caught:
            self.backend().open()
        assert "another process" in caught.value.remedy and not done

    def test_opening_beside_an_unknown_package_of_the_kind(self, done, monkeypatch):
        monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "openreg")
        with pytest.raises(DeviceError, match="'openreg' occupies it in this process"):
            self.backend().open()
