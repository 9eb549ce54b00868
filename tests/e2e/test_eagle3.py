"""EAGLE-3 heads: the formula, the forms of published ones, the same tokens and the same distribution."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from inferplane import LLM, SamplingParams
from inferplane.binding.link import view_of
from inferplane.conformance.proposers import MAX_DEVIATIONS, chi_square
from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.models import Build, Config, build
from inferplane.models.families.eagle import eagle_head
from inferplane.types import Backend, Placement
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.backend import CpuBackend
from tests.e2e.drafters import eagle3_head
from tests.e2e.sharing import share
from tests.e2e.test_drafters import norm, rotate
from tests.e2e.tiny_models import llama_config, prompts, random_model
from tests.families.cases import make
from tests.unit.engine.runner.test_capture import Record

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
LAYERS, OWN = 7, 80


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle3") / "model"
    random_model(llama_config(num_hidden_layers=LAYERS), seed=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(model):
    eagle3_head(model.parent / "head", model, OWN, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    return model.parent / "head"


def opened(model, spec=None, **options):
    return LLM(model, device="cpu", **{"dtype": "float32", "max_num_seqs": 4, "speculative_config": spec, **options})


def drafting(head, drafts=3, **more):
    return {"method": "eagle", "model": head, "num_speculative_tokens": drafts, "only_if_faster": False, **more}


def tokens(llm, params=GREEDY, lengths=(9, 21, 40)):
    return [result.token_ids for result in llm.generate(prompts(160, lengths), params)]


def oracle(t, embed, fused, ids, vocab, *, adds_normed=False):
    """Logits and next states for states g_i and tokens t_{i+1}, by the formula."""
    normed = norm(fused, t["midlayer.hidden_norm.weight"])
    x = torch.cat((norm(embed[torch.tensor(ids)], t["midlayer.input_layernorm.weight"]), normed), -1)
    q, k, v = ((x @ t[f"midlayer.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, 16)).transpose(0, 1) for p in "qkv")
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = rotate(q) @ rotate(k).mT / math.sqrt(16)
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    x = out.transpose(0, 1).flatten(1) @ t["midlayer.self_attn.o_proj.weight"].T
    x = x + (normed if adds_normed else fused)
    y = norm(x, t["midlayer.post_attention_layernorm.weight"])
    inner = F.silu(y @ t["midlayer.mlp.gate_proj.weight"].T) * (y @ t["midlayer.mlp.up_proj.weight"].T)
    x = x + inner @ t["midlayer.mlp.down_proj.weight"].T
    own = norm(x, t["norm.weight"]) @ t["lm_head.weight"].T
    logits = own.amin(-1, keepdim=True).repeat(1, vocab)
    logits[:, torch.arange(len(t["d2t"])) + t["d2t"]] = own
    return logits, x


@pytest.mark.parametrize("adds_normed", [False, True])
def test_the_head_against_the_formula(adds_normed, model, tmp_path):
    tensors = eagle3_head(tmp_path, model, OWN, norm_before_residual=adds_normed)
    reference = random_model(llama_config(num_hidden_layers=LAYERS), seed=3).eval()
    ids = prompts(160, (45,))[0]
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    with opened(model, {"method": "eagle", "model": tmp_path}) as llm:
        cache, blocks = llm.runner.cache, list(range(7, 10))
        taps = llm.runner.model.layers.taps
        fused = torch.cat([states[tap][0] for tap in taps], -1) @ tensors["fc.weight"].T
        whole = make_batch([Query(ids, 0, blocks)], block_tokens=cache.block_tokens, device="cpu")
        _, hidden = llm.runner.run(whole)
        assert (hidden - fused).abs().max() <= 1e-5 * fused.abs().max(), "what the model gives to the head"
        ids, hidden = ids[1:], hidden[:-1]
        got = []
        for start, stop in ((0, 12), (12, 13), (13, len(ids))):  # prefill, decode, chunk
            batch = make_batch([Query(ids[start:stop], start, blocks)], block_tokens=cache.block_tokens, device="cpu")
            layer = view_of(llm.runner.steps[batch.kind]).mtp[0]
            with torch.inference_mode():
                got.append(layer(hidden[start:stop], batch, cache.layers[-1]))
        embed = reference.model.embed_tokens.weight.detach()
        for i, want in enumerate(oracle(tensors, embed, hidden, ids, 160, adds_normed=adds_normed)):
            rows = torch.cat([g[i] for g in got])
            assert (rows - want).abs().max() <= 1e-5 * want.abs().max()
        (drafter,) = llm.runner.drafters
        assert drafter.loaded.ignored == ["model.t2d"] and not drafter.loaded.unused and not llm.runner.loaded.unused


FORMS = {
    "as first published": {},
    "a plain architecture": {"architectures": ["LlamaForCausalLM"]},
    "names of later tools": {"prefix": "layers.0."},
    "states by number": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
    "states by number in a section": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafts", [1, 4])
def test_greedy_tokens_are_those_without_drafts(form, drafts, model, tmp_path):
    eagle3_head(tmp_path, model, OWN, **FORMS[form])
    with opened(model) as llm:
        want = tokens(llm)
    with opened(model, drafting(tmp_path, drafts)) as llm:
        assert tokens(llm) == want
        stats = llm.engine.stats()
        assert stats["spec_decode_num_draft_tokens_total"] > 0 and llm.engine.pools.used == 0
        assert "spec_decode_failures_total" not in stats


def test_drafts_stand_now_and_then_in_steps_of_several_sequences(model, head):
    """Rows are the sum of 1 + drafts, and what a refused draft leaves is overwritten."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with opened(model) as llm:
        want = tokens(llm, params, (5, 17, 33, 64))
    with opened(model, drafting(head, adaptive=False)) as llm:
        assert tokens(llm, params, (5, 17, 33, 64)) == want
        stats = llm.engine.stats()
        made, stood = stats["spec_decode_num_draft_tokens_total"], stats["spec_decode_num_accepted_tokens_total"]
        assert 0 < stood < made
        assert stats["forward_rows_total"] == 5 + 17 + 33 + 64 + made + 4 * 59 - stood


