"""Models with recurrent layers in the engine: their memory, their slots, what is refused, and what stays right."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.cli import main
from inferplane.cli.main import DONE
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.estimate import estimate
from inferplane.engine.runner.planned_model import PlannedModel
from inferplane.errors import CapacityError, UsageError
from inferplane.kvcache import StatePool
from inferplane.models import Config
from inferplane.ops import CausalConv1d
from inferplane.plugins import host
from inferplane.types.state import StateRows
from inferplane_cpu.backend import CpuBackend
from tests.unit.engine.runner.test_capture import Record
from tests.unit.support.small import LLAMA

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
ONLY_STATES = {**LFM2, "layer_types": ["conv"] * 3}
OPTIONS = {"device": "cpu", "load_format": "dummy", "dtype": "float32", "max_num_seqs": 4}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[7, 3, 9, 1] * 9, [5], [2, 4] * 20, [7, 3, 9, 1] * 9, [8, 8, 1], [1] * 33]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
LAYER = 64 * 2 * 4
"""Bytes of a layer's two last inputs."""


def planned(config, **options):
    return Runner.plan_only(ModelFiles(Config(config)), host(), "cpu", RunnerOptions(load_format="dummy", **options))


def alone(config):
    """The tokens of each prompt when it runs alone."""
    with LLM(config, **{**OPTIONS, "max_num_seqs": 1}) as llm:
        return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("config", [LFM2, ONLY_STATES], ids=["hybrid", "only_states"])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}])
def test_sequences_have_the_tokens_that_they_have_alone(config, limits):
    """More prompts than sequences of a step."""
    expected = alone(config)
    with LLM(config, **{**OPTIONS, **limits}) as llm:
        for _ in range(2):
            results = llm.generate(PROMPTS, GREEDY)
            assert [r.token_ids for r in results] == expected
        s = llm.engine.scheduler
        assert s.states.available == s.states.total == s.limits.max_num_seqs and llm.engine.pools.used == 0


@pytest.mark.parametrize("config", [LFM2, ONLY_STATES], ids=["hybrid", "only_states"])
def test_prefixes_are_reused(config):
    """A prompt again, a longer one, one that branches off inside, and the first turn's answer with a question."""
    size = planned(config, dtype="float32").block_tokens
    text = [(7 * i) % 150 for i in range(2 * size + 9)]
    with LLM(config, **OPTIONS, enable_prefix_caching=False) as llm:
        (first,) = llm.generate([text], GREEDY)
        prompts = [text, [*text, *[3] * size], [*text[: size + 3], 5], [*text, *first.token_ids, 8, 8]]
        expected = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert [r.timings.cached_tokens for r in expected] == [0] * 4
    answered = (len(text) + len(first.token_ids) - 1) // size * size
    with LLM(config, **OPTIONS) as llm:
        llm.generate([text], GREEDY)
        results = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        assert [r.timings.cached_tokens for r in results] == [2 * size, 2 * size, 0, answered]
        (again,) = llm.generate([[*text[: size + 3], 6]], GREEDY)
        assert again.timings.cached_tokens == size, "the third prompt's step ended where it branched off"


