"""Programs that count each other in, run in every order that memory allows: what the last one may read is all there.

The steps are taken from PTX (`steps`), so what is explored is what was emitted. Memory is as weak as PTX has it: a
thread may miss any store that it does not know of. What it knows of (its view) grows by its own steps, by an acquire of
what another thread released in a scope that holds both, and at a barrier of its own program. Atomics are done one at a
time; nothing else has an order between threads. A barrier of some of a program's warps stands for one of all: where
warps have tasks of their own, those that store and count have it.

Source: the PTX ISA, memory consistency model: causality order, release and acquire patterns, barriers; views as in
Kang et al., "A promising semantics for relaxed-memory concurrency" (POPL 2017), without promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from tests.gates.compile.ptx import BARRIERS, instructions, is_arrival, shared_memory

STORE, BARRIER, TOLD, RESET, LOAD = "store", "barrier", "told", "reset", "load"
"""Of a thread: storing its share of the part, a barrier, reading whether the program is the last, the counter's zero,
reading all parts.
"""
COUNTER = -1
View = frozenset[tuple[int, int] | int]


def steps(ptx: str) -> tuple[str, ...]:
    """From the last store of a part to the first load of all parts; the atomic stands for itself, by its name.

    Raises:
        ValueError: there is not one atomic on memory that other programs see.
    """
    names = instructions(ptx)
    at = [i for i, name in enumerate(names) if is_arrival(name)]
    if len(at) != 1:
        raise ValueError(f"{len(at)} arrivals")
    found: list[str] = []
    for name in reversed(names[: at[0]]):
        if name in BARRIERS:
            found.insert(0, BARRIER)
        elif shared_memory(name) and name.startswith("st."):
            found.insert(0, STORE)
            break
    found.append(names[at[0]])
    told = False
    for name in names[at[0] + 1 :]:
        if name in BARRIERS:
            found.append(BARRIER)
        elif shared_memory(name) and name.startswith(("st.", "ld.", "cp.")):
            found += [] if told else [TOLD]
            told = True
            found.append(RESET if name.startswith("st.") else LOAD)
            if found[-1] == LOAD:
                break
    return tuple(x for i, x in enumerate(found) if i == 0 or x != found[i - 1])


@dataclass(frozen=True)
class State:
    """Between two steps.

    Args:
        at: of each thread, its next step.
        views: of each thread, the stores it knows of: `(program, thread)` a part's share, a program's number its flag.
        released: what the counter's latest value brings to whoever acquires it.
        count: the counter.
        last: the program that came last, or None.
    """

    at: tuple[int, ...]
    views: tuple[View, ...]
    released: View = frozenset()
    count: int = 0
    last: int | None = None


@cache
def faults(protocol: tuple[str, ...], programs: int = 3, threads: int = 2) -> frozenset[str]:
    """What can go wrong, in any order of the threads' steps."""
    everyone = programs * threads
    start = State((0,) * everyone, (frozenset(),) * everyone)
    seen, left, wrong = {start}, [start], set()
    while left:
        state = left.pop()
        after = list(_next(state, protocol, programs, threads, wrong))
        if not after:
            wrong |= _unfinished(state, protocol)
        left += [s for s in after if s not in seen]
        seen.update(after)
    return frozenset(wrong)


def _unfinished(state: State, protocol: tuple[str, ...]) -> set[str]:
    if any(at < len(protocol) for at in state.at):
        return {"programs wait for each other for ever"}
    found = set()
    if state.last is None:
        found.add("no program is the last")
    if state.count:
        found.add("the counter is not left as zero")
    return found


def _next(state: State, protocol: tuple[str, ...], programs: int, threads: int, wrong: set[str]) -> Iterator[State]:
    for me, at in enumerate(state.at):
        if at == len(protocol):
            continue
        program, thread = divmod(me, threads)
        mates = range(program * threads, (program + 1) * threads)
        step, view = protocol[at], state.views[me]
        moved = replace(state, at=_with(state.at, me, at + 1))
        if step == BARRIER:
            if me != mates[0] or any(state.at[i] != at for i in mates):
                continue  # the first thread moves all, when all have come
            known = frozenset().union(*(state.views[i] for i in mates))
            here = [i in mates for i in range(len(state.at))]
            yield replace(
                state,
                at=tuple(at + 1 if own else a for a, own in zip(state.at, here)),
                views=tuple(known if own else v for v, own in zip(state.views, here)),
            )
        elif step == STORE:
            yield replace(moved, views=_with(state.views, me, view | {(program, thread)}))
        elif step == TOLD:
            if program not in view:
                wrong.add("a thread may not know yet whether its program is the last")
            goes_on = state.last == program
            yield moved if goes_on else replace(moved, at=_with(state.at, me, len(protocol)))
        elif step == LOAD:
            if any((p, t) not in view for p in range(programs) for t in range(threads)):
                wrong.add("the last program may read what was there before a part was stored")
            yield moved
        elif thread:  # the atomic and the counter's zero are the first thread's
            yield moved
        elif step == RESET:
            yield replace(moved, count=0)
        else:
            yield _counted(moved, step.split("."), me, program, programs)


def _counted(state: State, atomic: list[str], me: int, program: int, programs: int) -> State:
    wide = "gpu" in atomic or "sys" in atomic
    view, brought = state.views[me], state.released
    if wide and not {"acquire", "acq_rel"}.isdisjoint(atomic):
        view |= brought
    if wide and not {"release", "acq_rel"}.isdisjoint(atomic):
        brought |= view  # an atomic goes on with what those before it released
    last = program if state.count == programs - 1 else state.last
    return replace(
        state,
        views=_with(state.views, me, view | {program}),  # the flag is in the program's own memory
        released=brought,
        count=state.count + 1,
        last=last,
    )


def _with(values: tuple, place: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:place], value, *values[place + 1 :])
