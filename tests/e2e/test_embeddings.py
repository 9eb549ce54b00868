"""Embeddings against transformers' last hidden states, whatever becomes of the prompt on its way."""

from __future__ import annotations

import asyncio

import pytest
import torch

from inferplane import LLM, AsyncLLM, SamplingParams
from inferplane.engine.clients.embedding import finish_embedding
from inferplane.errors import CapacityError, GenerationError, UsageError
from tests.e2e.drafters import noisy_copy
from tests.e2e.tiny_models import make, prompts

CASES = ["llama-gqa", "qwen3-window", "mistral-window", "deepseek-q_lora"]
FLOAT32 = 1e-5
OPTIONS = {"device": "cpu", "dtype": "float32"}


def wanted(model, ids: list[int], pooling: str) -> torch.Tensor:
    """transformers' hidden states after the final norm, pooled."""
    with torch.no_grad():
        states = model.base_model(torch.tensor([ids])).last_hidden_state[0].float()
    return states[-1] if pooling == "last" else states.mean(0)


def check(model, many: list[list[int]], got: list[list[float]], pooling: str) -> None:
    for ids, vector in zip(many, got, strict=True):
        want = wanted(model, ids, pooling)
        assert (torch.tensor(vector) - want).abs().max() <= FLOAT32 * want.abs().max()


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """transformers' model and the folder of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return make(*request.param.split("-"), folder), folder


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_prompts_cut_into_chunks_beside_others_that_generate(pair, pooling):
    model, folder = pair
    with LLM(folder, max_num_seqs=3, max_num_batched_tokens=16, **OPTIONS) as llm:
        many = prompts(llm.engine.vocab, (70, 9, 1, 33, 64))
        other = llm.add(many[0], SamplingParams(max_tokens=30, temperature=0))
        check(model, many, llm.embed(many, pooling, normalize=False), pooling)
        check(model, many, llm.embed(many, pooling, normalize=False), pooling)  # their blocks are cached by now
        llm.engine.end(other, "abort")
        llm.engine.pools.check()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_sequences_that_have_to_make_room(tmp_path, pooling):
    model = make("llama", "gqa", tmp_path)
    with LLM(tmp_path, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, **OPTIONS) as probe:
        block_bytes = probe.runner.block_bytes()
    with LLM(
        tmp_path, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, kv_cache_bytes=7 * block_bytes, **OPTIONS
    ) as llm:
        many = prompts(llm.engine.vocab, (60, 50, 70, 40), seed=4)
        hog = llm.add(many[3], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
        for _ in range(3):
            llm.engine.step()
        check(model, many[:3], llm.embed(many[:3], pooling, normalize=False), pooling)
        llm.engine.end(hog, "abort")
        assert llm.engine.pools.used == 0


def test_a_preempted_prompt_is_gathered_anew(tmp_path):
    model = make("llama", "gqa", tmp_path)
    with LLM(tmp_path, max_num_batched_tokens=16, **OPTIONS) as llm:
        (ids,) = prompts(llm.engine.vocab, (50,))
        request = llm.add(ids, SamplingParams(max_tokens=4, temperature=0, pooling="mean"))
        llm.engine.step()
        llm.engine.step()
        llm.engine.scheduler.preempt(request)
        while request.finish_reason is None:
            llm.engine.step()
        assert request.preemptions == 1 and len(request.generated) == 4
        check(model, [ids], [request.embedding], "mean")


def test_a_sequence_goes_on_after_its_embedding(tmp_path):
    """Text and vector of one request; a preempted text leaves the vector as it is."""
    model = make("llama", "gqa", tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        (ids,) = prompts(llm.engine.vocab, (20,))
        plain = llm.generate(ids, SamplingParams(max_tokens=9, temperature=0))[0]
        assert plain.embedding is None
        request = llm.add(ids, SamplingParams(max_tokens=9, temperature=0, pooling="last"))
        for _ in range(4):
            llm.engine.step()
        llm.engine.scheduler.preempt(request)
        while request.finish_reason is None:
            llm.engine.step()
        assert request.generated == plain.token_ids
        check(model, [ids], [request.embedding], "last")


def test_beside_a_drafter(tmp_path):
    model = make("llama", "gqa", tmp_path / "model")
    noisy_copy(tmp_path / "model", tmp_path / "draft")
    config = {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "model": str(tmp_path / "draft"),
    }
    with LLM(tmp_path / "model", speculative_config=config, max_num_batched_tokens=32, **OPTIONS) as llm:
        many = prompts(llm.engine.vocab, (40, 3, 17))
        plain = SamplingParams(max_tokens=12, temperature=0)
        before = [r.token_ids for r in llm.generate(many, plain)]
        for pooling in ("last", "mean"):
            check(model, many, llm.embed(many, pooling, normalize=False), pooling)
        assert [r.token_ids for r in llm.generate(many, plain)] == before
        assert llm.engine.metrics.counters["spec_decode_failures_total"] == 0


@pytest.mark.parametrize("process", [False, True])
def test_of_an_engine_that_serves(tmp_path, process):
    make("llama", "gqa", tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        many = prompts(llm.engine.vocab, (20, 5))
        want = llm.embed(many, "mean", 10)

    async def ask() -> list[list[float]]:
        async with AsyncLLM(str(tmp_path), process=process, **OPTIONS) as engine:
            with pytest.raises(UsageError, match="dimensions"):
                await engine.embed(many[0], dimensions=65)
            assert engine.info.width == 64
            return await asyncio.gather(*(engine.embed(p, pooling="mean", dimensions=10) for p in many))

    assert torch.tensor(asyncio.run(ask())) == pytest.approx(torch.tensor(want), abs=1e-6)


def test_vectors_are_cut_before_they_are_scaled(tmp_path):
    make("llama", "gqa", tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        (ids,) = prompts(llm.engine.vocab, (12,))
        raw, cut = llm.embed(ids, normalize=False)[0], llm.embed(ids, dimensions=8)[0]
    kept = torch.tensor(raw[:8], dtype=torch.float64)
    assert torch.tensor(cut, dtype=torch.float64) == pytest.approx(kept / kept.norm(), abs=1e-12)
    assert finish_embedding([0.0, 0.0]) == [0.0, 0.0]  # nothing has no direction


def test_what_cannot_be(tmp_path, monkeypatch):
    make("llama", "gqa", tmp_path)
    with LLM(tmp_path, max_model_len=32, **OPTIONS) as llm:
        for pooling in ("max", "", ["mean"]):
            with pytest.raises(UsageError, match="pooling"):
                llm.embed([1], pooling)
        for dimensions in (0, 65, 2.0, True):
            with pytest.raises(UsageError, match="dimensions"):
                llm.embed([1], dimensions=dimensions)
        assert len(llm.embed([1] * 31)) == 1
        with pytest.raises(CapacityError):
            llm.embed([1] * 32)
        inner = llm.runner.run

        def broken(batch):
            logits, hidden = inner(batch)
            return logits, torch.where(batch.positions[:, None] == 20, torch.nan, hidden)

        monkeypatch.setattr(llm.runner, "run", broken)
        with pytest.warns(UserWarning, match="1 of 2"), pytest.raises(GenerationError, match="NaN"):
            llm.embed([[1] * 25, [2] * 5], "mean")
        assert len(llm.embed([[1] * 25], "last")) == 1  # it looks at another row
        assert llm.engine.pools.used == 0
