"""Quantizing while reading: which weights, how exactly, one at a time, and what is refused."""

import json
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from inferplane import LLM
from inferplane.binding import DictSource, PlanSettings, view_of
from inferplane.cli import main
from inferplane.engine import InferplaneWarning
from inferplane.engine.request.arguments import QUANTIZATIONS
from inferplane.errors import CheckpointError, UsageError
from inferplane.ops import FORMATS, encode
from inferplane.plugin import When
from inferplane.quant.online import (
    SCHEMES,
    explain_no_savings,
    find_scheme,
    latent_formats,
    quantize,
    quantize_on_load,
    takes_as_stored,
)
from inferplane.quant.schemes import FP8_BLOCKS
from inferplane.types import ActivationQuant, Features, QTensor, Shard
from inferplane_cpu.kernels.packing import Panels
from inferplane_cpu.native import instruction_sets
from tests.e2e.tiny_models import deepseek_config, llama_config, random_model
from tests.unit.support.small import kernel

WEIGHT_ONLY = {"weight_only_int8": "int8_group", "weight_only_int4": "int4_group32"}
IN_MEMORY = {"weight_only_int4": "int4_min32"}
"""Formats that come first where a kernel reads them."""
FOLDABLE = WEIGHT_ONLY | {f"weight_only_{format}": format for format in ("mxfp4", "nvfp4")}