def test_preempted_sequences_begin_again():
    """The cache holds two whole sequences; the others lose blocks and slots, and compute their states anew."""
    runner = planned(LFM2, dtype="float32")
    blocks = 2 * (100 // runner.block_tokens + 1)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [[token, 3, 9, 1] * 15 for token in range(4)]
    with LLM(LFM2, **OPTIONS, kv_cache_bytes=blocks * runner.block_bytes(), max_model_len=100) as llm:
        results = llm.generate(prompts, params)
        assert llm.engine.scheduler.preemptions > 0
        for prompt, result in zip(prompts, results):
            assert llm.generate(prompt, params)[0].token_ids == result.token_ids


def test_aborted_sequences_give_their_slots_back():
    with LLM(LFM2, **OPTIONS) as llm:
        for prompt in PROMPTS:
            pieces = llm.stream(prompt, GREEDY)
            next(pieces)
            assert llm.engine.scheduler.states.available == 3
            pieces.close()
            assert llm.engine.scheduler.states.available == 4


@pytest.mark.parametrize("config", [LFM2, ONLY_STATES], ids=["hybrid", "only_states"])
def test_logits_need_a_free_slot(config):
    with LLM(config, **{**OPTIONS, "max_num_seqs": 1}) as llm:
        (whole,), (cut,) = llm.logits([PROMPTS[0]]), llm.logits([PROMPTS[0]], chunk_tokens=5)
        assert (whole - cut).abs().max() <= 1e-5 * whole.abs().max()
        pieces = llm.stream(PROMPTS[1], GREEDY)
        next(pieces)
        with pytest.raises(CapacityError, match="All 1 sequences that have slots for states are running"):
            llm.logits([PROMPTS[0]])
        pieces.close()
        assert torch.equal(llm.logits([PROMPTS[0]])[0], whole)


# -- memory


@pytest.mark.parametrize(("config", "layers"), [(LFM2, 2), (ONLY_STATES, 3)], ids=["hybrid", "only_states"])
def test_states_are_counted_by_sequence(config, layers):
    runner = planned(config, dtype="float32", max_num_seqs=4)
    found = estimate(runner, 10**9, 64)
    assert runner.count_state_bytes() == found.state_sequence == 2 * layers * LAYER
    assert found.states == 4 * found.state_sequence
    assert found.left == 10**9 - found.weights - found.workspace - found.states
    assert found.sequences(64, found.left) == 4 and found.fits
    assert planned(config, dtype="bfloat16").count_state_bytes() == layers * LAYER
    with LLM(config, **OPTIONS) as llm:
        states = llm.runner.cache.list_states()
        slots = StatePool(4).slots
        assert [(s.slots, s.tensors[0].shape) for s in states] == [(slots, (slots, 64, 2))] * layers
        held = sum(t.nbytes for s in states for t in s.tensors)
        assert held == slots * layers * LAYER == found.states + layers * LAYER  # and the slot of padding
        assert len(llm.runner.cache.layers) == len(llm.runner.cache.storages()) == 3 - layers


def test_a_model_without_attention_has_blocks_of_no_bytes():
    """They only count tokens; a sequence holds those of its step."""
    found = estimate(planned(ONLY_STATES, dtype="float32", max_num_seqs=4), 10**9, 64)
    assert (found.block, found.kv_token, found.default_kv_bytes, found.windows) == (0, 0, 0, (1,))
    with LLM(ONLY_STATES, **OPTIONS, kv_cache_bytes=1) as llm:
        assert llm.runner.max_model_len == 256
        (result,) = llm.generate([[1] * 200], SamplingParams(max_tokens=56, temperature=0, ignore_eos=True))
        assert len(result.token_ids) == 56


def test_states_that_do_not_fit_are_reported(monkeypatch):
    runner = planned(LFM2, dtype="float32", max_num_seqs=4)
    free = [2**30, 4 * runner.count_state_bytes() - 1]  # before the weights are there, and behind them
    monkeypatch.setattr(
        type(runner.backend),
        "memory",
        lambda self: type("Memory", (), {"free_bytes": free.pop(0) if len(free) > 1 else free[0]}),
    )
    with pytest.raises(CapacityError, match=r"The states of 4 sequences take 8192 bytes.*8191 bytes") as caught:
        LLM(LFM2, **OPTIONS)
    assert "lower max_num_seqs: each sequence takes 2048 bytes" in caught.value.remedy


def test_explain_and_estimate_say_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "config.json"
    for config, cache in ((LFM2, "KV layout paged"), (ONLY_STATES, "no KV cache")):
        path.write_text(json.dumps(config))
        layers = config["layer_types"].count("conv")
        assert main.main(["explain", str(path), "--device", "cpu"]) == DONE
        text = capsys.readouterr().out
        assert f"{layers} recurrent layer(s) keep 0.0 MiB of each sequence; refused drafts cost a step" in text
        assert cache in text
        assert main.main(["explain", str(path), "--device", "cpu", "--json"]) == DONE
        assert json.loads(capsys.readouterr().out)["states"] == {"layers": layers, "sequence_bytes": 2 * layers * LAYER}
        assert main.main(["estimate", str(path), "--device", "cpu", "--max-num-seqs", "4"]) == DONE
        assert "whatever its length; " in capsys.readouterr().out
        assert main.main(["estimate", str(path), "--device", "cpu", "--json"]) == DONE
        assert json.loads(capsys.readouterr().out)["state_sequence_bytes"] == 2 * layers * LAYER
        divided = ["--tensor-parallel-size", "2", "--json"]
        assert main.main(["estimate", str(path), "--device", "cpu", *divided]) == DONE
        assert json.loads(capsys.readouterr().out)["state_sequence_bytes"] == layers * LAYER


@pytest.mark.parametrize("config", [LFM2, ONLY_STATES], ids=["hybrid", "only_states"])
@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["plain", "drafts"])
def test_captured_steps_change_no_tokens(config, speculative_config, monkeypatch):
    """On a device that captures by remembering the call, and could capture all ops."""
    expected, wrong = alone(config), []
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: Record(step, bucket))
    monkeypatch.setattr(CausalConv1d, "body_capture_safe", True)
    monkeypatch.setattr(PlannedModel, "report_wrong_capture", lambda self, *wrongly: wrong.append(wrongly))
    with LLM(config, **OPTIONS, speculative_config=speculative_config) as llm:
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected
        decode = llm.runner.decode
        assert (decode.disabled_reason, wrong) == ("", []) and decode.replayed > 15
        scheduler = llm.engine.scheduler
        assert scheduler.states.available == scheduler.states.total and llm.engine.pools.used == 0


