"""vllm-xpu-kernels: which torch it was made for, and its shared libraries.

Its wheel depends on no torch, but its libraries are bound to the one that they were built with; the page in its
metadata says which. The libraries are loaded, not the package imported, which would import its Python too.

Source: METADATA of the wheel 0.1.16.2; README.md and the schemas in csrc at the tags v0.1.8 to v0.1.13.1.
"""

from __future__ import annotations

import os
import re
from importlib import metadata

import torch

from inferplane.plugin import Feature, is_installed, libraries_of, load_library, minor_of, version_of

MODULE, DISTRIBUTION = "vllm_xpu_kernels", "vllm-xpu-kernels"
LIBRARIES = ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C")
OLDEST = (0, 1, 12)
"""Before it experts, scores and the question after the architecture had other schemas, or none."""
INSTALL = f"pip install {DISTRIBUTION}, the release made for this torch"


def version() -> str | None:
    """The installed release; None when there is none, or it is unknown."""
    return version_of(DISTRIBUTION)


def read_built_torch() -> str | None:
    """The torch that the installed release says it was built with ("2.14.0+xpu"); None when it does not say."""
    try:
        page = str(metadata.metadata(DISTRIBUTION))
    except metadata.PackageNotFoundError:
        return None
    found = re.search(r"\*\*PyTorch\*\*: *(\d+\.\d+\S*)", page)
    return found[1] if found else None


def misfit() -> tuple[str, str] | None:
    """Why the installed release cannot serve this torch, and what to do; None when it can, or there is none."""
    release = version()
    if release is None or not is_installed(MODULE):
        return None
    way_out = f"or pip uninstall {DISTRIBUTION}: torch's own operators then serve"
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        reason = f"{DISTRIBUTION} {release} is here, and the oldest whose operators are known is {oldest}"
        return reason, f"{INSTALL}, {way_out}"
    built = read_built_torch()
    if built and minor_of(built) != minor_of(torch.__version__):
        reason = f"{DISTRIBUTION} {release} is made for torch {built}, this is torch {torch.__version__}"
        return reason, f"install torch {minor_of(built)} for XPU; or {INSTALL}; {way_out}"
    return None


def load() -> Feature:
    """Load the libraries, which register their operators."""
    if not is_installed(MODULE):
        return Feature(False, f"{DISTRIBUTION} is not installed ({INSTALL})")
    paths = {name: libraries_of(MODULE, f"{name}.*so") for name in LIBRARIES}
    for name, found in paths.items():
        if not found:
            return Feature(False, f"{DISTRIBUTION} {version()} has no library {name}")
        if wrong := load_library(found[0]):
            return wrong
    return Feature(True, f"its operators are loaded from {os.path.dirname(paths[LIBRARIES[0]][0])}")
