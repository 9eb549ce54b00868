"""What PTX says of memory's order, by which two protocols stand: launches ahead, and programs that count each other in.

Instructions are taken in the order of the text, in which both are straight lines: nothing branches before a wait, and
an arrival's barriers lie right before and behind its atomic.

Source: the PTX ISA, `griddepcontrol`, `atom`, and the memory consistency model's causality order.
"""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:[.:]+\w+)*)", re.M)
DIRECT, COPIES = ("ld.", "st.", "atom.", "red."), ("cp.",)
OWN = (".param", ".shared", ".local", ".const")
"""Memory that no other program sees; copies mostly have it on one of their sides."""
NO_COPY = (".prefetch.", "commit_group", "wait_group", "async.mbarrier")
"""What only asks for memory to come nearer, and what says of copies where they are."""
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
BARRIERS = ("bar.sync", "barrier.sync", "barrier.cta.sync")


def instructions(ptx: str) -> list[str]:
    """Of the entry function, in order, without what guards them."""
    return INSTRUCTION.findall(ptx[ptx.index(".entry") :])


def shared_memory(name: str) -> bool:
    """Whether it reads or writes what other programs or launches may write or read."""
    if name.startswith(DIRECT):
        return not any(word in name for word in OWN)
    return name.startswith(COPIES) and not any(word in name for word in NO_COPY)


def ahead(ptx: str) -> list[str]:
    """What is wrong with a launch ahead, a line each; nothing of a kernel that never waits nor lets others begin."""
    names = instructions(ptx)
    if WAIT not in names:
        return [f"{NEXT} without {WAIT}"] if NEXT in names else []
    before = names[: names.index(WAIT)]
    wrong = [f"{name} before {WAIT}" for name in before if shared_memory(name) or name in ("bra", "ret", NEXT)]
    if re.search(rf"@!?%\w+\s+{re.escape(WAIT)}", ptx):
        wrong.append(f"{WAIT} is not for all threads")
    return wrong if NEXT in names else [*wrong, f"{WAIT} without {NEXT}"]


def is_arrival(name: str) -> bool:
    return name.startswith(("atom.", "red.")) and not any(word in name for word in OWN)


def arrivals(ptx: str) -> int:
    """Atomics on memory that other programs see."""
    return sum(map(is_arrival, instructions(ptx)))


def uncounted(ptx: str) -> list[str]:
    """What is wrong with how programs are counted in, a line each. An atomic releases what its thread has seen, and
    acquires what others released, on the whole device; barriers before and behind it make that the whole program's.
    """
    names, wrong = instructions(ptx), []
    for i, name in enumerate(names):
        if not is_arrival(name):
            continue
        if not {"acq_rel", "gpu", "global"} <= set(name.split(".")):
            wrong.append(f"{name}, must be acq_rel on the gpu")
        before = [x for x in names[:i] if x in BARRIERS or (shared_memory(x) and x.startswith("st."))]
        if before and before[-1] not in BARRIERS:
            wrong.append(f"no barrier between {before[-1]} and {name}")
        behind = [x for x in names[i + 1 :] if x in BARRIERS or (shared_memory(x) and x.startswith(("ld.", "cp.")))]
        if behind and behind[0] not in BARRIERS:
            wrong.append(f"no barrier between {name} and {behind[0]}")
    return wrong