@pytest.mark.parametrize("format", WEIGHT_ONLY.values())
@pytest.mark.parametrize("shape", [(5, 7), (33, 256), (3000, 130)])
def test_rounds_to_the_nearest(format, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    w[1] = 0
    q = quantize(w, format)
    top = 2 ** (FORMATS[format][1] - 1) - 1
    lowest = -top - 1 if FORMATS[format][1] == 4 else -top
    assert q.data.max() <= top and q.data.min() >= lowest
    assert torch.equal(q.scale.half().float(), q.scale), "scales fit two bytes"
    step = q.expand_scale().abs()
    saturated = (q.data == top) & (FORMATS[format][1] == 4)  # by up to a step: the other side of -8
    assert ((q.dequantize() - w.float()).abs() <= step * (0.51 + 0.5 * saturated) + w.float().abs() * 2**-11).all()
    assert (q.data[1] == 0).all() and torch.isfinite(q.scale).all()


@pytest.mark.parametrize("format", [*WEIGHT_ONLY.values(), "int8_row"])
@pytest.mark.parametrize("shape", [(5, 7), (33, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_give_what_the_whole_gives(format, shape, dtype, monkeypatch):
    """And leave the plain weight as it is, whose memory a float32 one shares with them."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    before, whole = w.clone(), quantize(w, format)
    for numbers in (1, 3 * shape[1]):
        monkeypatch.setattr(sys.modules[quantize.__module__], "NUMBERS", numbers)
        q = quantize(w, format)
        assert torch.equal(q.data, whole.data) and torch.equal(q.scale, whole.scale)
    assert torch.equal(w, before)


def test_scales_beyond_float16_stay_exact():
    w = torch.tensor([[1e9, -3e8], [1e-12, 2e-13]])
    q = quantize(w, "int8_group")
    assert torch.allclose(q.dequantize().amax(1), w.amax(1), rtol=1e-3)


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_linear_layers_only(scheme):
    format_of = quantize_on_load(scheme, {}).format_of
    p = "model.layers.3."
    for name in ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "mlp.experts.7.down_proj"):
        assert format_of(f"{p}{name}.weight") == WEIGHT_ONLY[scheme]
    for name in ("qkv", "z", "qkvz", "b", "a", "ba"):  # of delta nets: what the last three give are gates
        of_gates = set(name) <= {"a", "b"}
        assert format_of(f"{p}linear_attn.in_proj_{name}.weight") == ("plain" if of_gates else WEIGHT_ONLY[scheme])
    assert format_of(f"{p}block_sparse_moe.experts.1.w2.weight") == WEIGHT_ONLY[scheme]
    assert format_of("lm_head.weight") == "int8_group"
    for name in ("model.embed_tokens", f"{p}self_attn.kv_b_proj", f"{p}mlp.gate", f"{p}input_layernorm"):
        assert format_of(f"{name}.weight") == "plain"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_attention_folds_is_quantized_where_its_kernels_read_it_so(scheme):
    """And where no activations are coded for it."""
    name, every = "model.layers.3.self_attn.kv_b_proj.weight", frozenset(FORMATS)
    assert (
        quantize_on_load(scheme, {}).format_of(name)
        == quantize_on_load(scheme, {}, every - set(SCHEMES[scheme].dense)).format_of(name)
        == "plain"
    )
    assert quantize_on_load(scheme, {}, every).format_of(name) == FOLDABLE.get(scheme, "plain")
    *_, last = SCHEMES[scheme].dense
    assert quantize_on_load(scheme, {}, {last}).format_of(name) == (last if scheme in FOLDABLE else "plain")


def test_formats_that_both_forms_of_latent_attention_read():
    def reads(op, *formats, provider="vendor", **options):
        return kernel(op, provider, when=When((torch.bfloat16,), ("plain", *formats), **options))

    settings = PlanSettings("toy", torch.bfloat16, "", Features())
    absorbed, expanded = (
        reads("mla_absorbed", "int8_group", "int4_row"),
        reads("mla_expanded", "int8_group", "int8_row"),
    )

    def found(*kernels, settings=settings, layouts=("paged_16",), **pins):
        return latent_formats(kernels, settings, layouts, pins)

    assert found(absorbed, expanded) == {"int8_group"}
    assert not found(absorbed)
    assert not found(absorbed, reads("mla_expanded", "int8_group", features=("tiles",)))
    assert not found(absorbed, expanded, settings=replace(settings, deterministic=True))
    assert not found(absorbed, expanded, settings=replace(settings, dtype=torch.float32))
    paged = reads("mla_absorbed", "int8_group", kv_layouts=("paged_16",))
    assert found(paged, expanded) == {"int8_group"} and not found(paged, expanded, layouts=("paged_16_fp8",))
    other = reads("mla_expanded", provider="other")
    assert found(absorbed, expanded, other, mla_expanded="vendor") == {"int8_group"}
    assert not found(absorbed, expanded, other, mla_expanded="other")


@pytest.mark.skipif(not instruction_sets(), reason="not run: no native kernels")
@pytest.mark.parametrize(
    "options", [{"kv_dtype": "int4"}, {"ops": {"mla_expanded": "torch_sdpa"}}], ids=["cache", "pin"]
)
def test_latent_attention_stays_exact_where_nothing_would_be_saved(options, tmp_path):
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization="weight_only_int4", **options) as llm:
        weights = llm.runner.plan.weights.values()
        assert {w.format for w in weights if any("kv_b_proj" in p for p in w.parts)} == {"plain"}
        assert torch.isfinite(llm.logits([[1, 2, 3]])[0]).all()


@pytest.mark.skipif(not instruction_sets(), reason="not run: no native kernels")
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("deterministic", [False, True])
def test_latent_attention_answers_nearly_the_same(scheme, deterministic, tmp_path):
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(tmp_path)
    ids = [list(range(1, 40))]
    found = {}
    for quantization in (None, scheme):
        options = {"quantization": quantization, "deterministic": deterministic, "dtype": "bfloat16"}
        with LLM(tmp_path, device="cpu", **options) as llm:
            found[quantization] = llm.logits(ids, chunk_tokens=7)[0]
            kv_b = {w.format for w in llm.runner.plan.weights.values() if any("kv_b_proj" in p for p in w.parts)}
            assert kv_b == {WEIGHT_ONLY.get(quantization, "plain")}
            assert not llm.runner.plan.dequantized
    got, want = found[scheme], found[None]
    correlation = torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1]
    assert correlation > (0.995 if scheme == "weight_only_int8" else 0.95)  # of all weights, and tokens change experts
    assert not torch.equal(got, want)


def test_a_rank_reads_its_slice():
    w = torch.randn(8, 256)
    read = quantize_on_load("weight_only_int8", {}).readers["int8_group"]
    source = DictSource({"w": w})
    q = read(source, "w", Shard(1, 1, 2))
    assert isinstance(q, QTensor)
    assert torch.equal(q.dequantize(), quantize(w[:, 128:], "int8_group").dequantize())
    assert torch.equal(read(source, "w", Shard(0, 1, 2)).data, quantize(w[4:], "int8_group").data)


def test_what_is_refused():
    with pytest.raises(UsageError, match="weight_only_int4"):
        quantize_on_load("int3", {})
    readers = quantize_on_load("weight_only_int8", {}).readers
    with pytest.raises(CheckpointError, match="cannot be quantized"):
        readers["int8_group"](DictSource({"w": torch.ones(4, 4, dtype=torch.int8)}), "w", Shard())


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_answers_nearly_the_same(scheme, tied, tmp_path):
    config = llama_config(hidden_size=128, intermediate_size=192, tie_word_embeddings=tied)
    random_model(config, seed=3).save_pretrained(tmp_path)
    ids = [list(range(1, 40))]
    with LLM(tmp_path, device="cpu", dtype="bfloat16") as llm:
        want = llm.logits(ids)[0]
    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization=scheme) as llm:
        got = llm.logits(ids)[0]
        formats = {w.format for w in llm.runner.plan.weights.values()}
    assert formats == {"plain", "int8_group", IN_MEMORY.get(scheme, WEIGHT_ONLY[scheme])}
    correlation = torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1]
    assert correlation > (0.999 if scheme == "weight_only_int8" else 0.97)
    assert not torch.equal(got, want)


def test_minimums_and_scales_are_fitted_and_integers_of_a_unit():
    w = torch.randn(64, 600, generator=torch.Generator().manual_seed(0)) + 0.3
    w[3], w[4, :32], w[5, 100], w[6] = 0, 7.5, torch.inf, 2.0**-30
    found, plain = quantize(w, "int4_min32"), encode(w, "int4_min32")
    others = [row for row in range(64) if row not in (3, 4, 5, 6)]
    wrong, less = ((q.dequantize()[others] - w[others]).square().mean() for q in (plain, found))
    assert less < 0.9 * wrong
    assert found.dequantize()[5].isnan().nonzero().flatten().tolist() == list(range(96, 128))
    assert not found.dequantize()[3].any()
    assert (found.dequantize()[4, :32] - 7.5).abs().max() < 0.03
    assert (found.dequantize()[6] / 2.0**-30 - 1).abs().max() < 0.01
    for numbers in (found.scale, found.minimum):
        of_unit = numbers[others][:, :16].unflatten(1, (2, 8)).abs()
        multiples = 127 * of_unit / of_unit.amax(-1, keepdim=True)
        assert (multiples - multiples.round()).abs().max() < 0.06 and len(multiples.round().unique()) > 50


@pytest.mark.parametrize("outlier", [30.0, 1000.0, 1e5])
def test_an_outlier_spoils_no_neighbour(outlier):
    """One in a row of 512, or a column: other groups of its 256 columns lose no more than in symmetric groups."""
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    w[:32, 40] *= outlier
    w[32, 7] = outlier
    rest = torch.ones(512, dtype=torch.bool)
    rest[:64] = False
    found, plain = (quantize(w, f).dequantize()[:, rest] - w[:, rest] for f in ("int4_min32", "int4_group32"))
    assert found.square().mean() < 0.85 * plain.square().mean()


def test_the_largest_numbers_stay_finite():
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * 1e37
    found = quantize(w, "int4_min32").dequantize()
    assert found.isfinite().all() and (found - w).abs().max() < 0.1 * w.abs().max()


@pytest.mark.skipif(not instruction_sets(), reason="not run: no native kernels")
def test_fitted_scales_take_a_byte_each():
    """So do minimums: 4.625 bits an entry."""
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert Panels(quantize(w, "int4_min32")).nbytes * 8 == 4.625 * w.numel()


@pytest.mark.parametrize("format", ["int4_group32", "int4_group64", "int4_group", "int4_row"])
def test_four_bits_are_used_whole(format):
    """The entry of the largest magnitude becomes -8: steps are an eighth of it. Groups of zeros stay zeros."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    w[3] = 0
    plain, signed = encode(w, format), quantize(w, format)
    assert int(plain.data.min()) == -7 and int(signed.data.min()) == -8 and int(signed.data.max()) <= 7
    assert not signed.dequantize()[3].any()
    wrong, less = ((q.dequantize() - w).square().mean() for q in (plain, signed))
    assert less < 0.85 * wrong
    step = (signed.scale.abs() / 2)[:, :, None]
    tiles = (signed.dequantize() - w).unflatten(1, (signed.scale.shape[1], -1)).abs()
    # Entries beyond 7 steps on the other side saturate, by half a step at most.
    assert (tiles <= 2 * step + 2**-11 * w.abs().max()).all()


def test_the_head_has_a_format_of_its_own():
    of = lambda *more: quantize_on_load("weight_only_int4", {}, (), {}, *more).format_of("lm_head.weight")  # noqa: E731
    assert [of(), of("auto"), of("int8"), of("int4"), of("none")] == [*("int8_group",) * 3, "int4_group32", "plain"]
    assert find_scheme("a8w8_fp8").head == () and find_scheme("a8w8_fp8", "int8").head == ("int8_group", "int8_row")
    config, options = llama_config(), {"device": "cpu", "dtype": "bfloat16", "load_format": "dummy"}
    with LLM(config, quantization="weight_only_int4", head_format="none", **options) as llm:
        assert llm.runner.model.head.weight.format == "plain"
    with pytest.raises(UsageError, match=r"head_format = 'int3'.*'auto', 'int8', 'int4', 'none'"):
        LLM(config, head_format="int3", **options)


def test_fp8_beside_int4_experts():
    found = quantize_on_load("a8w8_fp8_wint4", {})
    p = "model.layers.3."
    for name in ("self_attn.q_b_proj", "mlp.gate_proj", "mlp.shared_experts.down_proj"):
        assert found.format_of(f"{p}{name}.weight") == "fp8_block"
    for name in ("mlp.experts.7.down_proj", "block_sparse_moe.experts.1.w2"):
        assert found.format_of(f"{p}{name}.weight") == "int4_group64"
    for name in ("lm_head", "model.embed_tokens", f"{p}self_attn.kv_b_proj", f"{p}mlp.gate"):
        assert found.format_of(f"{name}.weight") == "plain"
    quants = found.activation_quants
    assert quants["fp8_block"] == quants["int4_group64"] == FP8_BLOCKS and quants["fp8_row"] == ActivationQuant("fp8")
    assert found.readers.keys() == quants.keys()


def test_rows_of_int8_with_activations_in_int8():
    found = quantize_on_load("a8w8", {})
    names = {name: found.format_of(f"{name}.weight") for name in ("lm_head", "a.q_proj", "a.experts.0.w1", "a.norm")}
    assert list(names.values()) == ["int8_group", "int8_row", "int8_row", "plain"]
    assert found.activation_quants == {"int8_row": ActivationQuant("int8")} and found.readers.keys() == {
        "int8_row",
        "int8_group",
    }
    assert quantize_on_load("a8w8c8", {}).activation_quants == found.activation_quants


@pytest.mark.parametrize(
    ("scheme", "first", "quant"),
    [
        ("a8w4", "int4_group32", ActivationQuant("int8")),
        ("a4w4", "int4_group32", ActivationQuant("int4")),
        ("a4w4_mxfp4", "mxfp4", ActivationQuant("mxfp4", 32)),
    ],
)
def test_4_bits_with_activations_in_8_or_4(scheme, first, quant):
    found = quantize_on_load(scheme, {})
    names = {name: found.format_of(f"{name}.weight") for name in ("lm_head", "a.q_proj", "a.experts.0.w1", "a.norm")}
    assert list(names.values()) == ["int8_group", first, first, "plain"]
    assert found.activation_quants == dict.fromkeys(SCHEMES[scheme].dense, quant)


@pytest.mark.skipif(not instruction_sets(), reason="not run: no native kernels")
@pytest.mark.parametrize("make", [llama_config, deepseek_config])
@pytest.mark.parametrize(
    ("scheme", "ending", "least"), [("a8w4", "_w4a8", 0.97), ("a4w4", "_w4a4", 0.8), ("a4w4_mxfp4", "_w4a4_mxfp4", 0.8)]
)
def test_products_with_activations_in_8_or_4_bits_run(scheme, ending, least, make, tmp_path):
    """By the kernels that round them so, which `explain` says, in prompts and while decoding."""
    random_model(make(num_hidden_layers=2), seed=3).save_pretrained(tmp_path)
    ids = [list(range(1, 40))]
    with LLM(tmp_path, device="cpu", dtype="bfloat16") as llm:
        want = llm.logits(ids)[0]
    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization=scheme) as llm:
        got, found = llm.logits(ids)[0], llm.explain()
    assert found["activation_quant_skipped"] == [] and found["dequantized"] == []
    sites = [x for x in found["sites"] if x["chosen"]["provider"] == "native" and "quantizes" in x["chosen"]["why"]]
    assert {site["step_kind"] for site in sites} == {"decode", "mixed"}
    assert all(site["chosen"]["kernel"].endswith(ending) for site in sites)
    assert torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1] > least
    assert not torch.equal(got, want)


def test_blocks_of_fp8_and_a_plain_head():
    found = quantize_on_load("a8w8_fp8", {})
    names = {name: found.format_of(f"{name}.weight") for name in ("lm_head", "a.q_proj", "a.experts.0.w1", "a.norm")}
    assert list(names.values()) == ["plain", "fp8_block", "fp8_block", "plain"]
    assert found.activation_quants == {"fp8_block": FP8_BLOCKS, "fp8_row": ActivationQuant("fp8")}


def test_both_tables_have_the_same_names():
    assert list(SCHEMES) == list(QUANTIZATIONS)


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, False),
        ({"quant_method": "gguf", "types": {}}, False),
        (None, False),
    ],
)
def test_an_fp8_checkpoint_is_what_a8w8_fp8_makes(config, taken):
    stored = {} if config is None else {"quantization_config": config}
    assert takes_as_stored("a8w8_fp8", stored) == takes_as_stored("a8w8c8_fp8", stored) == taken
    assert not any(takes_as_stored(name, stored) for name in SCHEMES if name not in ("a8w8_fp8", "a8w8c8_fp8"))


