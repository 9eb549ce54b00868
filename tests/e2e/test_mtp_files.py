"""Prediction layers with files and weight formats of their own: where they are, what they share, what is refused."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.engine import InferplaneWarning
from inferplane.errors import UsageError
from tests.e2e.drafters import change_tensor, eagle_head, mtp_alone, noisy_copy, with_mtp
from tests.e2e.tiny_models import deepseek_config, llama_config, prompts, random_model

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint with a prediction layer."""
    folder = tmp_path_factory.mktemp("base") / "model"
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(folder)
    with_mtp(folder)
    return folder


def opened(folder, **config):
    spec = {"method": "mtp", "num_speculative_tokens": 3, **config} if config.pop("drafts", True) else None
    return LLM(folder, device="cpu", dtype="float32", speculative_config=spec)


def drafted(llm):
    """Tokens, and what was drafted for the first sequence, step by step."""
    found, inner = [], llm.engine.speculator.proposer.propose

    def propose(chunks, limits, hidden):
        drafts = inner(chunks, limits, hidden)
        found.append(drafts)
        return drafts

    llm.engine.speculator.proposer.propose = propose
    tokens = [r.token_ids for r in llm.generate(prompts(160, (20, 7)), GREEDY)]
    return tokens, found


@pytest.mark.parametrize("form", ["whole", "alone", "without_copies", "numbered_from_0"])
def test_layers_of_other_files_draft_as_the_models_own(form, base, tmp_path):
    with opened(base) as llm:
        want = drafted(llm)
        assert not llm.runner.drafters and len(llm.runner.base.mtp) == 1
    folder = tmp_path / "mtp"
    if form == "whole":
        shutil.copytree(base, folder)
    else:
        number = 0 if form == "numbered_from_0" else None
        mtp_alone(base, folder, number=number, without=COPIES if form == "without_copies" else ())
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)  # equal copies are the model's; nothing is unexpected
        llm = opened(base, model=folder)
    with llm:
        assert drafted(llm) == want
        (drafter,) = llm.runner.drafters
        assert drafter.data()["embedding"] == drafter.data()["head"] == "model"
        layer = llm.runner.model.mtp[0]
        assert layer.embed is llm.runner.base.embed or layer.embed.weight is llm.runner.base.embed.weight
        assert layer.head.weight is llm.runner.base.head.weight


@pytest.mark.parametrize("what", ["embedding", "head"])
def test_a_copy_that_differs_is_used_and_said(what, base, tmp_path):
    mtp_alone(base, tmp_path / "mtp")
    change_tensor(tmp_path / "mtp", COPIES[what == "head"])
    with pytest.warns(InferplaneWarning, match=r"of its own .*differs from the model's"):
        llm = opened(base, model=tmp_path / "mtp")
    with llm, opened(base) as plain:
        shared = llm.runner.describe_caches()["drafters"][0]
        assert {key: shared[key] for key in ("embedding", "head")} == {
            "embedding": "model",
            "head": "model",
            what: "own",
        }
        own = llm.runner.model.mtp[0]
        weight = own.embed.weight if what == "embedding" else own.head.weight
        of_model = llm.runner.base.embed.weight if what == "embedding" else llm.runner.base.head.weight
        assert weight is not of_model
        values, of_model_values = (
            next(v for (i, _), v in llm.runner.loaded.packed.items() if i == id(w)) for w in (weight, of_model)
        )
        assert torch.equal(values, 2 * of_model_values)
        got, want = (x.generate(prompts(160, (20,)), GREEDY)[0].token_ids for x in (llm, plain))
        assert got == want, "the tokens are the model's"


