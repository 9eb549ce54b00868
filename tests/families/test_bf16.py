"""In bfloat16 the dense and recurrent families err no more than transformers does, allowing a quarter of chance."""

from __future__ import annotations

import pytest

from tests.e2e.test_parity import BF16, bf16_errors, largest, rms
from tests.families.cases import CASES, config_of
from tests.families.dense import DENSE
from tests.families.recurrent import RECURRENT


@pytest.mark.parametrize("case", [f"{family}-{name}" for family in (*DENSE, *RECURRENT) for name in CASES[family]])
def test_bf16_error(case, tmp_path):
    """Every expert is chosen, so that an error is a rounding and not another expert."""
    config = config_of(*case.split("-", 1))
    if hasattr(config, "num_experts_per_tok"):
        config.num_experts_per_tok = getattr(config, "num_experts", 0) or config.num_local_experts
    if hasattr(config, "topk_group"):
        config.topk_group = config.n_group
    ours, theirs = bf16_errors(config, 1, tmp_path, count=8)
    assert 1e-4 < rms(theirs) < 1e-2
    assert rms(ours) <= BF16 * rms(theirs)
    assert largest(ours) <= BF16 * largest(theirs)
