"""Huawei Ascend NPUs: torch's "npu" device, which the package torch_npu registers as PrivateUse1.

torch_npu is made for one minor version of torch and for CANN, and breaks plain `import torch` where CANN is missing:
torch loads it by itself unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. So the probe reads the package's metadata and looks for
CANN's files, and only `open()` imports it. A probe that says AVAILABLE is not enough: stub libraries can make torch_npu
count devices that are not there, which is why `open()` allocates.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from inferplane.kernels.probes import probe_package
from inferplane.plugin import (
    Accelerator,
    Batch,
    DeviceState,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Probe,
    minor_of,
)
from inferplane_npu.chips import OPERATORS, SERIES, arch_of, features_of
from inferplane_npu.graphs import UpdatableGraph
from inferplane_npu.kernels import kernels
from inferplane_npu.layouts import layouts
from inferplane_npu.versions import cann_version, mismatch

MODULE, DISTRIBUTION = "torch_npu", "torch-npu"
OTHER_PRIVATEUSE1 = ("torch_gcu",)
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DEVICE_NODES = "/dev/davinci[0-9]*"
TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
TOOLKIT_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann", "/usr/local/Ascend/latest")
RUNTIME_LIBRARY, ATB_LIBRARY = "libascendcl.so", "libatb.so"
LOADER_CACHE = "/etc/ld.so.cache"

INSTALL_CANN = "install CANN (https://www.hiascend.com/cann) and source its set_env.sh before starting Python"
AUTOLOAD = "until then TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps plain `import torch` working"
PASS_NODES = (
    "install the Ascend driver; in a container, pass /dev/davinci0 (and so on), /dev/davinci_manager, /dev/devmm_svm "
    "and /dev/hisi_hdc"
)


class NpuBackend(Accelerator):
    """One Ascend NPU."""

    name = "npu"
    torch_device = "npu"
    architectures: ClassVar[dict[str, tuple[str, ...]]] = {
        arch: tuple(name for name, feature in features_of(arch).items() if feature.present) for arch in SERIES
    }

    def runtime(self) -> Any:
        """The vendor's counterpart of `torch.cuda`; the first call imports the package."""
        return importlib.import_module(MODULE).npu

    @classmethod
    def probe(cls) -> Probe:
        """From package metadata, CANN's files and device nodes; torch_npu is not imported."""
        install = f"pip install '{DISTRIBUTION}=={minor_of(torch.__version__)}.*' for this torch, and {INSTALL_CANN}"
        probe = probe_package(
            MODULE,
            DISTRIBUTION,
            device=("an NPU", "NPU"),
            nodes=DEVICE_NODES,
            visible=(VISIBLE,),
            install=install,
            pass_nodes=PASS_NODES,
            misfit=_misfit,
        )
        return (
            replace(probe, reason=f"{probe.reason}, CANN in {_toolkit() or 'the loader path'}")
            if probe.available
            else probe
        )

    def open(self) -> DeviceState:
        """Import torch_npu, make NPU `index` torch's current device and allocate one element on it.

        Raises:
            DeviceError: another package holds PrivateUse1, the probe did not find it available, torch_npu or CANN does
                not start, or there is no such NPU.
        """
        self.require_free_slot(OTHER_PRIVATEUSE1)
        look = "see what `npu-smi info` says"
        fit = "driver, CANN, torch-npu and torch must be of one release (COMPATIBILITY.md of Ascend/pytorch)"
        with self.opening("NPUs that CANN can use", (VISIBLE,), look, fit) as npu:
            name = str(npu.get_device_name(self.index))
            self.select()
            memory = self.memory()
        arch = arch_of(name)
        return DeviceState(self.torch_device_indexed, name, arch, features_here(arch), memory)

    def kernels(self) -> Sequence[Kernel]:
        """See `inferplane_npu.kernels`."""
        return kernels()

    def features(self, arch: str | None = None) -> Features:
        """Of a series, with what it lacks and why; the default is "910b"."""
        return features_of(arch or next(iter(self.architectures)))

    def kv_layouts(self, request: KVRequest, dtype: torch.dtype) -> Sequence[KVLayout]:
        """See `inferplane_npu.layouts`."""
        return layouts(request)

    def comm(self) -> str:
        """HCCL."""
        return "hccl"

    def capture(self, step: Callable[[Batch], Any], bucket: Batch) -> UpdatableGraph:
        """An NPUGraph; attention is given its lengths anew before each replay."""
        return UpdatableGraph(self.runtime(), step, bucket)


