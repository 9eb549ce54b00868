"""How long a sequence may be in a small cache, with a window and without."""

import pytest

from inferplane.engine.room import Room
from inferplane.errors import CapacityError


@pytest.mark.parametrize(
    ("blocks", "window", "want"),
    [(10, None, 100), (6, None, 96), (1, None, 16), (6, 30, 100), (4, 30, 100), (3, 30, 48), (1, 500, 16)],
)
def test_what_the_cache_allows(blocks, window, want):
    room = Room(blocks, 16, 1000, 9999, window)
    assert room.longest(100, asked=False) == want
    if want == 100:
        assert room.longest(100, asked=True) == 100
    else:
        with pytest.raises(
            CapacityError, match=r"max_model_len = 100 needs \d+ KV blocks of 1000 bytes.*9999 bytes for"
        ):
            room.longest(100, asked=True)


def test_no_block_at_all():
    with pytest.raises(CapacityError, match="One KV block takes 1000 bytes; the cache may take 999"):
        Room(0, 16, 1000, 999, None).longest(100, asked=False)