def test_sampled_tokens_with_target_match_are_those_of_plain_sampling(model, head):
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=4, ignore_eos=True)
    with opened(model, deterministic=True) as llm:
        want = tokens(llm, params)
    with opened(model, drafting(head, verify_strategy="target_match"), deterministic=True) as llm:
        assert tokens(llm, params) == want


def test_sampled_tokens_have_the_distribution_of_plain_decoding(model, head):
    """Chi-square of two samples at each of four positions, at a temperature at which drafts are accepted."""
    samples, prompt = [], prompts(160, (9,))[0]
    for spec in (None, drafting(head, adaptive=False)):
        with opened(model, spec, max_num_seqs=32) as llm:
            params = [
                SamplingParams(max_tokens=5, temperature=0.5, seed=i + 500 * len(samples), ignore_eos=True)
                for i in range(500)
            ]
            found = [result.token_ids for result in llm.generate([prompt] * 500, params)]
            assert spec is None or llm.engine.stats()["spec_decode_num_accepted_tokens_total"] > 0
        samples.append([Counter(row[i] for row in found) for i in range(5)])
    assert max(chi_square(a, b) for a, b in zip(*samples)) < MAX_DEVIATIONS


def test_a_model_without_the_head_computes_nothing_for_it(model, head):
    """Its plan is that of a model that never had one, also after a switch; embeddings need its own last states."""
    with opened(model) as llm:
        plain, vector = llm.runner.model.extensions(), llm.embed([prompts(160, (9,))[0]])
        llm.set_speculation(drafting(head))
        assert llm.runner.model.layers.taps == (1, 3, 5) and llm.runner.model.fuse is not None
        with pytest.raises(UsageError, match="EAGLE-3"):
            llm.embed([prompts(160, (9,))[0]])
        drafted = tokens(llm)
        llm.set_speculation(None)
        assert llm.runner.model.fuse is None and llm.runner.model.layers.taps == ()
        assert llm.runner.model.extensions() == plain
        assert tokens(llm) == drafted and llm.embed([prompts(160, (9,))[0]]) == vector


