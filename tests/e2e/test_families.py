"""The first config of each newer family against transformers; `make test-families` has the others, and more of each."""

from __future__ import annotations

import pytest

from tests.families.cases import CASES
from tests.families.parity import compare_prompts, compare_ragged, pair_of


@pytest.mark.parametrize("family", CASES)
def test_first_config(family, tmp_path):
    """Prompts as a whole, and ragged steps."""
    with pair_of(family, next(iter(CASES[family])), tmp_path) as (model, llm):
        compare_prompts(model, llm, (101, 1), 1000)
        compare_ragged(model, llm, (1, 9, 16, 33, 60))
