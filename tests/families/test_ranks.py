"""Two ranks answer as one: each family with mixtures of experts, norms over all heads, weights by head, projections
that are stored as one, MLPs without a gate, blocks side by side, indexers."""

from __future__ import annotations

import pytest
import torch

from inferplane import LLM
from tests.e2e.sharing import answers, share
from tests.e2e.test_ranks import SECONDS, same
from tests.families.cases import CASES, make
from tests.families.experts import EXPERTS
from tests.families.sparse import SPARSE

DENSE = ["olmo2-plain", "phi3-partial", "glm4-half", "cohere-heads", "arcee-plain"]
MIXTURES = [f"{family}-{next(iter(CASES[family]))}" for family in EXPERTS]
STATES = ["qwen3_5-plain", "nemotron_h-mixed", "kimi_linear-mixed"]
CHOSEN = [f"{family}-{next(iter(CASES[family]))}" for family in SPARSE]
VALUES = ["mimo_v2_flash-mixed"]


@pytest.mark.parametrize("case", [*DENSE, *MIXTURES, *STATES, *CHOSEN, *VALUES])
def test_two_ranks_answer_as_one(case, tmp_path):
    make(*case.split("-"), tmp_path / "model")
    with LLM(tmp_path / "model", device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
        want = answers(llm)
    share(tmp_path / "model", tmp_path / "out", seconds=SECONDS)
    same(torch.load(tmp_path / "out"), want)
