"""The tool that gives the demo model DeepSeek-V3.2's form."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import train_indexer
from demo_export import DEFAULT_OUT
from demo_format import write_plain
from demo_model import TINY
from demo_selftest import random_model, relative_error
from indexer_model import IndexConfig, SparseModel, go_sparse, mark_largest, to_hf, warm_up
from safetensors import safe_open
from train_indexer import IndexerOptions, IndexerTrainer, load_indexed
from train_loop import Journal

INDEX = IndexConfig(index_n_heads=16, index_head_dim=24, index_topk=7)  # with few heads many scores are 0, and equal
FILES = [np.random.default_rng(i).integers(0, 96, 300).astype(np.int32) for i in range(4)]
OPTIONS = IndexerOptions(rows=64, context=16, top=5, heads=2)


@pytest.fixture
def sparse():
    """Random weights, those of the indexers too."""
    torch.manual_seed(2)
    found = SparseModel(random_model(), INDEX).eval()
    with torch.no_grad():
        for param in found.indexers():
            param.copy_(torch.randn_like(param) * 0.3)
    return found


@pytest.mark.parametrize("length", [6, 7, 8, 40])
def test_the_model_is_transformers(sparse, length, tmp_path):
    """Contexts below, at and beyond what is chosen."""
    from transformers import AutoModelForCausalLM

    extra = f"model.layers.{TINY.num_hidden_layers}."  # the prediction layer: transformers has none
    state = {k: v for k, v in sparse.to_hf_state().items() if not k.startswith(extra)}
    write_plain(tmp_path, to_hf(TINY, INDEX, fp8=False), state)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(0, TINY.vocab_size, (2, length))
    sparse.set_mode(top=INDEX.index_topk, learns=False)
    with torch.no_grad():
        mine = sparse.model.logits(sparse.model.states(tokens, torch.float32))
        assert relative_error(mine, theirs(tokens, use_cache=False).logits) < 1e-5


def test_without_a_limit_it_is_the_dense_model(sparse):
    tokens = torch.randint(0, TINY.vocab_size, (2, 30))
    dense = random_model()
    with torch.no_grad():
        for top in (None, 30):
            sparse.set_mode(top=top, learns=False)
            mine, theirs = (m.states(tokens, torch.float32) for m in (sparse.model, dense))
            assert relative_error(mine, theirs) < 1e-5


def test_of_equal_scores_the_lower_position_is_chosen():
    scores = torch.tensor([[[1.0, 2, 2, 2, 0, 1]]])
    assert mark_largest(scores, 3).nonzero()[:, 2].tolist() == [1, 2, 3]
    assert mark_largest(scores, 4).nonzero()[:, 2].tolist() == [0, 1, 2, 3]


def test_names_and_back(sparse):
    again = SparseModel.from_hf_state(TINY, INDEX, sparse.to_hf_state())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in sparse.state_dict().items())


def test_warm_up_trains_the_indexers_alone(tmp_path):
    run = IndexerTrainer(dataclasses.replace(OPTIONS, warmup_lr=0.02), random_model(), FILES)
    before = {name: value.clone() for name, value in run.sparse.state_dict().items()}
    window = run.batches.take(4, 18)
    first = warm_up(run.sparse, window)[0].item()
    run.run(warm_up, 40, Journal(tmp_path / "journal"))
    assert warm_up(run.sparse, window)[0].item() < 0.9 * first
    changed = {name for name, value in run.sparse.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(".indexer." in name for name in changed)


def test_the_second_stage_trains_all(tmp_path):
    """The indexers' divergence is that over the chosen tokens, and gives the model no gradient."""
    run = IndexerTrainer(OPTIONS, random_model(), FILES)
    before = {name: value.clone() for name, value in run.sparse.named_parameters()}
    run.run(go_sparse, 3, Journal(tmp_path / "journal"))
    assert all(not torch.equal(value, before[name]) for name, value in run.sparse.named_parameters())
    run.sparse.zero_grad()
    run.sparse.set_mode(top=5, learns=True)
    run.sparse.model.states(run.batches.take(2, 16), torch.float32)
    torch.stack([attention.loss for attention in run.sparse.attentions()]).sum().backward()
    own = {id(param) for param in run.sparse.indexers()}
    assert all(param.grad is None for param in run.sparse.parameters() if id(param) not in own)


def test_export_and_use(tmp_path, monkeypatch):
    """In DeepSeek-V3.2's format; the platform loads it and says what the tool's model says."""
    from inferplane import LLM, SamplingParams

    monkeypatch.setattr(train_indexer, "EVAL_TOKENS", 512)
    run = IndexerTrainer(
        dataclasses.replace(OPTIONS, context=256, top=32), train_indexer.load_folder(DEFAULT_OUT)[1], FILES
    )
    torch.save(run.facts(1.0), tmp_path / train_indexer.RUN)
    out = tmp_path / "out"
    train_indexer.export(DEFAULT_OUT, tmp_path, out)
    facts = json.loads((out / "training.json").read_text())
    assert facts["held_out"]["sparse"]["loss"] > facts["held_out"]["dense"]["loss"]
    with safe_open(out / "model.safetensors", "pt") as file:
        own = [name for name in file.keys() if ".layers.3.self_attn.indexer." in name]  # noqa: SIM118
        types = {name: file.get_slice(name).get_dtype() for name in own}
    prefix = "model.layers.3.self_attn.indexer."
    assert {name.removeprefix(prefix): kind for name, kind in types.items()} == {
        "wq_b.weight": "F8_E4M3", "wq_b.weight_scale_inv": "F32", "wk.weight": "F8_E4M3", "wk.weight_scale_inv": "F32",
        "k_norm.weight": "F32", "k_norm.bias": "F32", "weights_proj.weight": "F32",
    }  # fmt: skip
    tool = load_indexed(out)
    tool.set_mode(top=32, learns=False)
    ids = torch.randint(3, 4096, (1, 90))
    with torch.no_grad():
        want = tool.model.logits(tool.model.states(ids, torch.float32))[0].log_softmax(-1)
    with LLM(str(out), device="cpu", dtype="float32") as llm:
        (found,) = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=1, prompt_logprobs=0))
    got = torch.tensor([entry.logprob for entry in found.prompt_logprobs[1:]])
    torch.testing.assert_close(got, want[:-1].gather(1, ids[0, 1:, None])[:, 0], atol=2e-3, rtol=1e-3)


def test_mistakes_are_one_line(tmp_path, capsys):
    for words in (
        ["export", "--work", str(tmp_path / "none")],
        ["train", "--rows", "0"],
        ["train", "--sparse-steps", "-1"],
        ["eval", "--model", str(tmp_path / "none")],
        ["eval", "--model", str(DEFAULT_OUT)],
    ):
        assert train_indexer.main(words) == 1
        assert capsys.readouterr().err.count("\n") == 1
