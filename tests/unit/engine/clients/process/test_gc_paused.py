"""What is done about the collector while libraries are imported."""

from __future__ import annotations

import gc
import sys

import pytest

from inferplane.engine.clients.process.memory import gc_paused


@pytest.fixture(autouse=True)
def _as_it_was():
    was = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was else gc.disable)()


def test_nobody_looks_for_garbage_while_importing_nor_among_it_later(monkeypatch):
    gc.enable()
    before = gc.get_freeze_count()
    with gc_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        monkeypatch.setitem(sys.modules, "imported_now", made)
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_what_was_there_can_be_collected_when_nothing_was_imported():
    before = gc.get_freeze_count()
    with gc_paused():
        pass
    assert gc.get_freeze_count() == before


def test_the_collector_is_left_as_it_was():
    gc.enable()
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
