"""Attack a server for some minutes with clients that misbehave in every way at once, and judge how others fare.

    python -m tests.serving.attack.run                      # ten minutes; also `make test-attack`
    python -m tests.serving.attack.run --seconds 60 --seed 7
    python -m tests.serving.attack.run --only load          # valid requests alone: what sharing a busy engine costs
    python -m tests.serving.attack.run --server-cpus 1      # attackers do not take the server's processor away
    python -m tests.serving.attack.run --http-workers 2     # two processes serve; growth is the first one's

Clients of all kinds (`kinds.py`) come in random order, 40 at a time, in rounds; between rounds they are quiet, so that
a well-behaved client's 99th percentile is compared with its own in the same minutes. After each quiet time a process of
the attackers' priority uses as much of a processor as they did and sends nothing (`control.py`): what others' times are
beside it is what a shared processor costs, and no bar. The exit code is 1 when a bar is missed. Bars are times, so the
machine should have nothing else to do: the report says how late a process wakes that only sleeps, and how long the
server was ready to run and had no processor.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from tests.serving.attack.attackers import KEYS, PAUSE_S, Attackers, start_server, target_of
from tests.serving.attack.control import BusyProcess
from tests.serving.attack.generation import make_constraint
from tests.serving.attack.probes import (
    Bystander,
    GoodClient,
    HealthProber,
    Probe,
    Repeated,
    p99,
    processor_wait_s,
    resident_bytes,
)
from tests.serving.attack.target import COMPLETIONS, Target
from tests.serving.live import Live
from tests.serving.test_watchdog import ACCEPTED, ENDED, family

MB = 2**20
ATTACK_S, QUIET_S, CONTROL_S, WARM_UP_S = 40.0, 12.0, 12.0, 80.0
"""Seconds of a round, of the quiet after it, of the control after that, and of the attack after which memory is looked
at first. Lag is measured after it, too, so that no start-up is in it."""
LAG_MEMORY_S = 10.0
"""Health states the worst lag of a time before it that is at most so long."""
CONSTRAINTS, CONSTRAINTS_AT_ONCE = 200, 6
MOST_WAIT = 0.1
"""Share of time without a processor beyond which the report says that the machine had other work."""


class Bar(NamedTuple):
    """A figure and its bound."""

    name: str
    value: float
    most: float
    unit: str

    def __str__(self) -> str:
        verdict = "" if self.value <= self.most else "   MISSED"
        return f"{self.name:52}{self.value:9.3f} {self.unit:3} (bar {self.most:g}){verdict}"


def between(streams: list[Any], windows: list[tuple[float, float]]) -> list[float]:
    """Seconds of the requests that ran inside of one of the windows."""
    return [s.whole_s for s in streams if any(a <= s.started and s.started + s.whole_s <= b for a, b in windows)]


def worst_lag(probes: list[Probe], windows: list[tuple[float, float]]) -> float:
    """The longest lag in seconds that lay inside of one of the windows for certain; 0 if there was no probe for it."""
    inside = (p.loop_lag_s for p in probes if any(a + LAG_MEMORY_S <= p.at <= b for a, b in windows))
    return max(inside, default=0.0)


def ask_with_constraints(server: Live, target: Target, seed: int) -> tuple[float, float]:
    """Send `CONSTRAINTS` different constraints; MB by which the engine's memory grew at most, and at rest after it."""
    server_at_rest(server)
    before, most = resident_bytes(server)["all"], [0]

    def look() -> None:
        most[0] = max(most[0], resident_bytes(server)["all"])

    def ask(i: int) -> int:
        return target.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 12, **make_constraint(Random(seed * 1000 + i))})

    with Repeated(look, 0.05), ThreadPoolExecutor(CONSTRAINTS_AT_ONCE) as pool:
        statuses = Counter(pool.map(ask, range(CONSTRAINTS)))
    assert set(statuses) <= {200, 400}, statuses
    server_at_rest(server)
    return (most[0] - before) / MB, (resident_bytes(server)["all"] - before) / MB


