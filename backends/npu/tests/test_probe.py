"""How Ascend NPUs are recognised, on machines made of files and a stand-in for torch_npu. No NPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.binding import PlanSettings, bind, explain
from inferplane.conformance.configs import TINY, model
from inferplane.kernels import probes
from inferplane.plugin import DeviceError, Feature, Features, KVRequest, Presence
from inferplane_npu import backend, plugin
from inferplane_npu.backend import OPERATORS, NpuBackend, arch_of, features_of
from tests.vendors.configs import FAMILIES
from tests.vendors.configs import model as build_model
from tests.vendors.probes import OutsideDeviceTests, forget_packages, install

REAL_RUNTIME = NpuBackend.runtime


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder that stands for the root of a machine with torch 2.13 and nothing of Ascend's."""
    for name in ("dev", "site", "lib"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(backend, "DEVICE_NODES", str(tmp_path / "dev/davinci[0-9]*"))
    monkeypatch.setattr(backend, "TOOLKIT_FOLDERS", (str(tmp_path / "Ascend/ascend-toolkit/latest"),))
    monkeypatch.setattr(backend, "LOADER_CACHE", str(tmp_path / "ld.so.cache"))
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    for variable in (*backend.TOOLKIT_VARIABLES, backend.VISIBLE, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    forget_packages(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def install_torch_npu(machine):
    """torch-npu as pip leaves it; importing it fails, as it does without CANN."""
    error = "raise ImportError('libhccl.so: cannot open shared object')"
    install(machine / "site", "torch_npu", "2.13.0.post1", distribution="torch-npu", code=error)


@pytest.fixture
def npus(machine, monkeypatch):
    """The same with torch-npu, CANN on the loader's path and two NPUs; returns the stand-in, which notes calls."""
    install_torch_npu(machine)
    (machine / "Ascend/ascend-toolkit/latest").mkdir(parents=True)
    (machine / "lib/libascendcl.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{machine / 'lib'}")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (machine / "dev" / name).touch()
    done = []
    npu = SimpleNamespace(
        done=done,
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda index: "Ascend910B3",
        mem_get_info=lambda index: (60, 64),
        set_device=done.append,
        synchronize=lambda index: done.append("synchronize"),
    )
    monkeypatch.setattr(NpuBackend, "runtime", lambda self: npu)
    monkeypatch.setattr(NpuBackend, "touch", lambda self: done.append(self.torch_device_indexed))
    return npu


class TestNpu(OutsideDeviceTests):
    backend, plugin, registered = NpuBackend, plugin, ["npu"]
    package, device, remedies = "torch_npu", ("an NPU", "NPU"), ["pip install 'torch-npu==2.13.*'", "CANN"]
    versions = {"torch": "2.13.0+cpu", "torch-npu": "2.13.0.post1"}
    nodes, no_node = ["dev/davinci0", "dev/davinci1"], ("no NPU is", "/dev/davinci_manager")
    opened, memory = ("npu:1", "Ascend910B3", "910b"), (64, 60)
    called, variables = "npu:2", ["ASCEND_RT_VISIBLE_DEVICES"]
    look, absent, collectives = "npu-smi info", "torch_npu is not installed", "hccl"
    import_error, rival, runtime = r"libhccl\.so", "torch_gcu", REAL_RUNTIME
    before = (
        "from inferplane_npu import backend as module; module.DEVICE_NODES = SITE + '/node'\n"
        "open(SITE + '/libascendcl.so', 'w').close()"
    )
    after = "assert probe.available, probe"

    @pytest.fixture
    def done(self, npus):
        return npus.done


def test_versions_that_differ_are_broken_with_both_ways_out(npus, machine):
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rename(machine / "site/torch_npu-2.10.0.post4.dist-info")
    (machine / "site/torch_npu-2.10.0.post4.dist-info/METADATA").write_text("Name: torch-npu\nVersion: 2.10.0.post4\n")
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert probe.reason == "torch-npu 2.10.0.post4 is made for torch 2.10, this is torch 2.13.0+cpu"
    assert "pip install 'torch-npu==2.13.*'" in probe.remedy
    assert "'torch==2.10.*'" in probe.remedy
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in probe.remedy


@pytest.mark.parametrize("version", ["2.13rc1", "2.13.0rc2"])
def test_a_candidate_for_a_release_fits_the_release(npus, machine, version):
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rename(machine / f"site/torch_npu-{version}.dist-info")
    (machine / f"site/torch_npu-{version}.dist-info/METADATA").write_text(f"Name: torch-npu\nVersion: {version}\n")
    assert NpuBackend.probe().presence is Presence.AVAILABLE


def test_without_cann_it_is_broken_and_the_autoload_trap_is_named(machine):
    install_torch_npu(machine)
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert "torch-npu 2.13.0.post1 is installed, but CANN is not" in probe.reason
    assert "ASCEND_HOME_PATH" in probe.reason
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in probe.remedy


@pytest.mark.parametrize("named", [True, False])
def test_cann_whose_environment_is_not_set(machine, monkeypatch, named):
    install_torch_npu(machine)
    toolkit = machine / ("elsewhere/cann" if named else "Ascend/ascend-toolkit/latest")
    toolkit.mkdir(parents=True)
    (toolkit.parent / "set_env.sh").touch()
    if named:
        monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(toolkit))
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert str(toolkit) in probe.reason
    assert f"source {toolkit.parent / 'set_env.sh'}" in probe.remedy


def test_a_cann_that_is_too_old_is_broken_with_both_versions(npus, machine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0+cpu")
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rename(machine / "site/torch_npu-2.9.0.post3.dist-info")
    (machine / "site/torch_npu-2.9.0.post3.dist-info/METADATA").write_text("Name: torch-npu\nVersion: 2.9.0.post3\n")
    toolkit = machine / "Ascend/ascend-toolkit/latest"
    (toolkit / "x86_64-linux").mkdir()
    info = toolkit / "x86_64-linux/ascend_toolkit_install.info"
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100R001C23\n")
    probe = NpuBackend.probe()
    assert probe.presence is Presence.BROKEN
    assert probe.reason == "torch-npu 2.9.0.post3 is made for CANN 9.1.0, here is CANN 8.3.RC1"
    assert probe.versions["CANN"] == "8.3.RC1"
    for newer in ("9.1.0", "9.2.RC1", "10.0.0"):
        info.write_text(f"version={newer}\n")
        assert NpuBackend.probe().presence is Presence.AVAILABLE, newer
    for older in ("9.1.RC2", "9.0.0", "8.5"):
        info.write_text(f"version={older}\n")
        assert NpuBackend.probe().presence is Presence.BROKEN, older


def test_cann_known_to_the_loaders_cache(npus, machine, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert NpuBackend.probe().presence is Presence.BROKEN
    (machine / "ld.so.cache").write_bytes(b"\0libascendcl.so\0/usr/local/Ascend/lib64/libascendcl.so\0")
    assert NpuBackend.probe().presence is Presence.AVAILABLE


def test_a_build_without_metadata_is_not_called_mismatched(npus, machine, monkeypatch):
    (machine / "site/torch_npu-2.13.0.post1.dist-info/METADATA").unlink()
    (machine / "site/torch_npu-2.13.0.post1.dist-info").rmdir()
    monkeypatch.setattr(probes, "version_of", lambda distribution: None)
    probe = NpuBackend.probe()
    assert probe.presence is Presence.AVAILABLE
    assert "version unknown" in probe.reason


def test_open_on_a_broken_installation_gives_the_probes_reason(machine):
    install_torch_npu(machine)
    with pytest.raises(DeviceError, match="CANN is not") as caught:
        NpuBackend().open()
    assert caught.value.remedy == NpuBackend.probe().remedy


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Ascend910B1", "910b"),
        ("Ascend910B4-1", "910b"),
        ("Ascend910_9391", "910_93"),
        ("Ascend910_9589", "950"),
        ("Ascend950PR_9599", "950"),
        ("Ascend310P3", "310p"),
        ("Ascend910ProA", "910proa"),
    ],
)
def test_series_of_a_name(name, arch):
    assert arch_of(name) == arch


def test_assumed_architectures():
    assert list(NpuBackend.architectures) == ["910b", "910_93", "310p", "950"]
    assert [arch for arch, names in NpuBackend.architectures.items() if "fp8" in names] == ["950"]
    assert [arch for arch, names in NpuBackend.architectures.items() if "bf16" not in names] == ["310p"]
    assert "float16" in features_of("310p")["bf16"].reason
    assert features_of("950")["sinks"].present is None, "what no source says is unknown"
    assert dict(NpuBackend().features()) == dict(features_of("910b"))
    assert not features_of("910proa"), "a series of another generation is unknown in everything"


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (KVRequest("gqa", 8, 128, 128), ["npu_nd_128", "npu_nz_128", "npu_nd_128_int8", "paged_128_int8"]),
        (KVRequest("gqa", 3, 33, 33), ["npu_nd_128", "paged_128_int8"]),
        (
            KVRequest("mla", 1, 576),
            ["npu_latent_nd_128", "npu_latent_nz_128", "paged_128_int8", "npu_latent_tiles_128_int8"],
        ),
        (KVRequest("mla", 1, 96), ["paged_128", "paged_128_int8"]),
        (KVRequest("index_keys", 1, 128), ["npu_index_nd_128", "paged_128_int8", "npu_index_nd_128_int8"]),
        (KVRequest("index_keys", 1, 64), ["paged_128", "paged_128_int8"]),
    ],
    ids=["gqa", "gqa_odd", "mla", "mla_small", "index", "index_small"],
)
def test_blocks_of_128_tokens_for_every_kind_of_layer(request_, names):
    layouts = NpuBackend().kv_layouts(request_, torch.bfloat16)
    assert [layout.name for layout in layouts] == names
    assert {layout.block_tokens for layout in layouts} == {128}
    assert [layout.kv_dtype for layout in layouts] == ["int8" if "int8" in name else "auto" for name in names]


