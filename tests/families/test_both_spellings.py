"""Families whose weights have one name in published checkpoints and another in transformers are read by both: here by
those of transformers, which its own files do not have."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from inferplane import LLM
from inferplane.models.reading.normalize import SPELLINGS
from tests.families.cases import CASES, config_of, make
from tests.families.parity import compare_prompts
from tests.families.wholes import WHOLES

RENAMED = {spelling.model_type for spelling in SPELLINGS.values() if spelling.renames}
RENAMED_FAMILIES = [
    *WHOLES,
    *(family for family in CASES if config_of(family, next(iter(CASES[family]))).model_type in RENAMED),
]


@pytest.mark.filterwarnings("ignore:Of .* the text part is read")
@pytest.mark.parametrize("family", RENAMED_FAMILIES)
def test_names_of_transformers(family, tmp_path):
    cases = CASES[family] if family in CASES else WHOLES[family][2]
    model = make(family, next(iter(cases)), tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
        assert not llm.runner.loaded.unused
        compare_prompts(model, llm, (33, 1), 1000)


def test_families_are_found():
    assert "kimi_linear" in RENAMED_FAMILIES
