"""What is done about the collector while libraries are imported."""

from __future__ import annotations

import gc
import sys

import pytest

from inferplane.engine.clients.process.memory import importing


@pytest.fixture(autouse=True)
def _as_it_was():
    was = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was else gc.disable)()


def test_nobody_looks_for_garbage_while_importing_nor_among_it_later(monkeypatch):
    gc.enable()
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        monkeypatch.setitem(sys.modules, "imported_now", made)
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_what_was_there_can_be_collected_when_nothing_was_imported():
    before = gc.get_freeze_count()
    with importing():
        pass
    assert gc.get_freeze_count() == before


def test_the_collector_is_left_as_it_was():
    gc.enable()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
