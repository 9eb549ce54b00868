"""What is computed once for a batch, a cache or a view."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferplane.binding.link import View
from inferplane.types.batch import Query, make_batch


def test_it_is_computed_once_and_a_changed_copy_starts_anew():
    batch = make_batch([Query((1, 2), 0, (0,))], block_tokens=4, device="cpu")
    made = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [batch.once("tests.a", make), batch.once("tests.a", make), batch.once("tests.b", make)] == [0, 0, 1]
    assert replace(batch, ids=batch.ids + 1).once("tests.a", make) == 2
    assert batch.once("tests.a", make) == 0


def test_none_is_a_result_and_an_error_is_not_kept():
    view, calls = View(), []
    assert view.once("tests.none", lambda: calls.append(1)) is None
    assert view.once("tests.none", lambda: calls.append(1)) is None
    assert calls == [1]
    with pytest.raises(ZeroDivisionError):
        view.once("tests.error", lambda: 1 // 0)
    assert view.once("tests.error", lambda: 5) == 5
