"""Plugins seen from fresh processes: what is imported, what a whole machine full of broken plugins does."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import inferplane.plugin
from inferplane import plugins
from inferplane.errors import UsageError
from inferplane.plugins import discovery
from tests.unit.support.fake_wheels import HEAD, Wheels, backend, serving

CORE = Path(inferplane.plugin.__file__).parents[1]


def run(code: str, folder: Path, listed: str | None = None) -> dict:
    """What `code` puts into `out`, run in a process that sees core and `folder`."""
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join((str(folder), str(CORE))), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    environment.pop("INFERPLANE_PLUGINS", None)
    if listed is not None:
        environment["INFERPLANE_PLUGINS"] = listed
    code = f"import json, sys\nout = {{}}\n{code}\nprint('OUT ' + json.dumps(out))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,  # not the checkout: an egg-info there would be found before the wheels under test
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("OUT ")[2])


def test_every_broken_plugin_at_once(tmp_path):
    wheels = Wheels(tmp_path)
    sources = {
        "atimport": "raise RuntimeError('no driver')",
        "exits": "import sys\nsys.exit(127)",
        "major": serving("major").replace("(1, 0)", "(2, 0)"),
        "taken": serving("homely"),
        "probing": serving("probing", probe="1 / 0"),
        "noapi": serving("noapi").replace("INFERPLANE_API", "API"),
        "hook": serving("hook") + "@hookimpl\ndef inferplane_nonsense(register): pass",
        "parameter": serving("parameter").replace("(register)", "(registry)"),
        "garbage": HEAD + "@hookimpl\ndef inferplane_register_backends(register):\n    register('garbage', 42)",
        "sound": serving("sound", "fam:one"),
    }
    for i, (name, source) in enumerate(sources.items()):
        wheels.install(f"acme-{name}", f"1.{i}", {name: f"fake_{name}"})
        wheels.module(f"fake_{name}", source)
    told = run(
        """
from inferplane import plugins
from inferplane.errors import InferplaneError
host = plugins.host()
out["devices"] = {entry.name: entry.probe.presence.value for entry in host.devices()}
out["quarantined"] = {r.distribution: [r.version, r.stage, r.reason] for r in host.list_quarantined()}
out["made"] = [host.backend(device).name for device in ("homely", "sound", "fam", "auto")]
out["asked"] = {}
for name in ("atimport", "exits", "major", "probing", "noapi", "hook", "parameter", "garbage"):
    try:
        host.backend(name)
    except InferplaneError as error:
        out["asked"][name] = str(error)
out["same"] = plugins.host() is host
""",
        tmp_path,
        "-fam:none",
    )
    assert told["devices"] == {"fam:one": "available", "homely": "available", "probing": "broken", "sound": "available"}
    assert told["made"][:3] == ["homely", "sound", "fam:one"]
    assert told["made"][3] == "homely"
    assert told["same"]
    stages = {name: record[1] for name, record in told["quarantined"].items()}
    assert stages == {
        "acme-atimport": "import",
        "acme-exits": "import",
        "acme-major": "api-version",
        "acme-taken": "claim",
        "acme-probing": "probe",
        "acme-noapi": "validate",
        "acme-hook": "validate",
        "acme-parameter": "validate",
        "acme-garbage": "validate",
    }
    for i, name in enumerate(sources):
        if name in told["asked"]:
            version, _, reason = told["quarantined"][f"acme-{name}"]
            assert version == f"1.{i}"
            assert f"acme-{name} 1.{i}" in told["asked"][name]
            assert reason in told["asked"][name]
    assert set(told["asked"]) == set(sources) - {"taken", "sound"}


def test_the_authors_door_is_light(tmp_path):
    code = "import torch\nbefore = set(sys.modules)\nimport inferplane.plugin\n"
    told = run(code + "out['new'] = sorted(set(sys.modules) - before)", tmp_path)
    ours = "inferplane.(binding|cli|engine|kernels|models|ops|quant|serving)"
    heavy = re.compile(rf"(transformers|tokenizers|triton|safetensors|torch\.\w+|{ours})(\.|$)")
    assert [module for module in told["new"] if heavy.match(module)] == []
    assert "inferplane.plugin" in told["new"]


def test_a_host_imports_plugins_but_no_backend(tmp_path):
    wheels = Wheels(tmp_path)
    lazy = (
        HEAD + "@hookimpl\ndef inferplane_register_backends(register):\n    register('lazy', 'fake_later:Fake_lazy')\n"
    )
    wheels.install("acme", "1", {"lazy": "fake_lazy"}, fake_lazy=lazy)
    wheels.module("fake_later", HEAD + backend("lazy"))
    told = run(
        """
