"""Caches with the checkpoint's static scales: where they are used, what is said where they are not, and refusals."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.exports.export import export_model
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import CheckpointError, InferplaneWarning, UsageError
from inferplane.plugins import host
from tests.e2e.drafters import eagle_head
from tests.e2e.tiny_models import config_of, make, random_model

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 200}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SCHEME = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
TYPES = {"fp8": "float", "int8": "int"}
PROMPT = [(7 * i + 3) % 150 for i in range(70)]


def add_scales(folder, kv_dtype, scales, form="self_attn.{}_scale"):
    """Write scales of K and V into a model, as llm-compressor does."""
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in scales.items():
        for part, value in zip("kv", pair, strict=False):
            tensors[f"model.layers.{layer}.{form.format(part)}"] = torch.tensor([value])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    scheme = {**SCHEME, "type": TYPES[kv_dtype]}
    stated = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return folder


@pytest.fixture
def llama(tmp_path):
    make("llama", "gqa", tmp_path / "llama")
    return tmp_path / "llama"


def scales_in(llm):
    return [kv.scale_values for kv in llm.engine.runner.cache.layers]


def run(folder, **options):
    """Logits of a prompt, the scales of the caches if they are static, and what `explain` says of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)
        with LLM(folder, **OPTIONS, **options) as llm:
            static = hasattr(llm.engine.runner.cache.layers[0], "scale_values")
            return llm.logits(PROMPT)[0], scales_in(llm) if static else None, llm.explain().get("kv_scales")


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_each_layer_has_its_own(kv_dtype, llama):
    """And so near the model's own results as rounding allows."""
    plain, *_ = run(llama)
    given = {0: (0.05, 0.03), 1: (0.04, 0.06)}
    add_scales(llama, kv_dtype, given)
    got, scales, said = run(llama, kv_cache_dtype=f"{kv_dtype}_static")
    assert scales == [pytest.approx(pair) for pair in given.values()]
    assert said["used"] and f"({kv_dtype})" in said["note"]
    dynamic, no_scales, other = run(llama, kv_cache_dtype=kv_dtype)
    assert no_scales is None and not other["used"] and "more exact" in other["note"]
    errors = [(x - plain).square().mean() / plain.square().mean() for x in (got, dynamic)]
    assert 0 < errors[1] < errors[0] < 1e-2


def test_a_scale_that_clips_changes_results(llama):
    """So the scales that are there are those that count."""
    add_scales(llama, "int8", {0: (1e-4, 1e-4), 1: (1e-4, 1e-4)})
    clipped, *_ = run(llama, kv_cache_dtype="int8_static")
    wide = add_scales(llama, "int8", {0: (0.05, 0.05), 1: (0.05, 0.05)})
    assert (run(wide, kv_cache_dtype="int8_static")[0] - clipped).abs().max() > 0.1


def test_auto_stays_in_the_models_dtype_and_says_so(llama):
    plain, *_ = run(llama)
    add_scales(llama, "fp8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    with pytest.warns(
        InferplaneWarning, match=r"kv_cache_scheme.* not used: entries are in float32; kv_cache_dtype=fp8"
    ):
        llm = LLM(llama, **OPTIONS)
    with llm:
        assert torch.equal(llm.logits(PROMPT)[0], plain)
        assert "\nKV cache: static scales of the checkpoint" in llm.explain_text()


def test_fp8_without_scales_has_a_scale_of_1(llama):
    _, scales, said = run(llama, kv_cache_dtype="fp8_static")
    assert scales == [(1.0, 1.0)] * 2 and said == {"used": False, "note": "scales of 1: the checkpoint has none"}
    with pytest.warns(InferplaneWarning, match="scales of 1: the checkpoint has none"):
        LLM(llama, **OPTIONS, kv_cache_dtype="fp8_static").close()