def test_settings_that_are_not_read_are_in_no_schemes_format():
    unread = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4}
    for settings in (unread, {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": [1]}):
        assert not any(takes_as_stored(name, {"quantization_config": settings}) for name in SCHEMES)


def test_scales_of_nvfp4_fit_float16():
    """Also those of groups of zeros, and beside weights of little magnitude."""
    w = 0.015 * torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    w[3, 16:32] = 0
    q = quantize(w, "nvfp4")
    assert torch.equal(q.scale.half().float(), q.scale) and (q.dequantize()[3, 16:32] == 0).all()


@pytest.mark.parametrize("shape", [(5, 7), (300, 200), (3000, 130)])
def test_fp8_blocks_are_those_of_the_whole(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    got, want = quantize(w, "fp8_block"), encode(w, "fp8_block")
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8)) and torch.equal(got.scale, want.scale)
    assert got.block == (128, 128)


def test_experts_in_int4_and_the_rest_in_fp8_answer_nearly_the_same(tmp_path):
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(tmp_path)
    ids = [list(range(1, 40))]
    with LLM(tmp_path, device="cpu", dtype="bfloat16") as llm:
        want = llm.logits(ids)[0]
    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization="a8w8_fp8_wint4") as llm:
        got = llm.logits(ids)[0]
        weights = [w for w in llm.runner.plan.weights.values() if w.format != "plain"]
    assert {(len(w.shape), w.format, str(w.activation_quant)) for w in weights} == {
        (2, "fp8_block", "fp8"),
        (3, "int4_group64", "fp8"),
    }
    assert torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1] > 0.98
    assert not torch.equal(got, want)


