"""Every pair of base and prediction layers in the source system's tables, on 2 and 4 ranks in place of 8 and 16."""

from __future__ import annotations

import pytest

from tests.e2e.base_and_mtp import PAIRS, check_pair, make_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("pairs"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_are_those_of_plain_decoding(pair, ranks, folders, tmp_path, record_property):
    """Acceptance is in the report that `--junitxml` writes."""
    record_property("acceptance", check_pair(folders, pair, ranks, tmp_path / "out"))
