"""Every kind of misbehaving client once, many at a time: each is refused or answered, and others are served meanwhile.

The times that this is about are judged by `make test-attack`, on a machine that has nothing else to do.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.serving.attack.attackers import KEYS, attack_once, kinds_of, shuffled_kinds, start_server, target_of
from tests.serving.attack.control import BusyProcess, processor_s
from tests.serving.attack.kinds import KINDS, Kind
from tests.serving.attack.probes import GoodClient, HealthProber, Probe, Repeated, Streamed, resident_bytes
from tests.serving.attack.run import Bar, between, worst_lag
from tests.serving.attack.target import Target
from tests.serving.test_watchdog import all_ended, family

SEED, AT_ONCE, HOLD_S = 30, 24, 0.5
LAG_S = 5.0
"""No measure of the server: a bound for a machine that runs other tests. Health says "stalled" beyond it."""
MOST_GROWTH_BYTES = 300 * 2**20
"""As `max_held_bytes` allows for bodies, and some for libraries that are loaded at the first request of a kind."""


def test_every_kind_is_refused_or_answered_and_delays_none(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        server.use_key(KEYS["good"])
        target, good, health = target_of(server, HOLD_S), GoodClient(server, KEYS["good"]), HealthProber(server)
        good.stream()
        before = resident_bytes(server)
        kinds = list(zip(shuffled_kinds(Random(SEED)), range(len(KINDS))))
        with Repeated(good.stream, 0.05), Repeated(health.probe, 0.2), ThreadPoolExecutor(AT_ONCE) as pool:
            attacks = list(pool.map(lambda k: attack_once(k[0], target, Random(SEED + k[1])), kinds))
        numbers = all_ended(server)
        after = resident_bytes(server)
        assert server.stop() == 0
    assert {a.kind for a in attacks} == {kind.name for kind in KINDS}
    assert not [a for a in attacks if a.wrong], "\n".join(f"{a.kind}: {a.wrong}" for a in attacks if a.wrong)
    assert not [e for e in server.log if e["level"] in ("error", "critical")]
    assert "Traceback" not in server.text
    statuses = Counter(s for a in attacks for s in a.statuses)
    refused = numbers['inferplane:requests_rejected_total{reason="invalid_api_key"}']
    assert statuses[401] and refused >= statuses[401]
    finished = family(numbers, "inferplane:request_success_total")
    assert numbers["inferplane:requests_accepted_total"] == finished > len(good.streams) > 1
    assert max(p.loop_lag_s for p in health.probes) < LAG_S
    growth = {name: after[name] - before[name] for name in ("server", "engine")}
    assert max(growth.values()) < MOST_GROWTH_BYTES, growth


def test_kinds_are_many_and_each_names_its_class_of_advisories() -> None:
    assert len(KINDS) >= 40
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(re.match(r"CWE-\d+: \w", kind.advisory) for kind in KINDS)
    assert not [kind.name for kind in KINDS if kind.allowed & set(range(500, 600)) - {503}]
    load, attack = kinds_of("load"), kinds_of("attack")
    assert len(load) + len(attack) == len(kinds_of("")) and all(kind.is_load for kind in load)
    assert load and attack and not set(load) & set(attack)


def test_order_is_random_and_repeated_by_its_seed() -> None:
    def names(seed: int) -> list[str]:
        deck = shuffled_kinds(Random(seed))
        return [next(deck).name for _ in range(2 * len(KINDS))]

    assert names(1) == names(1) != names(2)
    assert set(Counter(names(1)).values()) == {2}


def _answer_with_a_fault(target: Target, draw: Random) -> list[int]:
    return [200, 500]


def _never_answer(target: Target, draw: Random) -> list[int]:
    return [-1]


def _raise(target: Target, draw: Random) -> list[int]:
    raise ConnectionRefusedError("the server is not there")


@pytest.mark.parametrize(
    ("run", "words"), [(_answer_with_a_fault, "500"), (_never_answer, "-1"), (_raise, "not there")]
)
def test_wrong_answers_are_found(run, words: str) -> None:
    found = attack_once(Kind("CWE-0: none", run), Target("localhost", 1, 1, "x", 0), Random(1))
    assert words in found.wrong


def test_bars_and_windows() -> None:
    assert "MISSED" in str(Bar("lag", 0.3, 0.25, "s")) and "MISSED" not in str(Bar("lag", 0.25, 0.25, "s"))
    streams = [Streamed(started, 0.1, 1.0) for started in (0.0, 4.5, 9.5, 20.0)]
    assert between(streams, [(0, 5), (9, 11)]) == [1.0, 1.0]


def test_lag_belongs_to_a_window_only_if_no_earlier_time_is_in_it() -> None:
    probes = [Probe(at, 0.1, 0.1, lag) for at, lag in ((5.0, 3.0), (9.0, 2.0), (10.5, 0.1), (12.0, 0.2), (12.5, 4.0))]
    assert worst_lag(probes, [(0, 12)]) == 0.2
    assert worst_lag(probes, [(3, 12)]) == 0.0


def test_a_busy_process_uses_its_share_of_a_processor() -> None:
    with BusyProcess() as busy:
        assert busy.use_processor(0.0, 0.5) < 0.1
        assert 0.0 < busy.use_processor(0.5, 2.0) < 0.7
    assert processor_s(os.getpid()) > 0.0 == processor_s(2**30)


def test_a_probe_that_fails_is_raised() -> None:
    called = threading.Event()

    def fail() -> None:
        called.set()
        raise AssertionError("on purpose")

    with pytest.raises(AssertionError, match="on purpose"), Repeated(fail, 0):
        assert called.wait(30)