def features_here(arch: str) -> Features:
    """Features of a series on this machine: of operators, those that the installed torch_npu has; ATB's also need
    NNAL's library.
    """
    found = dict(features_of(arch))
    for name, operators in OPERATORS.items():
        missing = [operator for operator in operators if not hasattr(torch.ops.npu, operator)]
        if missing and name in found and found[name].present:
            found[name] = Feature(False, f"the installed {DISTRIBUTION} has no {' and no '.join(missing)}")
    if found and not _on_loader_path(ATB_LIBRARY):
        found["atb"] = Feature(False, f"{ATB_LIBRARY} of NNAL is not on the loader's path; source its set_env.sh")
    return Features(found)


def _misfit(version: str | None, versions: dict[str, str]) -> tuple[str, str] | None:
    """Reason and remedy where torch-npu is made for another torch or CANN, or CANN cannot be loaded; notes CANN's
    version.
    """
    package, here = f"{DISTRIBUTION} {versions[DISTRIBUTION]}", minor_of(torch.__version__)
    if version and minor_of(version) != here:
        reason = f"{package} is made for torch {minor_of(version)}, this is torch {torch.__version__}"
        remedy = (
            f"pip install '{DISTRIBUTION}=={here}.*' for this torch, "
            f"or 'torch=={minor_of(version)}.*' for this {DISTRIBUTION}"
        )
        return reason, f"{remedy}; {AUTOLOAD}"
    toolkit, loadable = _toolkit(), MODULE in sys.modules or _on_loader_path(RUNTIME_LIBRARY)
    if toolkit is None and not loadable:
        looked = f"looked for {', '.join((*TOOLKIT_VARIABLES, *TOOLKIT_FOLDERS))} and {RUNTIME_LIBRARY}"
        return f"{package} is installed, but CANN is not ({looked})", f"{INSTALL_CANN}; {AUTOLOAD}"
    if not loadable:
        reason = f"CANN is in {toolkit}, but {RUNTIME_LIBRARY} is not on the loader's path"
        return reason, f"source {_environment_script(toolkit)} first; {AUTOLOAD}"
    if cann := cann_version(toolkit):
        versions["CANN"] = cann
    if reason := mismatch(version or "", cann):
        remedy = "install that CANN, or the torch-npu that COMPATIBILITY.md of Ascend/pytorch names for this one"
        return reason, f"{remedy}; {AUTOLOAD}"
    return None


def _toolkit() -> str | None:
    """The folder of CANN: the environment's, else one of the default folders."""
    named = [os.environ[variable] for variable in TOOLKIT_VARIABLES if os.environ.get(variable)]
    return next((folder for folder in (*named, *TOOLKIT_FOLDERS) if os.path.isdir(folder)), None)


def _environment_script(toolkit: str | None) -> str:
    folder = Path(toolkit or TOOLKIT_FOLDERS[0])
    script = next((place / "set_env.sh" for place in (folder, folder.parent) if (place / "set_env.sh").exists()), None)
    return str(script or folder.parent / "set_env.sh")


def _on_loader_path(library: str) -> bool:
    """Whether the dynamic loader would find it. `ctypes.util.find_library` would start ldconfig and gcc to tell."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if any(os.path.exists(os.path.join(folder, library)) for folder in folders):
        return True
    try:
        return library.encode() in Path(LOADER_CACHE).read_bytes()
    except OSError:
        return False
