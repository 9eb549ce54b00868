"""A new device is a new module, anywhere: no file of core knows of it, and none changes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.e2e.suite import environment, told
from tests.house.rules import REPOSITORY

PLUGIN = """
from inferplane.plugin import HOST, Backend, DeviceState, Features, Kernels, Presence, Probe, hookimpl

INFERPLANE_API = (1, 0)
KERNELS = Kernels()
CALLS = []


@KERNELS("add_rms_norm", "brandnew", rank=90)
def fused_norm(p, x, residual):
    CALLS.append(len(x))
    s = x if residual is None else x + residual
    h = s.float()
    return (h * (h.square().mean(-1, keepdim=True) + p.norm.eps).rsqrt() * p.norm.weight.float()).to(x.dtype), s


class BrandNew(Backend):
    name, torch_device = "brandnew", HOST

    @classmethod
    def probe(cls):
        return Probe(Presence.AVAILABLE, "made in this test", devices=1)

    def open(self):
        return DeviceState(HOST, "brand new", "new1", Features(["bf16"]), self.memory())

    def kernels(self):
        return KERNELS


@hookimpl
def inferplane_register_backends(register):
    register("brandnew", BrandNew)
"""

USE = """
import json, warnings
import brandnew_plugin
from inferplane import LLM, SamplingParams
from inferplane.conformance.configs import TINY
from inferplane.plugins import host

warnings.simplefilter("ignore")
entry = next(e for e in host().devices() if e.name == "brandnew")
report = {"served_by": entry.distribution, "reason": entry.probe.reason}
for name in ("llama", "deepseek_v3"):
    llm = LLM(TINY[name], device="brandnew", load_format="dummy", kv_cache_bytes=1 << 22)
    calls = len(brandnew_plugin.CALLS)
    (result,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    kernels = {s["op"]: s["chosen"]["kernel"] for s in llm.explain()["sites"]}
    called = len(brandnew_plugin.CALLS) - calls
    report[name] = {"tokens": result.token_ids, "norm": kernels["add_rms_norm"], "calls": called, "device": llm.device}
print("REPORT " + json.dumps(report))
"""


def core_now() -> dict[str, str]:
    """Every file under core with a hash of what is in it."""
    files = [
        p for p in (REPOSITORY / "core").rglob("*") if p.is_file() and p.suffix != ".pyc" and "egg-info" not in str(p)
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_device_is_added_without_touching_core(tmp_path):
    before = core_now()
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "brandnew_plugin.py").write_text(textwrap.dedent(PLUGIN), encoding="utf-8")
    env = environment("brandnew_plugin", paths=(str(folder),))
    done = subprocess.run(
        [sys.executable, "-c", USE], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, told(done)
    report = json.loads(done.stdout.rpartition("REPORT ")[2])
    assert report["served_by"] == "brandnew_plugin" and report["reason"] == "made in this test"
    for name in ("llama", "deepseek_v3"):
        found = report[name]
        assert found["device"] == "brandnew" and len(found["tokens"]) == 4
        assert found["norm"] == "brandnew:fused_norm" and found["calls"] > 0
    after = core_now()
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    assert not changed, f"adding a device changed {changed}"
    named = [path for path in after if b"brandnew" in Path(path).read_bytes()]
    assert not named, f"core knows of the new device in {named}"
