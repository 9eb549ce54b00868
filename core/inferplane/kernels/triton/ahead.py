"""Launches that begin before the one in front of them has ended (programmatic dependent launch).

Such a program is set up while the launch before still runs, and waits for its results itself. Devices of compute
capability 9.0 and later have it. It is asked for by `Tiles.ahead` and `Products.ahead`, which are off: what it gains
was not measured yet.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _extra(name: str) -> Any:
    """A function that Triton has for one kind of device, whichever module it lies in; None: this Triton has none."""
    modules = vars(tl.extra).values() if hasattr(tl, "extra") else ()
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


gdc_wait, gdc_launch_dependents = _extra("gdc_wait"), _extra("gdc_launch_dependents")


@triton.jit
def begin(AHEAD: tl.constexpr):
    """A kernel's first statement: with AHEAD, wait for what was launched before, then let the next one be set up. That
    one waits for this one's end, whatever it was told here.
    """
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()


def asked(p: Any) -> bool:
    """Whether a view's kernel is to be launched so, as its `prepared` says."""
    return bool(getattr(getattr(p, "prepared", None), "ahead", False))


def how(ahead: bool) -> dict[str, Any]:
    """Arguments of a launch; nothing that other devices' compilers do not know where it is not asked for."""
    return {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}
