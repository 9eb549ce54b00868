"""Distributions on disk, made up for a test: modules and a `*.dist-info` beside them, found as pip's are."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

from inferplane import plugins
from inferplane.plugins import PluginHost, Quarantined

HEAD = """
from inferplane.plugin import Backend, DeviceState, Features, Kernel, Kernels, Presence, Probe, hookimpl
INFERPLANE_API = (1, 0)
"""


def backend(
    device: str, *, probe: str = 'Probe(Presence.AVAILABLE, "made of thin air", devices=2)', more: str = "pass"
) -> str:
    """Source of a class `Fake_<device>`; `probe` is the body of its probe as an expression, `more` a statement."""
    return f"""
class Fake_{device.replace(":", "_").replace("-", "_")}(Backend):
    name = {device!r}
    torch_device = "meta"
    {more}
    @classmethod
    def probe(cls):
        return {probe}
    def open(self):
        raise AssertionError("nobody asked for it to be opened")
    def kernels(self):
        return []
"""


def serving(*devices: str, **options: str) -> str:
    """Source of a sound plugin that serves these devices."""
    classes = "".join(backend(device, **options) for device in devices)
    lines = "\n".join(f"    register({d!r}, Fake_{d.replace(':', '_').replace('-', '_')})" for d in devices)
    return f"{HEAD}{classes}\n@hookimpl\ndef inferplane_register_backends(register):\n{lines}\n"


class Wheels:
    """A folder on sys.path where fake distributions are installed.

    It always holds an in-tree distribution, `inferplane 9.9`, that serves the device "homely"; standing first, it hides
    the real one, so that tests see no real backend.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.install("inferplane", "9.9", {"homely": "fake_homely"}, fake_homely=serving("homely"))

    def install(self, distribution: str, version: str, entry_points: dict[str, str], **modules: str) -> None:
        """Install a distribution with entry points (name -> value) and modules (name -> source)."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        points = "\n".join(f"{name} = {value}" for name, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[inferplane.plugins]\n{points}\n")
        (info / "top_level.txt").write_text("\n".join(modules))
        for name, source in modules.items():
            self.module(name, source)

    def module(self, name: str, source: str) -> None:
        """Put a module there, or another in its place, that no distribution need name."""
        sys.modules.pop(name, None)
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))

    def discover(self, spec: str | None = None) -> PluginHost:
        """A host of what is installed now."""
        importlib.invalidate_caches()
        return plugins.discover(spec)

    def forget(self) -> None:
        """Take the modules of this folder out of `sys.modules`."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]


def names(host: PluginHost) -> list[str]:
    return [entry.name for entry in host.devices()]


def only_record(host: PluginHost) -> Quarantined:
    records = host.list_quarantined()
    assert len(records) == 1, [str(record) for record in records]
    return records[0]
