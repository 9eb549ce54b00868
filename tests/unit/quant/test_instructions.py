"""What a checkpoint says about its quantization is carried out, refused by name, or told."""

from __future__ import annotations

import json
import warnings

import pytest

from inferplane.errors import InferplaneWarning, UnsupportedModelError
from inferplane.models import Config
from inferplane.models.reading.kv_scales import find_kv_scales
from inferplane.quant import read_quant_config
from tests.unit.quant.test_packed_checkpoints import config

PACKED = config("compressed-tensors", 4, 128, True)
GROUP = PACKED["config_groups"]["group_0"]
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
ROTATIONS = {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
R4 = {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj"], "location": "input"}], "head_dim": 64}}
FOLDED = {"R1": {"type": "random-hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}


def group(**changes):
    return {**PACKED, "config_groups": {"group_0": {**GROUP, **changes}}}


def fp8(inputs=TOKENS, **weights):
    return {
        **PACKED,
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {**FP8, **weights}, "input_activations": inputs}},
    }


REFUSED = {
    "transform_config": {**PACKED, "transform_config": {"config_groups": ROTATIONS}},
    "transform_config of FP8": {**fp8(), "transform_config": {"config_groups": ROTATIONS}},
    "transform_config of another form": {**PACKED, "transform_config": ROTATIONS},
    "sparsity_config": {**fp8(), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "sparsity_config of a list": {**PACKED, "sparsity_config": ["2:4"]},
    "output_activations": group(output_activations=FP8),
    "weights.actorder": group(weights={**GROUP["weights"], "actorder": "by_magnitude"}),
    "weights.actorder of FP8": fp8(actorder="other"),
    "weights.outliers": group(weights={**GROUP["weights"], "outliers": 3}),
    "rotation": {**PACKED, "rotation": "R4"},
    "group_0.lora": group(lora={"rank": 8}),
    "rotation of GPTQ": {**config("gptq", 4, 128, True), "rotation": "hadamard"},
    "adapter": {**config("gptq", 4, 128, True), "adapter": {"name": "lora", "rank": 64}},
    "transform_config of AWQ": {**config("awq", 4, 128, False), "transform_config": ROTATIONS},
    "transforms": {"quant_method": "fp8", "transforms": ["R1"]},
    "extra_config": {**config("gptq", 4, 128, True), "extra_config": {"layers.0": {"bits": 8}}},
    "act_bits": {**config("gptq", 4, 128, True), "act_bits": 8},
    "pack_dtype": {**config("gptq", 4, 128, True), "pack_dtype": "int16"},
    "is_marlin_format": {**config("gptq", 4, 128, True), "is_marlin_format": True},
    "data_type": {**config("awq", 4, 128, False), "data_type": "mx_fp"},
    "super_bits of AWQ": {**config("awq", 4, 128, False), "super_bits": 6},
    "fmt": {"quant_method": "fp8", "fmt": "e5m2"},
    "expert_dtype": {"quant_method": "fp8", "expert_dtype": "int4"},
    "activation": {**config("gptq", 4, 128, True), "activation": {"mode": "w4afp8"}},
    "method": {**config("gptq", 4, 128, True), "method": "qqq"},
    "rotation_configs": {**config("gptq", 4, 128, True), "rotation_configs": [{"name": "hadamard"}]},
    "rotation_config": {**config("gptq", 4, 128, True), "rotation_config": {"name": "hadamard"}},
    "spinquant_config": {"quant_method": "fp8", "spinquant_config": {"r1": True}},
    "hadamard_config": {**config("awq", 4, 128, False), "hadamard_config": {"block": 32}},
    "regex_config": {**config("gptq", 4, 128, True), "regex_config": {"q_proj": {"bits": 8}}},
    "moe_sparsity_config": {**PACKED, "moe_sparsity_config": {"layers": {"0": [1, 2]}}},
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("names", [None, {"a.weight_packed", "a.weight_scale"}])
def test_what_is_not_carried_out_is_refused_by_name(case, names):
    with pytest.raises(UnsupportedModelError, match=f"{case.split(' of ')[0]} = .*results would be wrong"):
        read_quant_config(REFUSED[case], names)


@pytest.mark.parametrize(
    "settings",
    [
        PACKED,
        {**PACKED, "transform_config": {}, "sparsity_config": {}, "kv_cache_scheme": None},
        {**PACKED, "transform_config": {"config_groups": {}}, "sparsity_config": {"format": "dense"}},
        {**PACKED, "transform_config": {"config_groups": {**R4, **FOLDED}}},
        {**PACKED, "ignore": ["lm_head"], "version": "0.12.2", "global_compression_ratio": 1.5},
        group(weights={**GROUP["weights"], "actorder": "static", "observer": "mse", "observer_kwargs": {"p": 2}}),
        group(weights={**GROUP["weights"], "actorder": "weight", "scale_dtype": None}, output_activations=None),
        fp8(),
        {**config("gptq", 4, 128, True), "desc_act": False, "meta": {"q": "x"}, "adapter": None, "rotation": ""},
        {**config("awq", 4, 128, False), "modules_to_not_convert": ["visual"], "backend": "auto"},
        {**config("gptq", 4, 128, True), "pack_dtype": "int32", "act_bits": 16, "data_type": "int", "extra_config": {}},
        {**config("gptq", 4, 128, True), "damp_percent": 0.1, "static_groups": True, "is_marlin_format": False},
        {
            **config("gptq", 4, 128, True),
            "method": "gptq",
            "format": "gptq",
            "checkpoint_format": "gptq",
            "activation": None,
        },
        {
            **config("awq", 4, 128, False),
            "method": "awq",
            "format": "gemm",
            "provider": "auto-round",
            "regex_config": {},
        },
        {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]},
    ],
)
def test_what_changes_nothing_is_taken(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_quant_config(settings, None)


@pytest.mark.parametrize(
    "settings",
    [
        config("gptq", 4, 128, True),
        config("awq", 4, 128, False),
        {"quant_method": "fp8"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ],
)
def test_entries_that_nobody_knows_are_told(settings):
    with pytest.warns(InferplaneWarning, match="entries that are not known for .*not applied: 'smoothing'"):
        read_quant_config({**settings, "smoothing": 0.5}, None)


@pytest.mark.parametrize("inputs", [{**TOKENS, "strategy": "group", "group_size": 128}, {**TOKENS, "num_bits": 4}])
def test_activations_that_no_kernel_quantizes(inputs):
    with pytest.raises(UnsupportedModelError, match="compressed-tensors"):
        read_quant_config(fp8(inputs), None)


@pytest.mark.parametrize(
    "settings",
    [
        {**PACKED, "kv_cache_scheme": FP8},
        {**fp8(), "kv_cache_scheme": FP8},
        {"quant_method": "fp8", "kv_cache_scheme": {"type": "float"}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {**config("gptq", 4, 128, True), "static_kv_dtype": "fp8"},
    ],
)
def test_scales_of_the_cache_are_read_where_the_cache_is_chosen(settings):
    """Which warns where it does not use them; weights are read as without."""
    found, names = find_kv_scales(settings, ["model.layers.0.self_attn.k_scale"]), ["w.weight", "w.weight_scale"]
    assert found is not None and found.dtype == "fp8" and found.stated
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        read_quant_config(settings, names)


def test_a_checkpoint_may_quantize_the_cache_alone():
    found = read_quant_config({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8}, [])
    assert found.format_of("model.layers.0.self_attn.k_proj.weight") == "plain" and "*.k_scale" in found.unread


GPTQ_PLAIN = {k: v for k, v in config("gptq", 4, 128, True).items() if k != "checkpoint_format"}


@pytest.mark.parametrize(
    ("entries", "less_one"),
    [
        ({}, True),
        ({"checkpoint_format": "gptq"}, True),
        ({"format": "gptq"}, True),
        ({"checkpoint_format": "gptq_v2"}, False),
        ({"format": "gptq_v2"}, False),
        ({"format": "gptq_v2", "checkpoint_format": "gptq_v2"}, False),
    ],
)
def test_zero_points_are_stored_as_either_entry_says(entries, less_one):
    found = read_quant_config({**GPTQ_PLAIN, **entries}, None).packed
    assert found is not None and found.less_one is less_one


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {**GPTQ_PLAIN, "format": "gptq_v2", "checkpoint_format": "gptq"},
            "format = 'gptq_v2', checkpoint_format = 'gptq'",
        ),
        ({**GPTQ_PLAIN, "format": "marlin"}, "format = 'marlin'"),
        ({**config("awq", 4, 128, False), "format": "gemv_fast"}, "format = 'gemv_fast'"),
        ({**config("awq", 4, 128, False), "checkpoint_format": "llm-awq"}, "checkpoint_format = 'llm-awq'"),
        ({**config("awq", 4, 128, False), "backend": "llm-awq"}, "backend = 'llm-awq'"),
    ],
)
def test_layouts_that_are_not_read_are_refused_under_each_of_their_names(settings, said):
    with pytest.raises(UnsupportedModelError, match=said):
        read_quant_config(settings, None)


# ------------------------------------------------------------------ where the settings are

GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


@pytest.mark.parametrize(
    ("file", "entries", "format"),
    [
        ("quantize_config.json", GPTQ, "int4_group"),
        ("quantize_config.json", {**GPTQ, "quant_method": "gptq", "bits": 8}, "int8_group"),
        ("quant_config.json", AWQ, "int8_group"),
        ("quant_config.json", {**GPTQ, "group_size": 32}, "int4_group32"),
        ("quantize_config.json", AWQ, "int8_group"),
        ("quantize_config.json", {"zero_point": True, "group_size": 64, "bits": 4}, "int8_group32"),
        ("quantize_config.json", {"quant_method": "awq", "bits": 4, "group_size": 128}, "int8_group"),
        ("quantize_config.json", {"method": "awq", "format": "gemm", "bits": 4, "group_size": 32}, "int8_group32"),
        ("quantize_config.json", {"wbits": 8, "group_size": 128}, "int8_group"),
        ("config.json", {"quantization_config": AWQ}, "int8_group"),
        ("hf_quant_config.json", MODELOPT, "fp8_row"),
        ("config.json", {"compression_config": PACKED}, "int4_group"),
        ("config.json", {"quantization_config": PACKED}, "int4_group"),
    ],
)
def test_settings_in_any_file(file, entries, format, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / file).write_text(json.dumps(entries))
    settings = Config.read(tmp_path).get("quantization_config")
    found = read_quant_config(settings, None)
    assert found.format_of("model.layers.0.mlp.up_proj.weight") == format
    if "zero_point" in entries or "awq" in entries.values():
        assert found.packed is not None and found.packed.method == "awq"


@pytest.mark.parametrize("cache", [{}, {"kv_cache_quant_algo": "FP8"}])
def test_modelopt_without_an_algorithm_leaves_the_weights(cache, tmp_path):
    """It writes null for a model whose cache alone was calibrated."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None, **cache}}))
    settings = Config.read(tmp_path)["quantization_config"]
    found = read_quant_config(settings, {"model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_scale"})
    assert found.format_of("model.layers.0.mlp.up_proj.weight") == "plain"
    scales = find_kv_scales(settings, {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"})
    assert scales is not None and scales.dtype == "fp8" and len(scales.tensors) == 1


@pytest.mark.parametrize("algo", ["NVFP4_AWQ", "W4A8_AWQ", "FP8_PB_WO", ""])
def test_methods_that_are_not_read_are_named(algo, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algo}}))
    with pytest.raises(UnsupportedModelError, match=f"modelopt.*{algo or ''}"):
        read_quant_config(Config.read(tmp_path)["quantization_config"], None)