@pytest.mark.parametrize(
    ("arch", "layout", "kernel", "refused"),
    [
        ("910b", "npu_nd_128", "torch_npu:attention_ragged", "feature 'nz-cache' is absent"),
        ("310p", "npu_nz_128", "atb:attention_nz", "feature 'fused-infer' is absent"),
    ],
)
def test_the_series_decides_between_nd_and_nz(arch, layout, kernel, refused):
    """Kernels and layouts are chosen together, from the series' features alone, and the losers say why."""
    config = {**TINY["llama"], "head_dim": 128, "hidden_size": 128}
    backend = NpuBackend()
    settings = PlanSettings("npu", torch.float16, arch, backend.features(arch), assumed=True)
    tree = model(config)
    plan = bind(tree, backend.kernels(), settings, lambda r: backend.kv_layouts(r, torch.float16)[:-1])
    assert {found.name for found in plan.layouts.values()} == {layout}
    sites = [s for s in explain(plan)["sites"] if s["op"] == "attention"]
    assert {s["chosen"]["kernel"] for s in sites} == {kernel}
    assert any(refused in r["reason"] for s in sites for r in s["rejected"])


def test_atb_needs_nnal(npus, machine):
    """CANN alone has no libatb.so; what is found on the machine goes before what is assumed of the series."""
    found = NpuBackend().open().features
    assert found["atb"].present is False
    assert "libatb.so of NNAL" in found["atb"].reason
    (machine / "lib/libatb.so").touch()
    assert NpuBackend().open().features["atb"].present