import os
before = dict(os.environ)
from inferplane import plugins
host = plugins.host()
out["plugin"], out["early"] = "fake_lazy" in sys.modules, "fake_later" in sys.modules
host.backend("homely")
out["other"] = "fake_later" in sys.modules
out["chosen"] = host.backend("lazy").name
out["environment"] = dict(os.environ) == before
""",
        tmp_path,
    )
    assert told == {"plugin": True, "early": False, "other": False, "chosen": "lazy", "environment": True}


def test_listed_modules_of_this_repository_are_in_tree(tmp_path, monkeypatch):
    assert (CORE.parent / "backends").samefile(discovery._SOURCE_TREE)
    tree = tmp_path / "tree"
    package = tree / "backends" / "toy" / "inferplane_toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(serving("toy"))
    (tmp_path / "outside.py").write_text(serving("toy", "other"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(discovery, "_SOURCE_TREE", tree / "backends")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    host = plugins.discover("only,outside,inferplane_toy.plugin")
    other, toy = host.devices()
    assert (toy.name, toy.distribution, toy.in_tree) == ("toy", "inferplane", True)
    assert (other.name, other.distribution, other.in_tree) == ("other", "outside", False)
    assert [(record.stage, record.distribution) for record in host.list_quarantined()] == [("claim", "outside")]


def test_host_reads_the_environment_once(wheels, monkeypatch):
    plugins.host.cache_clear()
    try:
        monkeypatch.setenv("INFERPLANE_PLUGINS", "no good")
        with pytest.raises(UsageError, match="no good"):
            plugins.host()
        monkeypatch.setenv("INFERPLANE_PLUGINS", "only")
        host = plugins.host()
        assert host.devices() == []
        monkeypatch.setenv("INFERPLANE_PLUGINS", "")
        assert plugins.host() is host
    finally:
        plugins.host.cache_clear()


def test_entry_points_can_be_handed_in(wheels):
    from importlib.metadata import EntryPoint

    wheels.module("fake_toy", serving("toy"))
    host = plugins.discover(None, [EntryPoint("toy", "fake_toy", "inferplane.plugins")])
    assert [(entry.name, entry.distribution, entry.version) for entry in host.devices()] == [
        ("toy", "fake_toy", "(not installed)")
    ]


def test_facts_cross_processes(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=serving("bad", probe="1 / 0"))
    host = wheels.discover()
    facts = (host.devices(), host.plugins(), host.list_quarantined())
    assert pickle.loads(pickle.dumps(facts)) == facts


# -- the promise to authors


def test_the_documented_plugin_works(wheels):
    example = inspect.cleandoc(inferplane.plugin.__doc__)
    block = re.search(r"^    from inferplane\.plugin import.*?(?=^\S)", example, re.DOTALL | re.MULTILINE)
    wheels.module("fake_documented", inspect.cleandoc(block[0]))
    host = wheels.discover("only,fake_documented")
    assert not host.list_quarantined()
    backend = host.backend("toy")
    assert backend.open().torch_device == backend.torch_device
    assert [kernel.name for kernel in host.kernels("toy")] == ["toy:rms_norm"]


def test_all_that_is_promised_is_there_and_sorted():
    promised = inferplane.plugin.__all__
    assert all(hasattr(inferplane.plugin, name) for name in promised)
    public = {name for name, value in vars(inferplane.plugin).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert set(promised) == public
    kinds = [(not name.isupper(), name[0].islower(), name) for name in promised]
    assert kinds == sorted(kinds, key=lambda kind: (kind[0], kind[1], kind[2]))
    assert inferplane.plugin.API_VERSION == plugins.API_VERSION == (1, 1)
