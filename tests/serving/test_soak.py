"""A short soak for CI; `python -m tests.serving.soak 5000` runs longer and also measures memory."""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.serving.live import Live
from tests.serving.soak import ARGS, CANCELLED, INVALID, Soak, at_rest, growth

COUNT = 150


def test_every_request_ends_once_and_nothing_is_kept():
    with Live(*ARGS) as server:
        soak = Soak(server)
        asyncio.run(soak.send(COUNT))
        first = at_rest(server)
        asyncio.run(soak.send(COUNT))
        second = at_rest(server)
        stats = server.at_rest()
        assert server.stop() == 0
    tally = soak.tally
    assert not tally.odd, tally.odd[:5]
    assert sum(tally.ends.values()) == 2 * COUNT
    assert tally.ends["left"] > CANCELLED * COUNT and tally.ends["refused"] > INVALID * COUNT
    told = Counter(e["request_id"] for e in server.log if e["event"] == "request")
    assert all(told[name] == 1 for name in tally.sent)
    ended = sum(n for name, n in stats.items() if name.startswith("inferplane:request_success_total"))
    assert stats["inferplane:requests_accepted_total"] == ended
    for name, holds in first.items():
        assert second[name].threads == holds.threads, name
        assert second[name].descriptors == holds.descriptors, name


def test_a_slope_is_one():
    assert growth([(0, 5), (1000, 15), (2000, 25)]) == 10
    assert growth([(0, 7), (500, 7), (1000, 7)]) == 0