def test_scales_of_another_dtype_are_not_used(llama):
    add_scales(llama, "int8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    _, scales, said = run(llama, kv_cache_dtype="fp8_static")
    assert scales == [(1.0, 1.0)] * 2 and "are for int8, and the cache is in fp8; its scales are 1" in said["note"]


def test_int8_without_scales_says_how_to_calibrate(llama):
    with pytest.raises(UsageError, match=r"needs static scales, .* has none for int8.*quantize .* --kv-cache int8"):
        LLM(llama, **OPTIONS, kv_cache_dtype="int8_static")
    with pytest.raises(UsageError, match=r"kv_cache_dtype = 'int4_static'"):
        LLM(llama, **OPTIONS, kv_cache_dtype="int4_static")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused_where_it_is_needed(value, llama):
    add_scales(llama, "fp8", {0: (0.05, 0.03), 1: (0.04, value)})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale, a scale of the KV cache, is"):
        run(llama, kv_cache_dtype="fp8_static")
    assert run(llama)[1] is None


@pytest.mark.parametrize("given", [{0: (0.05, 0.03)}, {0: (0.05, 0.03), 1: (0.04,)}])
def test_a_layer_that_lacks_scales(given, llama):
    add_scales(llama, "fp8", given)
    with pytest.raises(CheckpointError, match=r"1 layer\(s\) lack a scale .*model\.layers\.1"):
        run(llama, kv_cache_dtype="fp8_static")


def test_results_do_not_depend_on_chunks_or_on_prefixes(llama):
    add_scales(llama, "int8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    texts = []
    for options in ({}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}):
        with LLM(llama, **OPTIONS, kv_cache_dtype="int8_static", **options) as llm:
            texts += [llm.generate([PROMPT], GREEDY)[0].token_ids for _ in range(2)]
    assert all(text == texts[0] for text in texts)


def test_latents_have_the_scale_of_keys(tmp_path):
    make("deepseek", "q_lora", tmp_path / "model")
    layers = range(json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"])
    add_scales(tmp_path / "model", "int8", {i: (0.05 + 0.01 * i,) for i in layers}, "self_attn.attn.{}_scale")
    _, scales, said = run(tmp_path / "model", kv_cache_dtype="int8_static")
    assert scales == [pytest.approx((0.05 + 0.01 * i,)) for i in layers] and said["used"]


def test_layers_that_share_memory_have_their_own(tmp_path):
    """Those of several block tables lie in one storage."""
    kinds = 2 * ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = config_of("qwen3", "window", num_hidden_layers=8, layer_types=kinds, sliding_window=13)
    random_model(config).to(torch.float32).save_pretrained(tmp_path / "model")
    given = {i: (0.04 + 0.005 * i, 0.03 + 0.005 * i) for i in range(8)}
    add_scales(tmp_path / "model", "int8", given)
    with LLM(tmp_path / "model", **OPTIONS, kv_cache_dtype="int8_static") as llm:
        cache = llm.engine.runner.cache
        assert cache.num_tables == 4 and len(cache.storages()) == 2
        assert scales_in(llm) == [pytest.approx(pair) for pair in given.values()]
        assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 12


def test_a_plain_checkpoint_may_have_them(llama):
    """Without an entry in its config they are for FP8, as in vLLM; nothing is said of unread tensors."""
    add_scales(llama, "fp8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    config = json.loads((llama / "config.json").read_text())
    del config["quantization_config"]
    (llama / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with LLM(llama, **OPTIONS, kv_cache_dtype="fp8_static") as llm:
            assert scales_in(llm)[1] == pytest.approx((0.04, 0.06))
    assert not [str(w.message) for w in said if "_scale" in str(w.message)]


def test_a_head_that_drafts_has_none_of_the_models(llama, tmp_path):
    """Its files count layers from 0, too."""
    eagle_head(tmp_path / "head", 64, 160)
    add_scales(llama, "fp8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    eagle = {"method": "eagle", "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    with LLM(llama, **OPTIONS, kv_cache_dtype="fp8_static", speculative_config=eagle) as llm:
        assert scales_in(llm) == [pytest.approx((0.05, 0.03)), pytest.approx((0.04, 0.06)), (1.0, 1.0)]
        assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 12
    add_scales(llama, "int8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    with pytest.raises(UsageError, match=r"A layer that drafts .* has no static scales"):
        LLM(llama, **OPTIONS, kv_cache_dtype="int8_static", speculative_config=eagle)


def test_an_export_leaves_broken_scales_out(llama, tmp_path):
    """Where the cache has no use for them, so that loading did not refuse them."""
    add_scales(llama, "fp8", {0: (0.05, 0.03), 1: (0.04, 0.0)})
    with pytest.warns(InferplaneWarning, match="no scales of the KV cache: .*v_scale"):
        export_model(ModelFiles(llama), host(), "cpu", RunnerOptions(dtype="float32"), tmp_path / "export")
    assert run(tmp_path / "export")[1] is None


def test_an_export_brings_them(llama, tmp_path):
    add_scales(llama, "int8", {0: (0.05, 0.03), 1: (0.04, 0.06)})
    want, scales, _ = run(llama, kv_cache_dtype="int8_static")
    export_model(ModelFiles(llama), host(), "cpu", RunnerOptions(dtype="float32"), tmp_path / "export")
    got, again, said = run(tmp_path / "export", kv_cache_dtype="int8_static")
    assert again == scales and said["used"] and torch.equal(got, want)
