"""How many damaged checkpoints there are by name, each of which is refused within bounds (`hostile.refused`)."""

from __future__ import annotations

import time

import pytest

from inferplane.errors import CheckpointError
from tests.unit.models.reading import test_hostile_config as config
from tests.unit.models.reading import test_hostile_index as index
from tests.unit.models.reading import test_hostile_safetensors as safetensors
from tests.unit.support.hostile import MOST_BYTES, MOST_S, refused


def test_there_are_enough():
    assert len({repr(case) for case in safetensors.CASES.values()}) >= 40
    assert len({repr(t) for t in (*index.TEXTS.values(), *index.FILES.values())}) + len(index.MISFITS) >= 30
    configs = {repr(case) for table in (config.FILES, config.ENTRIES, config.ENDS) for case in table.values()}
    assert len(configs) >= 20 and len({repr(t) for t in config.TOKENIZERS.values()}) >= 10
    assert MOST_BYTES <= 64 * 2**20 and MOST_S <= 1


def test_a_costly_refusal_is_noticed():
    """The bounds themselves: a call that takes more memory or time than one may."""

    def greedy() -> None:
        taken = b"x" * (MOST_BYTES + 2**24)
        raise CheckpointError(f"{len(taken)}.", remedy="take less")

    def slow() -> None:
        began = time.process_time()
        while time.process_time() - began <= MOST_S:
            pass
        raise CheckpointError("Slow.", remedy="be quick")

    with pytest.raises(AssertionError, match="MiB"):
        refused(greedy)
    with pytest.raises(AssertionError, match=" s"):
        refused(slow)
