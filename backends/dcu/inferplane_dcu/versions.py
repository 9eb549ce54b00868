"""Which of Hygon's wheels belong together.

A DAS wheel says in its local version what it is built for: `0.6.0+das.dtk2604.torch2110` is for DTK 26.04 and torch
2.11.0, and torch itself is `2.11.0+das.opt1.dtk2604`. Wheels of two releases install beside each other and then crash
when they are imported, so pairs are compared before anything is.
"""

from __future__ import annotations

import re
from pathlib import Path

from inferplane.plugin import minor_of, version_of

PACKAGES = ("flash_attn", "flash_mla", "lightop", "lmslim", "vllm_hcu", "triton", "flagtree")
"""Distributions whose functions the kernels call, or that compile them."""

TOOLKIT = "/opt/dtk/.info/rocm_version"
"""Holds the version of the toolkit, "26.04" or "25.04.4"."""

_DTK = re.compile(r"\bdtk(\d{4})")
_TORCH = re.compile(r"\btorch(\d{3,4})\b")


def read_installed() -> dict[str, str]:
    """Versions of the vendor's packages that are installed, by distribution."""
    found = {name: version_of(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def dtk_of(version: str) -> str | None:
    """Year and month of the DTK that a wheel is built for, "26.04"; None where its version does not say."""
    match = _DTK.search(version)
    return f"{match[1][:2]}.{match[1][2:]}" if match else None


def torch_of(version: str) -> str | None:
    """Minor version of the torch that a wheel is built for, "2.11"; None where its version does not say."""
    match = _TORCH.search(version)
    return f"{match[1][0]}.{match[1][1:-1]}" if match else None


def toolkit() -> str | None:
    """Year and month of the DTK that is installed, "26.04"; None where it is not readable."""
    try:
        text = Path(TOOLKIT).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b(\d{2})\.(\d{2})\b", text)
    return f"{match[1]}.{match[2]}" if match else None


def misfits(torch_version: str, packages: dict[str, str]) -> list[str]:
    """What does not belong together, a sentence each with both versions; empty when everything that says does.

    Args:
        torch_version: `torch.__version__`.
        packages: as `read_installed` gives them.
    """
    out = []
    minor = minor_of(torch_version)
    dtk, here = dtk_of(torch_version), toolkit()
    if dtk and here and dtk != here:
        out.append(f"torch {torch_version} is built for DTK {dtk}, the toolkit here is DTK {here}")
    for name, version in packages.items():
        required, built = torch_of(version), dtk_of(version)
        if required and required != minor:
            out.append(f"{name} {version} is built for torch {required}, this is torch {torch_version}")
        elif built and dtk and built != dtk:
            out.append(f"{name} {version} is built for DTK {built}, torch {torch_version} for DTK {dtk}")
    return out