def server_at_rest(server: Live) -> dict[str, float]:
    """The numbers of the server once nothing runs and freed memory is given back."""
    server.at_rest()
    time.sleep(3)
    return server.at_rest()


@dataclass
class Measured:
    """What a run measures; times in seconds, sizes in bytes.

    Args:
        rounds: begin and end of each round of the attack.
        quiet: begin and end of each quiet time.
        control: begin and end of each time beside a busy process that sends nothing.
        shares: of one processor, which the attackers used in each round, and the busy process after it.
        waits: shares of the rounds in which the server was ready to run and had no processor.
        late_s: by how much a process that only sleeps woke too late at most.
        start: resident memory before the first round.
        end: after the last one.
    """

    rounds: list[tuple[float, float]] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)
    control: list[tuple[float, float]] = field(default_factory=list)
    shares: list[tuple[float, float]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    late_s: float = 0.0
    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)


def attack_in_rounds(
    server: Live, attackers: Attackers, busy: BusyProcess, probes: HealthProber, found: Measured, count: int
) -> None:
    """Attack so many times with a quiet time and a control after each, and print what each round found."""
    pid = server.process.pid
    for number in range(count):
        started, waited, used = time.monotonic(), processor_wait_s(pid), attackers.processor_s
        attackers.attack(ATTACK_S)
        found.rounds.append((started, started + ATTACK_S))
        took = time.monotonic() - started
        found.waits.append((processor_wait_s(pid) - waited) / took)
        share = (attackers.processor_s - used) / took
        time.sleep(1)
        quiet = time.monotonic()
        time.sleep(QUIET_S)
        found.quiet.append((quiet, time.monotonic()))
        control = time.monotonic()
        found.shares.append((share, busy.use_processor(share, CONTROL_S)))
        found.control.append((control, time.monotonic()))
        lag = max(p.loop_lag_s for p in probes.probes if p.at >= started)
        sizes = ", ".join(f"{name} {size / MB:.0f} MB" for name, size in resident_bytes(server).items())
        print(f"round {number + 1} of {count}: {len(attackers.attacks)} attacks, lag {lag:.3f} s, {sizes}", flush=True)


