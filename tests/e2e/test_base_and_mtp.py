"""Base and prediction layers in formats of their own: tokens are those of plain decoding, on one rank and on several.

All pairs on 1, 2 and 4 ranks: tests/families/test_base_and_mtp_on_ranks.py.
"""

from __future__ import annotations

import pytest

from tests.e2e.base_and_mtp import PAIRS, check_pair, make_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize(("pair", "ranks"), [*((pair, 1) for pair in PAIRS), ("int4 x int8", 2), ("fp8 x fp8", 2)])
def test_tokens_are_those_of_plain_decoding(pair, ranks, folders, tmp_path):
    check_pair(folders, pair, ranks, tmp_path / "out")
