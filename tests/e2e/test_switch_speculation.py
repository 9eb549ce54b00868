"""One loaded model drafts by one method after the other: its weights are read once, memory and errors are right."""

from __future__ import annotations

import pytest

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.loading import weight_loading
from inferplane.errors import CapacityError, CheckpointError, UsageError
from tests.e2e.drafters import eagle_head, mtp_alone, noisy_copy, with_mtp
from tests.e2e.tiny_models import deepseek_config, prompts, random_model

BUDGET = 400_000
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    at = tmp_path_factory.mktemp("models")
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(at / "model")
    with_mtp(at / "model")
    mtp_alone(at / "model", at / "mtp")
    eagle_head(at / "eagle", width=64, vocab=160)
    noisy_copy(at / "model", at / "draft")
    return at


def methods(folders):
    return {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 3},
        "mtp": {"method": "mtp", "num_speculative_tokens": 2},
        "mtp int8": {"method": "mtp", "model": folders / "mtp", "draft_quantization": "weight_only_int8"},
        "eagle": {"method": "eagle", "model": folders / "eagle"},
        "draft_model": {"method": "draft_model", "model": folders / "draft", "num_speculative_tokens": 2},
    }


def opened(folders, **options):
    more = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": BUDGET, **options}
    return LLM(folders / "model", **more)


def answers(llm):
    each = [[*p, *p] for p in prompts(160, (9, 20))]
    return [r.token_ids for params in (GREEDY, SEEDED) for r in llm.generate(each, SamplingParams(**params))]


def cache_bytes(llm):
    runners = [r for r in (llm.runner, llm.runner.draft) if r is not None]
    tensors = [t for r in runners for layer in r.cache.layers for t in (*layer.entries, *layer.scales)]
    return sum(t.nbytes - t[-1:].nbytes for t in tensors)  # without the slot for padding


def facts(llm):
    """What a freshly opened model and one that was switched have in common."""
    runner = llm.runner
    return {
        "blocks": runner.cache.blocks,
        "bytes": cache_bytes(llm),
        "length": runner.max_model_len,
        "limit": llm.engine.scheduler.limits.max_model_len,
        "weights": runner.plan.weight_bytes,
        "packed": sorted(label for _, label in runner.loaded.packed),
        "drafters": runner.describe_caches().get("drafters"),
        "sites": [(site["site"], str(site["chosen"])) for site in llm.explain()["sites"]],
    }


def with_strategy(config):
    return config and {**config, "verify_strategy": "target_match"}


def test_every_method_after_every_other(folders, monkeypatch):
    """As if it had been opened so; and only what drafts is read."""
    found, want = methods(folders), {}
    for name, config in found.items():
        with opened(folders, speculative_config=with_strategy(config)) as llm:
            want[name] = answers(llm), facts(llm)
    plain = want["none"][0]
    assert all(tokens == plain for tokens, _ in want.values())
    read = []
    inner = weight_loading.load
    monkeypatch.setattr(
        weight_loading,
        "load",
        lambda plan, source, *a, **k: read.append(set(k["missing"])) or inner(plan, source, *a, **k),
    )
    with opened(folders) as llm:
        own = {id(w) for _, w in llm.runner.base.weights()}
        values = {key: id(value) for key, value in llm.runner.loaded.packed.items()}
        read.clear()
        order = [
            "mtp",
            "none",
            "ngram",
            "mtp int8",
            "eagle",
            "draft_model",
            "mtp",
            "mtp int8",
            "draft_model",
            "none",
            "eagle",
            "ngram",
            "none",
        ]
        for name in order:
            llm.set_speculation(with_strategy(found[name]))
            assert answers(llm) == plain, name
            assert facts(llm) == want[name][1], name
            assert cache_bytes(llm) <= BUDGET
            stats = llm.engine.stats()
            assert name == "none" or stats["spec_decode_num_draft_tokens_total"] > 0
        assert {key: id(value) for key, value in llm.runner.loaded.packed.items()} == values, "the same tensors"
        of_draft_model = [ids for ids in read if not ids & own]
        assert len(of_draft_model) == len(read), "none of the model's weights is read again"


def test_what_is_loaded_is_released(folders):
    with opened(folders) as llm:
        before = len(llm.runner.loaded.packed)
        llm.set_speculation(methods(folders)["draft_model"])
        draft = llm.runner.draft
        answers(llm)
        llm.set_speculation(methods(folders)["mtp"])
        assert not draft.loaded.packed and draft.cache is None and llm.runner.draft is None
        assert len(llm.runner.loaded.packed) > before
        llm.set_speculation(None)
        assert len(llm.runner.loaded.packed) == before and not llm.runner.drafters