def test_operators_that_an_older_torch_npu_lacks(npus, monkeypatch):
    """What is installed goes before what the series can do; the operators of no feature count as they are."""
    names = {name for names in OPERATORS.values() for name in names} - {"npu_rotate_quant", "npu_mhc_pre"}
    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(**dict.fromkeys(names)))
    found = NpuBackend().open().features
    assert found["sparse-attention"].present and found["mla-prolog"].present
    assert found["rotate-quant-int8"] == Feature(False, "the installed torch-npu has no npu_rotate_quant")
    assert found["hyper-connections"].reason == features_of("910b")["hyper-connections"].reason, (
        "the series' own reason"
    )
    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace())
    found = NpuBackend().open().features
    assert "no npu_lightning_indexer and no npu_sparse_flash_attention" in found["sparse-attention"].reason
    assert not any(found[name].present for name in OPERATORS)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_without_its_operators_is_composed(family):
    backend, config = NpuBackend(), FAMILIES[family]
    older = {**backend.features("910b"), "sparse-attention": Feature(False, "the installed torch-npu is older")}
    for features, provider in ((backend.features("910b"), "torch_npu"), (Features(older), "torch_sdpa")):
        settings = PlanSettings("npu", torch.bfloat16, "910b", features, assumed=True)
        layouts = lambda r: [x for x in backend.kv_layouts(r, torch.bfloat16) if x.kv_dtype == "auto"]  # noqa: E731
        plan = bind(build_model(config), backend.kernels(), settings, layouts, strict=True)
        sites = [s for s in explain(plan)["sites"] if s["op"] == "sparse_mla_absorbed"]
        assert {s["chosen"]["kernel"] for s in sites} == {f"{provider}:sparse_mla_absorbed"}
        said = [r["reason"] for s in sites for r in s["rejected"]]
        assert any("the installed torch-npu is older" in reason for reason in said) == (provider == "torch_sdpa")