@pytest.mark.parametrize(
    ("scheme", "format", "layout"),
    [("a8w8c8", "int8_row", "int8"), ("a8w8_fp8", "fp8_block", ""), ("a8w8c8_fp8", "fp8_block", "fp8")],
)
def test_8_bits_answer_nearly_the_same(scheme, format, layout, tmp_path):
    config = llama_config(hidden_size=128, intermediate_size=192, tie_word_embeddings=False)
    random_model(config, seed=3).save_pretrained(tmp_path)
    ids = [list(range(1, 40))]
    with LLM(tmp_path, device="cpu", dtype="bfloat16") as llm:
        want = llm.logits(ids)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)  # fp8 entries are read by torch
        llm = LLM(tmp_path, device="cpu", dtype="bfloat16", quantization=scheme)
    with llm:
        got, plan = llm.logits(ids)[0], llm.runner.plan
        assert llm.runner.options.kv_cache_dtype == (layout or "auto")
    assert {x.name.removeprefix("paged_16").lstrip("_") for x in plan.layouts.values()} == {layout}
    assert {w.format for w in plan.weights.values()} - {"plain", "int8_group"} == {format}
    assert torch.corrcoef(torch.stack((got.flatten(), want.flatten())))[0, 1] > 0.99
    assert not torch.equal(got, want)