def test_each_has_its_own_formats(base, tmp_path):
    mtp_alone(base, tmp_path / "mtp")
    for scheme, own, formats in (
        ("weight_only_int4", "weight_only_int8", ({"plain", "int4"}, {"plain", "int8"})),
        ("weight_only_int4", "none", ({"plain", "int4"}, {"plain"})),
        (None, "weight_only_int8", ({"plain"}, {"plain", "int8"})),
        ("weight_only_int8", None, ({"plain", "int8"}, {"plain", "int8"})),
    ):
        for model in (None, tmp_path / "mtp"):
            config = {"method": "mtp", "model": model, "draft_quantization": own}
            with LLM(base, device="cpu", quantization=scheme, speculative_config=config) as llm:
                ids = {id(w) for _, w in llm.runner.base.weights()} if own or model else set()
                found = [
                    {w.format.partition("_")[0] for _, w in op.weights() if id(w) not in others}
                    for op, others in ((llm.runner.base.layers, set()), (llm.runner.model.mtp[0], ids))
                ]
                assert tuple(found) == formats, (scheme, own, model)


def test_estimate_and_explain_show_what_drafts(base, tmp_path):
    mtp_alone(base, tmp_path / "mtp")
    config = {"method": "mtp", "model": tmp_path / "mtp", "draft_quantization": "weight_only_int8"}
    with (
        LLM(base, device="cpu", dtype="bfloat16") as plain,
        LLM(base, device="cpu", dtype="bfloat16", speculative_config={"method": "mtp"}) as inside,
        LLM(base, device="cpu", dtype="bfloat16", speculative_config=config) as llm,
    ):
        (data,) = llm.explain()["drafters"]
        (own,) = inside.explain()["drafters"]
        assert (data["method"], data["model"], data["quantization"]) == (
            "mtp",
            str(tmp_path / "mtp"),
            "weight_only_int8",
        )
        assert own["weight_bytes"] == inside.explain()["weight_bytes"] - plain.explain()["weight_bytes"]
        # Not fewer than in bfloat16: panels hold whole groups of 128 columns, and these layers have 64.
        assert data["weight_bytes"] == llm.explain()["weight_bytes"] - plain.explain()["weight_bytes"]
        assert 0 < data["weight_bytes"] != own["weight_bytes"]
        assert (
            data["kv_block_bytes"] == own["kv_block_bytes"] == inside.runner.block_bytes() - plain.runner.block_bytes()
        )
        assert "drafts: mtp from" in llm.explain_text() and "in weight_only_int8" in llm.explain_text()
        assert "drafters" not in plain.explain()


def changed(source, folder, **entries):
    noisy_copy(source, folder, noise=0.0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


def test_unfit_layers_are_refused_in_one_error(base, tmp_path):
    random_model(llama_config(), seed=3).save_pretrained(tmp_path / "llama")
    eagle_head(tmp_path / "eagle", width=64, vocab=160)
    mtp_alone(base, tmp_path / "mtp")
    plain = tmp_path / "plain"
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(plain)
    for config, match in (
        ({"model": plain}, r"plain has no multi-token-prediction layers"),
        ({"model": tmp_path / "llama"}, r"llama have model_type = 'llama', the model has 'deepseek_v3'"),
        ({"model": tmp_path / "eagle"}, r"eagle have model_type = 'llama'"),
        (
            {"model": changed(tmp_path / "mtp", tmp_path / "width", hidden_size=32)},
            "hidden_size = 32, the model has 64",
        ),
        ({"model": changed(tmp_path / "mtp", tmp_path / "words", vocab_size=170)}, "vocab_size = 170"),
        ({"model": tmp_path / "nowhere"}, "is no folder"),
        ({"draft_quantization": "int7"}, r"draft_quantization = 'int7'.*weight_only_int8"),
        ({"method": "ngram", "draft_quantization": "a8w8"}, "'ngram', which has no weights"),
    ):
        with pytest.raises(UsageError, match=match):
            opened(base, **config)
    with pytest.raises(UsageError, match="has no multi-token-prediction layers"):
        opened(plain)


def test_names_of_the_source_system(base):
    with pytest.warns(DeprecationWarning, match="draft_model_"):
        llm = opened(base, draft_model_name_or_path=base, draft_model_quant_type="weight_only_int8")
    with llm:
        assert llm.runner.drafters[0].quantization == "weight_only_int8"
