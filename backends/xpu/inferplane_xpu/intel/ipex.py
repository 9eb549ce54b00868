"""intel_extension_for_pytorch, which Intel has archived: what its last releases still serve, and only those.

Its last release for GPUs is 2.10, for processors 2.8, each for torch of the same number. With another torch its import
prints an error and ends the process, so it is tried in a process of its own before it is imported into this one.

Source: its archived repository and wheel; intel/intel-extension-for-pytorch#865 for what its import does.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import torch

from inferplane.plugin import Feature, is_installed, minor_of, version_of

MODULE = "intel_extension_for_pytorch"
LAST_FOR_GPUS, LAST_FOR_PROCESSORS = "2.10", "2.8"
PATIENCE_S = 120.0
"""How long its import may take."""


def fits(last: str) -> Feature:
    """Whether the last release is here and made for this torch, by metadata: nothing is imported."""
    release = version_of(MODULE)
    if release is None:
        return Feature(False, f"{MODULE} is not installed, and archived by Intel")
    if not is_installed(MODULE):
        return Feature(False, f"{MODULE} {release} has metadata only")
    if minor_of(release) != last:
        return Feature(False, f"{MODULE} {release} is not {last}, the last release of it")
    if minor_of(torch.__version__) != last:
        return Feature(False, f"{MODULE} {release} is made for torch {last}, this is torch {torch.__version__}")
    return Feature(True, f"{MODULE} {release}, its last release")


@functools.cache
def usable(last: str) -> Feature:
    """The same, and that its import leaves a process alive; tried once."""
    found = fits(last)
    if not found.present:
        return found
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {MODULE}"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Feature(False, f"importing {MODULE} was tried in a process of its own: {type(error).__name__}")
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())[-200:]
        return Feature(False, f"importing {MODULE} ends the process with {done.returncode}: {output}")
    return found