def test_an_fp8_checkpoint_is_taken_as_it_is():
    ids = [list(range(1, 40))]
    found = []
    for options in ({}, {"quantization": "a8w8_fp8"}):
        with LLM("demo", device="cpu", dtype="bfloat16", **options) as llm:
            found.append(llm.logits(ids)[0])
    assert torch.equal(*found)


def test_experts_are_quantized_one_by_one(tmp_path):
    random_model(deepseek_config(num_hidden_layers=2), seed=3).save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization="weight_only_int8") as llm:
        stacks = [w for w in llm.runner.plan.weights.values() if len(w.shape) == 3 and w.parts]
        assert {w.format for w in stacks} == {"int8_group"}
        assert torch.isfinite(llm.logits([[1, 2, 3]])[0]).all()


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_who_quantizes_for_nothing_is_told(scheme, tmp_path, capsys, monkeypatch):
    """No kernel here takes integers beside float32 activations: such weights are rounded, and as large as before."""
    random_model(llama_config(hidden_size=128, intermediate_size=256), seed=3).save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        plain = llm.runner.plan.weight_bytes
    with pytest.warns(InferplaneWarning, match=f"{scheme}' saves nothing for 9 of 9 weights: .* linear.* in float32"):
        llm = LLM(tmp_path, device="cpu", dtype="float32", quantization=scheme)
    with llm:
        assert llm.runner.plan.weight_bytes == plain
    if not instruction_sets():
        pytest.skip("without the native library no kernel takes them in bfloat16 either")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization=scheme) as llm:
            assert llm.runner.plan.weight_bytes < plain / 2 and not explain_no_savings(llm.runner.plan, scheme)

    monkeypatch.setattr(main, "prepare", lambda environment: None)
    words = ("estimate", str(tmp_path), "--device", "cpu", "--quantization", scheme, "--dtype")
    for dtype, told in (("float32", 1), ("bfloat16", 0)):
        assert main.main([*words, dtype, "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["weight_bytes"] and err.count("saves nothing for 9 of 9 weights") == told


@pytest.mark.parametrize(
    ("scheme", "head_format"),
    [("weight_only_int8", "auto"), ("weight_only_int4", "auto"), ("weight_only_int4", "int4")],
)
def test_a_tied_head_is_held_once(scheme, head_format, tmp_path):
    """The embedding's rows come out of the head's panels; where no kernel reads them, it stays plain beside it."""
    if not instruction_sets():
        pytest.skip("without the native library no kernel reads rows of quantized weights")
    config = llama_config(hidden_size=128, intermediate_size=192, tie_word_embeddings=True)
    random_model(config, seed=3).to(torch.bfloat16).save_pretrained(tmp_path)
    ids = torch.arange(160)

    def held(llm):
        """Bytes of what is packed, by identity."""
        found = {id(x): x for x in llm.runner.loaded.packed.values()}
        return sum(x.nbytes for x in found.values())

    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization=scheme, head_format=head_format) as llm:
        once, model = held(llm), llm.runner.model
        assert model.embed.weight is model.head.weight and not llm.runner.plan.count_copied_bytes()
        packed = llm.runner.loaded.packed[id(model.head.weight), "native.panels"]
        rows, head = view_of(view_of(llm.runner.steps["decode"]).body).embed(ids), packed.nbytes
    with LLM(tmp_path, device="cpu", dtype="bfloat16") as llm:
        plain = llm.runner.loaded.packed[id(llm.runner.model.embed.weight), "canonical"]
    quantized = quantize(plain, model.head.weight.format)
    assert torch.equal(rows, quantized.dequantize(torch.bfloat16))
    layers = [w for w in model.weights() if w[0].startswith("layers.")]
    assert once < head + sum(w.nbytes(torch.bfloat16) for _, w in layers) + 2**16
    assert head < plain.nbytes * (0.29 if head_format == "int4" else 0.52)
    with pytest.warns(InferplaneWarning, match="saves nothing"):
        llm = LLM(tmp_path, device="cpu", dtype="float32", quantization=scheme)
    with llm:
        assert llm.runner.model.embed.weight is not llm.runner.model.head.weight
        assert llm.runner.model.embed.weight.format == "plain"
