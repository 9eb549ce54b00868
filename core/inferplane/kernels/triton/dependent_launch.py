"""Launches that begin before the one in front of them has ended (programmatic dependent launch).

Such a program is set up while the launch before still runs, and waits for its results itself. Devices of compute
capability 9.0 and later have it. It is asked for by `Tiles.ahead` and `Products.ahead`, which are off: what it gains
was not measured yet.

Two rules hold for each such kernel. It reads and writes nothing before it has waited: what was launched before may
still write what it reads, counters too, and read what it writes. Matrix products only ask for their weights to come
nearer until then (`fetch`), which has no meaning in memory's order, so it is right whoever wrote them last. And it lets
the next one begin after it has waited, never before: whoever begins finds all but its predecessor ended, so waiting for
that one is enough, however far back the launch was that wrote what it reads.
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
def wait(AHEAD: tl.constexpr):
    """With AHEAD, wait until what was launched before has ended and all that it wrote is there."""
    if AHEAD:
        gdc_wait()


@triton.jit
def let_next(AHEAD: tl.constexpr):
    """With AHEAD, let the next launch be set up, once all programs have come here or ended; after `wait`."""
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def fetch(pointers, bytes):
    """Ask for `bytes` behind each pointer to be brought into the L2 cache, and go on. From one multiple of 16 bytes to
    another, which stays within what was allocated.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [pointers.to(tl.int64) & -16, (bytes + 15) // 16 * 16], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def begin(AHEAD: tl.constexpr):
    """A kernel's first statement: with AHEAD, wait for what was launched before, then let the next one be set up. That
    one waits for this one's end, whatever it was told here.
    """
    wait(AHEAD)
    let_next(AHEAD)


def asked(p: Any) -> bool:
    """Whether a view's kernel is to be launched so, as its `prepared` says."""
    return bool(getattr(getattr(p, "prepared", None), "ahead", False))


def how(ahead: bool) -> dict[str, Any]:
    """Arguments of a launch; nothing that other devices' compilers do not know where it is not asked for."""
    return {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}
