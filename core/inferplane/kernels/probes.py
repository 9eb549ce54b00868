"""The probe of a device that a vendor's package adds to torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from glob import glob

import torch

from inferplane.plugin import Presence, Probe, is_installed, version_of


def probe_package(
    module: str,
    distribution: str,
    *,
    device: tuple[str, str],
    nodes: str,
    visible: Sequence[str],
    install: str,
    pass_nodes: str,
    misfit: Callable[[str | None, dict[str, str]], tuple[str, str] | None],
) -> Probe:
    """Look for a vendor's package, what it needs and its devices, by metadata and files; the package is not imported.

    Args:
        module, distribution: the package's names when it is imported and when it is installed.
        device: what one device is called, with its article and without: ("a card", "card").
        nodes: pattern of the device nodes, of which each device has one.
        visible: variables of the environment by which a user hides devices; the runtime alone can count what is left.
        install: remedy where the package is missing.
        pass_nodes: remedy where no device node is there.
        misfit: is given the package's version, None where it is unknown, and the versions that the probe reports, to
            which it may add; returns a reason and a remedy where the package cannot run here, else None.
    """
    versions = {"torch": str(torch.__version__)}
    found, (one, noun) = len(glob(nodes)), device
    if not is_installed(module):
        seen = f"; {one} is there" if found else f", and no {noun} is visible"
        return Probe(Presence.ABSENT, f"{module} is not installed{seen}", install, versions)
    version = version_of(distribution)
    versions[distribution] = version or "(version unknown)"
    package = f"{distribution} {versions[distribution]}"
    if broken := misfit(version, versions):
        return Probe(Presence.BROKEN, *broken, versions)
    if not found:
        return Probe(Presence.ABSENT, f"{package} is here, but no {noun} is: no {nodes}", pass_nodes, versions)
    chosen = any(variable in os.environ for variable in visible)
    reason = f"torch {versions['torch']} with {package}"
    return Probe(Presence.AVAILABLE, reason, versions=versions, devices=None if chosen else found)