@pytest.mark.parametrize(
    ("config", "lost", "error", "words"),
    [
        ({"hidden_size": 32}, (), UsageError, "hidden_size = 32"),
        ({"vocab_size": 170}, (), UsageError, "vocab_size = 170"),
        ({"num_hidden_layers": 2}, (), UnsupportedModelError, "2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (), UnsupportedModelError, "0, 3, 7"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 0, 5]}, (), UnsupportedModelError, "3, 0, 5"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (), UnsupportedModelError, "1, 4, 7"),
        ({"transformer_layer_config": {"num_hidden_layers": 1}}, (), UnsupportedModelError, "form of speculators"),
        ({}, ("d2t",), CheckpointError, "lacks d2t"),
        ({}, ("fc.weight",), CheckpointError, "lacks fc.weight"),
        ({}, ("midlayer.hidden_norm.weight",), CheckpointError, "hidden_norm"),
    ],
)
def test_heads_that_do_not_fit(config, lost, error, words, model, tmp_path):
    tensors = eagle3_head(tmp_path, model, OWN, **config)
    save_file({name: t for name, t in tensors.items() if name not in lost}, tmp_path / "model.safetensors")
    with pytest.raises(error, match=words):
        opened(model, drafting(tmp_path))


def test_random_weights_of_its_shapes(model, head):
    """load_format="dummy" reads no tensor: the head's tokens are then the first ones of the model."""
    with opened(model, drafting(head), load_format="dummy") as llm:
        assert [len(found) for found in tokens(llm)] == [24] * 3


@pytest.mark.parametrize("together", [True, False])
def test_drafts_are_the_same_replayed_and_eager(together, model, head, monkeypatch):
    """A step, its verification and its drafts as one record, and as two."""
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    spec, found = drafting(head, 2, verify_strategy="target_match"), []
    params = [
        SamplingParams(max_tokens=n, temperature=t, seed=n, ignore_eos=True) for n, t in ((20, 0), (6, 0.8), (24, 0))
    ]
    for record in (Backend.capture, lambda self, step, bucket: Record(step, bucket)):
        monkeypatch.setattr(CpuBackend, "capture", record)
        with opened(model, spec, max_num_seqs=3, max_model_len=96) as llm:
            steps = llm.engine.speculator.captured_steps
            if not together:
                steps.disabled_reason = "apart"
            found.append([r.token_ids for r in llm.generate(prompts(160, (9, 21, 40)), params)])
            replayed = steps.replayed if together else llm.engine.speculator.proposer.steps.replayed
    assert found[0] == found[1] and replayed > 5, (replayed, steps.disabled_reason)


def decode_on_a_rank(model: str, head: str, out: str) -> None:
    """What each rank runs; rank 0 writes the tokens, and how many drafts were accepted."""
    with opened(model, drafting(head, adaptive=False)) as llm:
        found = tokens(llm, LONG)
        Path(out).write_text(json.dumps([found, llm.engine.stats()["spec_decode_num_accepted_tokens_total"]]))


def test_two_ranks_draft_what_one_drafts(model, head, tmp_path):
    with opened(model, drafting(head, adaptive=False)) as llm:
        want = tokens(llm, LONG)
        stood = llm.engine.stats()["spec_decode_num_accepted_tokens_total"]
    share(model, head, tmp_path / "out", seconds=240, run=decode_on_a_rank)
    assert json.loads((tmp_path / "out").read_text()) == [want, stood] and stood > 0


@pytest.mark.parametrize(
    ("more", "taps"),
    [
        ({}, None),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}, (0, 3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, (1, 3, 5)),
    ],
)
def test_a_section_numbers_the_layers_whose_results_are_read(more, taps, model, tmp_path):
    """As SGLang and the tools that write it count; at the top level a number is that of the next layer, as in vLLM."""
    eagle3_head(tmp_path, model, OWN, **more)
    with opened(model, drafting(tmp_path, 1)) as llm:
        layers = len(llm.runner.model.layers)
        assert llm.runner.model.mtp[-1].taps == (taps or (2, layers // 2, layers - 3))


@pytest.mark.parametrize("entry", ["norm_before_fc", "fc_norm", "norm_output"])
@pytest.mark.parametrize("inside", [False, True])
def test_norms_that_are_not_implemented_are_refused(entry, inside, model, tmp_path):
    eagle3_head(tmp_path, model, OWN, **({"eagle_config": {entry: True}} if inside else {entry: True}))
    with pytest.raises(UnsupportedModelError, match=entry), opened(model, drafting(tmp_path, 1)):
        pass


@pytest.mark.parametrize("name", ["input_norm.weight", "fc_norm.weight", "fc_norm.2.weight", "fc.bias"])
def test_tensors_of_such_heads_are_refused(name, model, tmp_path):
    """Also where their config does not mention them."""
    tensors = eagle3_head(tmp_path, model, OWN)
    save_file({**tensors, name: torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"head with {name}"), opened(model, drafting(tmp_path, 1)):
        pass


@pytest.mark.parametrize("method", ["EAGLE-1", "EAGLE-3"])
def test_the_second_rank_reports_no_biases_that_the_first_one_adds(method, model):
    shared, base = Placement.shared(1, 2), json.loads((model / "config.json").read_text())
    config = {**base, "num_hidden_layers": 1, "attention_bias": True}
    config |= {"draft_vocab_size": OWN} if method == "EAGLE-3" else {}
    eagle1 = ("fc.weight", "layers.0.self_attn.o_proj.bias")
    eagle3 = ("model.fc.weight", "model.d2t", "model.midlayer.self_attn.o_proj.bias")
    names = eagle1 if method == "EAGLE-1" else eagle3
    found = eagle_head(build(Build(Config(base), shared)), Build(Config(config), shared), names)
    assert names[-1] in found.unread


def test_layers_with_a_shortcut_are_refused(tmp_path):
    """Between the halves of one of LongCat's layers there are two residual streams."""
    make("longcat_flash", "mixed", tmp_path / "model")
    eagle3_head(tmp_path / "head", tmp_path / "model", OWN, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with pytest.raises(UnsupportedModelError, match=r"have a shortcut.*use method 'ngram'"):
        opened(tmp_path / "model", drafting(tmp_path / "head", 1))


@pytest.mark.parametrize("stated", [5, 0, "1,2,3", "", [1, "2"]])
def test_numbers_of_layers_are_a_list(stated, model, tmp_path):
    eagle3_head(tmp_path, model, OWN, eagle_aux_hidden_state_layer_ids=stated)
    with pytest.raises(CheckpointError, match="is no list of numbers"), opened(model, drafting(tmp_path, 1)):
        pass