def test_layers_that_stay_loaded(folders):
    """mtp=True: switching to them reads nothing, and releases nothing."""
    with opened(folders, mtp=True) as llm:
        plain, packed, cache = answers(llm), llm.runner.loaded.packed, llm.runner.cache
        for name in ("mtp", "ngram", "none", "mtp"):
            llm.set_speculation(with_strategy(methods(folders)[name]))
            assert answers(llm) == plain
            assert llm.runner.loaded.packed is packed and llm.runner.cache is cache
        assert llm.engine.stats()["spec_decode_num_accepted_tokens_total"] > 0


def test_live_requests_keep_it_from_changing(folders):
    with opened(folders) as llm:
        stream = llm.stream(prompts(160, (9,))[0], SamplingParams(**GREEDY))
        first = next(stream)
        with pytest.raises(UsageError, match=r"1 request\(s\) run or wait"):
            llm.set_speculation({"method": "mtp"})
        rest = [token for delta in stream for token in delta.token_ids]
        want = llm.generate(prompts(160, (9,)), SamplingParams(**GREEDY))[0].token_ids
        assert [*first.token_ids, *rest] == want
        llm.set_speculation({"method": "mtp"})
        assert llm.generate(prompts(160, (9,)), SamplingParams(**GREEDY))[0].token_ids == want


def test_an_error_leaves_everything_as_it_was(folders, tmp_path):
    mtp_alone(folders / "model", tmp_path / "lacking", without=("hnorm.weight",))
    with opened(folders, speculative_config=with_strategy(methods(folders)["mtp"])) as llm:
        want, before = answers(llm), facts(llm)
        for config, error, match in (
            (
                {"method": "mtp", "model": tmp_path / "lacking"},
                CheckpointError,
                r"lacking: The checkpoint lacks 1 .*hnorm",
            ),
            ({"method": "eagle", "model": folders / "model"}, CheckpointError, "no EAGLE head"),
            ({"method": "draft_model", "model": tmp_path / "nowhere"}, UsageError, "is no folder"),
            ({"method": "mtp", "num_speculative_tokens": 9}, UsageError, "num_speculative_tokens = 9"),
        ):
            with pytest.raises(error, match=match):
                llm.set_speculation(config)
            assert facts(llm) == before and answers(llm) == want
    with pytest.raises(UsageError, match="closed"):
        llm.set_speculation(None)


def test_a_cache_that_is_too_small_with_the_drafter(folders):
    """The length that was requested fits without the drafter's entries, and not with them."""
    with opened(folders) as llm:
        block, tokens = llm.runner.block_bytes(), llm.runner.block_tokens
    with opened(folders, kv_cache_bytes=4 * block, max_model_len=4 * tokens) as llm:
        want = answers_of_one(llm)
        with pytest.raises(CapacityError, match="max_model_len = "):
            llm.set_speculation({"method": "mtp"})
        assert answers_of_one(llm) == want and llm.runner.cache.blocks == 4


def answers_of_one(llm):
    return llm.generate(prompts(160, (20,)), SamplingParams(**GREEDY))[0].token_ids


def test_prefixes_stay_where_only_n_grams_come(folders):
    prompt = prompts(160, (64,))[0]
    one = SamplingParams(max_tokens=1, temperature=0)
    with opened(folders) as llm:
        llm.generate([prompt], one)
        llm.set_speculation({"method": "ngram"})
        assert llm.generate([prompt], one)[0].timings.cached_tokens == 48
        llm.set_speculation({"method": "mtp"})
        assert llm.generate([prompt], one)[0].timings.cached_tokens == 0, "the layer has no entries of it"


def test_a_switch_that_lacks_memory_for_its_caches_closes_the_model(folders, monkeypatch):
    """The old caches are freed by then: no request may run without one."""
    with opened(folders) as llm:

        def fail(caches):
            raise CapacityError("No memory.", remedy="take less")

        monkeypatch.setattr(llm.runner, "build_caches", fail)
        with pytest.raises(CapacityError):
            llm.set_speculation({"method": "mtp", "num_speculative_tokens": 2})
        with pytest.raises(UsageError, match="closed"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
