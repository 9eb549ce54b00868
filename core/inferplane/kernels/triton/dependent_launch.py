"""Launches that begin before the launch in front of them has ended (programmatic dependent launch).

Such a program is set up while the previous launch still runs, and waits for its results itself. Devices of compute
capability 9.0 and later support it. `Tiles.ahead` and `Products.ahead` turn it on; they are off, since what it gains
was not measured yet.

Two rules hold for each such kernel:

1. It reads and writes nothing before it has waited: the previous launch may still write what it reads, counters too,
   and read what it writes. Matrix products only prefetch their weights until then (`prefetch_l2`), which has no meaning
   in memory's order, so it is right whichever launch wrote them last.
2. It lets the next launch begin after it has waited, never before. So whenever a launch begins, all launches but its
   predecessor have ended, and waiting for that one is enough, however far back the launch was that wrote its inputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def _find_builtin(name: str) -> Any:
    """A function of `tl.extra`, in whichever device's module this Triton has it; None if it has none."""
    modules = vars(tl.extra).values() if hasattr(tl, "extra") else ()
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


gdc_wait, gdc_launch_dependents = _find_builtin("gdc_wait"), _find_builtin("gdc_launch_dependents")


@triton.jit
def wait_for_previous(AHEAD: tl.constexpr):
    """With AHEAD, wait until the previous launch has ended and all that it wrote can be read."""
    if AHEAD:
        gdc_wait()


@triton.jit
def allow_next(AHEAD: tl.constexpr):
    """With AHEAD, let the next launch be set up once all programs have come here or ended. Call `wait_for_previous`
    before.
    """
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers, bytes):
    """Start to bring `bytes` behind each pointer into the L2 cache, without waiting for them. The range is widened to
    multiples of 16 bytes, which stays within what was allocated.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [pointers.to(tl.int64) & -16, (bytes + 15) // 16 * 16], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_then_allow_next(AHEAD: tl.constexpr):
    """A kernel's first statement: with AHEAD, wait for the previous launch, then let the next one be set up, which will
    wait for the end of this one.
    """
    wait_for_previous(AHEAD)
    allow_next(AHEAD)


def is_dependent(view: Any) -> bool:
    """Whether a view's kernel is to be launched before the launch in front has ended: `ahead` of its tile sizes."""
    return bool(getattr(getattr(view, "prepared", None), "ahead", False))


def launch_options(ahead: bool) -> dict[str, Any]:
    """Keyword arguments to add to a launch, empty unless `ahead`: devices' compilers that do not support dependent
    launches reject the option.
    """
    return {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}