def run(
    seconds: float,
    seed: int,
    pause_s: float,
    only: str = "",
    server_cpus: frozenset[int] = frozenset(),
    http_workers: int = 1,
) -> tuple[list[Bar], list[str]]:
    """Attack a server; the bars, and what went wrong beside them."""
    found, cpus = Measured(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, server_cpus or cpus)
    workers = ("--http-workers", str(http_workers))
    with tempfile.TemporaryDirectory() as folder, start_server(Path(folder), *workers) as server:
        os.sched_setaffinity(0, cpus - server_cpus or cpus)  # of this thread, and of what it starts from now on
        server.use_key(KEYS["good"])
        target, good, health = target_of(server), GoodClient(server, KEYS["good"]), HealthProber(server)
        with Attackers(target, seed, pause_s, only) as attackers, Bystander() as bystander, BusyProcess() as busy:
            attackers.attack(WARM_UP_S)  # libraries are loaded and caches filled at the first of each kind
            server_at_rest(server)
            found.start = resident_bytes(server)
            bystander.worst.value = 0.0
            with Repeated(good.stream, 0.02), Repeated(health.probe, 0.1):
                count = max(round(seconds / (ATTACK_S + QUIET_S + CONTROL_S)), 1)
                attack_in_rounds(server, attackers, busy, health, found, count)
            server_at_rest(server)
            found.end, found.late_s = resident_bytes(server), bystander.worst.value
        peak, rest = ask_with_constraints(server, target, seed)
        numbers = server_at_rest(server)
        code = server.stop()
    before, meanwhile = between(good.streams, found.quiet), between(good.streams, found.rounds)
    beside = between(good.streams, found.control)
    for name, times in (("in quiet", before), ("under attack", meanwhile), ("beside a busy process", beside)):
        print(f"well-behaved client {name}: {len(times)} streams, p50 {median(times):.3f} s, p99 {p99(times):.3f} s")
    shares = [sum(share) / len(found.shares) for share in zip(*found.shares)]
    print(f"attackers used {shares[0]:.0%} of a processor, the busy process that sends nothing {shares[1]:.0%}")
    print(f"  beside it the 99th percentile's ratio is {p99(beside) / p99(before):.3f}")
    lags = [worst_lag(health.probes, windows) for windows in (found.quiet, found.control)]
    print(f"worst lag of the event loop in quiet {lags[0]:.3f} s, beside the busy process {lags[1]:.3f} s")
    wait = sum(found.waits) / len(found.waits)
    print(f"a process that only sleeps woke at most {found.late_s:.3f} s late")
    print(f"the server was ready to run and had no processor {wait:.0%} of the rounds")
    if wait > MOST_WAIT:
        print("  so the machine had other work, and these times say little")
    print(f"memory at the start: {', '.join(f'{n} {size / MB:.0f} MB' for n, size in found.start.items())}")
    statuses = Counter(s for a in attackers.attacks for s in a.statuses)
    print(f"{len(attackers.attacks)} attacks got {', '.join(f'{n} of {s}' for s, n in sorted(statuses.items()))}")
    probes, accepted, ended = health.probes, family(numbers, ACCEPTED), family(numbers, ENDED)
    print(f"{accepted:.0f} requests accepted, {ended:.0f} ended, exit code {code}")
    bars = [
        Bar("worst lag of the event loop", max(p.loop_lag_s for p in probes), 0.25, "s"),
        Bar("well-behaved client, 99th percentile, ratio", p99(meanwhile) / p99(before), 2.0, ""),
        Bar("slowest health, port of its own", max(p.own_port_s for p in probes), 0.5, "s"),
        Bar("slowest health, port that serves", max(p.main_port_s for p in probes), 0.5, "s"),
        *(growth_bar(name, found) for name in ("server", "engine")),
        Bar(f"{CONSTRAINTS} constraints, growth at rest", rest, 32, "MB"),
        Bar(f"{CONSTRAINTS} constraints, growth at most", peak, 64 * CONSTRAINTS_AT_ONCE, "MB"),
        Bar("accepted requests without an end", abs(accepted - ended), 0, ""),
    ]
    wrong = [f"{a.kind}: {a.wrong}" for a in attackers.attacks if a.wrong]
    return bars, wrong + ([f"exit code {code}"] if code else [])


def growth_bar(name: str, found: Measured) -> Bar:
    """How much a process has grown, and the smaller of 150 MB and 5 % of its start."""
    grown, most = (found.end[name] - found.start[name]) / MB, min(150, 0.05 * found.start[name] / MB)
    return Bar(f"growth of the {name}", grown, most, "MB")


def main() -> int:
    """Attack, and print what was measured; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument(
        "--pause", type=float, default=PAUSE_S, help="seconds of a client between two attacks, on average"
    )
    parser.add_argument(
        "--only", choices=("load", "attack"), default="", help="kinds that send valid requests, or the others"
    )
    parser.add_argument(
        "--server-cpus", type=int, nargs="+", default=[], help="processors of the server alone; clients take the others"
    )
    parser.add_argument("--http-workers", type=int, default=1, help="processes that serve HTTP")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    bars, wrong = run(args.seconds, args.seed, args.pause, args.only, frozenset(args.server_cpus), args.http_workers)
    for bar in bars:
        print(bar)
    for line, count in Counter(wrong).most_common(20):
        print(f"WRONG ({count} times): {line}")
    passed = not wrong and all(bar.value <= bar.most for bar in bars)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
