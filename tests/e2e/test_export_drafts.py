"""Exports with what drafts: prediction layers, in a format of their own if need be, and draft models."""

from __future__ import annotations

import json

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.errors import InferplaneError
from inferplane.models.exported import Manifest
from tests.e2e.checkpoints import PROMPT
from tests.e2e.drafters import with_mtp
from tests.e2e.test_export import BFLOAT16, cli, export, manifest, small, tensor_bytes
from tests.e2e.tiny_models import make

__all__ = ["cli", "small"]


@pytest.mark.parametrize("quantization", [None, "weight_only_int8"])
def test_one_export_drafts_by_ngrams_and_by_its_own_layers(quantization, tmp_path):
    """The demo model is quantized, and has a layer that drafts, which may be in a format of its own."""
    manifest = export("demo", tmp_path / "made", draft_quantization=quantization)
    assert manifest.draft_quantization == quantization
    assert manifest.rank_bytes == [sum(tensor_bytes(tmp_path / "made" / "rank_0"))]
    greedy = SamplingParams(max_tokens=48, temperature=0)
    found = {}
    for model in ("demo", tmp_path / "made"):
        for method in (None, "ngram", "mtp"):
            drafting = None if method is None else {"method": method, "num_speculative_tokens": 2}
            if model == "demo" and method == "mtp":
                drafting["draft_quantization"] = quantization
            with LLM(model, **BFLOAT16, speculative_config=drafting) as llm:
                drafters = llm.runner.describe_drafters()
                assert [d["quantization"] for d in drafters] == [quantization] * (method == "mtp")
                tokens = llm.generate("def main():\n    def main():", greedy)[0].token_ids
                accepted = llm.engine.metrics.counters["spec_decode_num_accepted_tokens_total"]
            found[str(model), method] = tokens, accepted
    for method in (None, "ngram", "mtp"):
        assert found[str(tmp_path / "made"), method] == found["demo", method]
        assert (found["demo", method][1] > 0) == (method is not None)
    with LLM(tmp_path / "made", **BFLOAT16) as llm:  # the layers are read later, beside the model
        llm.set_speculation({"method": "mtp", "num_speculative_tokens": 2})
        assert llm.runner.describe_drafters()[0]["quantization"] == quantization
        assert llm.generate("def main():\n    def main():", greedy)[0].token_ids == found["demo", "mtp"][0]
    drafting |= {"draft_quantization": "weight_only_int4"}
    with pytest.raises(InferplaneError, match=r"draft_quantization = 'weight_only_int4', but the prediction layers of"):
        LLM(tmp_path / "made", **BFLOAT16, speculative_config=drafting)


def test_prediction_layers_keep_their_own_format(tmp_path, cli):
    """The model in int4, its prediction layer in int8, as the source system's names of models have it."""
    make("deepseek", "q_lora", tmp_path / "model", torch.bfloat16)
    with_mtp(tmp_path / "model")
    words = ("--device", "cpu", "--quantization", "weight_only_int4", "--speculative-quantization", "weight_only_int8")
    code, _, err = cli("export", str(tmp_path / "model"), *words, "--out", str(tmp_path / "made"))
    assert code == 0, err
    found = {}
    for model, given in (
        (tmp_path / "model", {"quantization": "weight_only_int4", "draft": {"draft_quantization": "weight_only_int8"}}),
        (tmp_path / "made", {"quantization": None, "draft": {}}),
    ):
        drafting = {"method": "mtp", "num_speculative_tokens": 1, **given["draft"]}
        options = {"device": "cpu", "quantization": given["quantization"], "speculative_config": drafting}
        with LLM(model, **options) as llm:
            packed = {
                f"{site} {label}": llm.runner.loaded.packed[id(weight), label]
                for site, weight in llm.runner.plan.model.weights()
                for label in llm.runner.plan.packings.get(id(weight), ())
                if site.startswith("mtp.")
            }
            (drafter,) = llm.runner.describe_drafters()
            tokens = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0))[0].token_ids
            found[model.name] = drafter["quantization"], drafter["weight_bytes"], sorted(packed), tokens
    assert found["made"] == found["model"] and found["made"][0] == "weight_only_int8" and found["made"][2]
    code, _, err = cli("export", str(tmp_path / "model"), *words[:-1], "int3", "--out", str(tmp_path / "other"))
    assert code == 2 and "--speculative-quantization int3" in err and not (tmp_path / "other").exists()


def test_exports_of_earlier_releases_have_one_quantization(small):
    content = manifest(small / "made")
    del content["draft_quantization"]
    (small / "made" / "export.json").write_text(json.dumps(content))
    read = Manifest.read(small / "made")
    assert read is not None and read.draft_quantization is None


def test_a_draft_model_is_exported_by_itself(small, tmp_path):
    """In its own format, which need not be repeated at the start."""
    export(small / "model", tmp_path / "draft", quantization="weight_only_int8")
    drafting = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(tmp_path / "draft")}
    greedy = SamplingParams(max_tokens=8, temperature=0)
    with LLM(small / "made", device="cpu") as llm:
        want = llm.generate(PROMPT, greedy)[0].token_ids
    with LLM(small / "made", device="cpu", speculative_config=drafting) as llm:
        assert llm.runner.draft.options.quantization == "weight_only_int8"
        assert llm.generate(PROMPT, greedy)[0].token_ids == want