class Frozen(Record):
    """A graph that has the slots of the step that it was captured with."""

    def __init__(self, step, bucket):
        slots = StateRows(*(rows.clone() for rows in bucket.states))
        super().__init__(lambda batch: step(replace(batch, states=slots)), bucket)


def test_captures_with_other_slots_are_dropped(monkeypatch):
    expected, reasons = alone(LFM2), []
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: Frozen(step, bucket))
    monkeypatch.setattr(CausalConv1d, "body_capture_safe", True)
    monkeypatch.setattr(PlannedModel, "report_wrong_capture", lambda self, size, reason: reasons.append(reason))
    with LLM(LFM2, **OPTIONS) as llm:
        assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.runner.decode.replayed == 0 and len(reasons) > 1


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 7}])
@pytest.mark.parametrize(("method", "config"), [("ngram", LFM2), ("ngram", ONLY_STATES), ("draft_model", LFM2)])
def test_drafts_change_no_tokens(method, config, limits):
    model = {"model": {**LLAMA, "vocab_size": config["vocab_size"]}} if method == "draft_model" else {}
    speculative = {"method": method, "num_speculative_tokens": 4, **model}
    expected = alone(config)
    with LLM(config, **{**OPTIONS, **limits}, speculative_config=speculative) as llm:
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected
        assert llm.engine.stats()["spec_decode_num_draft_tokens_total"] > 0
        s = llm.engine.scheduler
        assert s.states.available == s.states.total and llm.engine.pools.used == 0


# -- refused


def test_layers_behind_it_do_not_draft():
    with pytest.raises(UsageError, match="no layer behind it can draft") as caught:
        LLM(LFM2, **OPTIONS, speculative_config={"method": "mtp", "num_speculative_tokens": 2})
    assert "method='ngram'" in caught.value.remedy


def test_a_recurrent_model_does_not_draft():
    vocab = {**LFM2, "vocab_size": LLAMA["vocab_size"]}
    with pytest.raises(UsageError, match="has recurrent layers, so it cannot draft"):
        LLM(LLAMA, **OPTIONS, speculative_config={"method": "draft_model", "model": vocab, "num_speculative_tokens": 2})
