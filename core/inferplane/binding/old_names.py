"""Names of providers and kernels that have changed: pins and lock files that use the old ones work for one minor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from inferplane.renamed import warn_of_old_name
from inferplane.types import Kernel

ENDINGS = {"_fixed": "_batch_invariant"}
"""Old ending of a provider's or a kernel's name -> the present one."""


def current_kernel_names(chosen: Mapping[str, str], kernels: Iterable[Kernel]) -> dict[str, str]:
    """Pins, or choices of a lock file, with old names of providers and kernels replaced; each is a DeprecationWarning.

    Args:
        chosen: site, op or signature -> name of a provider or a kernel.
        kernels: the device's kernels. A name that one of them has is left alone.
    """
    known = {name for kernel in kernels for name in (kernel.provider, kernel.name)}
    named: dict[str, str] = {}
    for what, name in chosen.items():
        new = ":".join(_replace_old(part) for part in name.split(":"))
        if name in known or new not in known:
            new = name
        if new != name:
            warn_of_old_name(name, new, stacklevel=4)
        named[what] = new
    return named


def _replace_old(part: str) -> str:
    for old, new in ENDINGS.items():
        if part.endswith(old):
            return part.removesuffix(old) + new
    return part
