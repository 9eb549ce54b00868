"""Quantization settings in several files: contradictions are refused, other spellings of the same are not."""

from __future__ import annotations

import json

import pytest

from inferplane.errors import CheckpointError
from inferplane.models import Config
from inferplane.quant import read_quant_config
from tests.unit.quant.test_packed_checkpoints import config

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
PACKED = config("compressed-tensors", 4, 128, True)
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
TO_GPTQ, TO_AWQ = (
    {**ROUND, "packing_format": "auto_round:auto_gptq"},
    {**ROUND, "packing_format": "auto_round:auto_awq"},
)
TRACES = {"damp_percent": 0.1, "dataset": "c4", "model_name_or_path": "x"}
ROWS = {**GPTQ, "group_size": -1}


def groups(**weights):
    (group,) = PACKED["config_groups"].values()
    return {**PACKED, "config_groups": {"other": {**group, "weights": {**group["weights"], **weights}}}}


def read(folder, inside, file, beside, key="quantization_config"):
    (folder / "config.json").write_text(json.dumps({} if inside is None else {key: inside}))
    (folder / file).write_text(json.dumps(beside))
    return Config.read(folder).get("quantization_config")


CONTRADICTIONS = {
    "method": (GPTQ, "quant_config.json", AWQ, "quant_method = gptq", "quant_method = awq"),
    "method by entries": (GPTQ, "quantize_config.json", {"w_bit": 4}, "quant_method = gptq", "w_bit = 4"),
    "method of a package": (PACKED, "quantize_config.json", {"desc_act": False}, "compressed-tensors", "desc_act"),
    "bits": (GPTQ, "quantize_config.json", {**GPTQ, "bits": 8}, "bits = 4", "bits = 8"),
    "bits in words": (AWQ, "quant_config.json", {**AWQ, "bits": None, "w_bit": 8}, "bits = 4", "w_bit = 8"),
    "group": (GPTQ, "quantize_config.json", {**GPTQ, "group_size": 32}, "group_size = 128", "group_size = 32"),
    "rows": (GPTQ, "quantization_config.json", {**GPTQ, "group_size": -1}, "group_size = 128", "group_size = -1"),
    "symmetry": (GPTQ, "quantize_config.json", {**GPTQ, "sym": False}, "sym = True", "sym = False"),
    "zero points": (AWQ, "quant_config.json", {**AWQ, "zero_point": False}, "zero_point = True", "zero_point = False"),
    "symmetry of AWQ": (AWQ, "quant_config.json", {"quant_method": "awq", "sym": True}, "zero_point", "sym = True"),
    "order": (GPTQ, "quantize_config.json", {**GPTQ, "desc_act": True}, "desc_act = False", "desc_act = True"),
    "layout": (AWQ, "quant_config.json", {**AWQ, "version": "GEMV"}, "version = gemm", "version = GEMV"),
    "zero points less one": (
        {**GPTQ, "format": "gptq"},
        "quantize_config.json",
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        "format = gptq",
        "checkpoint_format = gptq_v2",
    ),
    "packing": (TO_GPTQ, "quantization_config.json", TO_AWQ, "auto_round:auto_gptq", "auto_round:auto_awq"),
    "modules": (
        {**GPTQ, "dynamic": {"-:.*up": {}}},
        "quantize_config.json",
        {**GPTQ, "dynamic": {"-:.*down": {}}},
        "up",
        "down",
    ),
    "groups of modules": (PACKED, "quantization_config.json", groups(num_bits=8), "config_groups", "config_groups"),
    "algorithm": (NVFP4, "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "NVFP4", "quant_algo = FP8"),
    "another tool's": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "hf_quant_config.json",
        {"quantization": {"quant_algo": "NVFP4"}},
        "quant_method = fp8",
        "quant_method = modelopt",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused_with_both_files_and_values(case, tmp_path):
    inside, file, beside, one, other = CONTRADICTIONS[case]
    with pytest.raises(CheckpointError, match=r"config\.json and .*" + file + " contradict each other") as found:
        read(tmp_path, inside, file, beside)
    assert one in str(found.value) and other in str(found.value).split(" in the one, ")[1]


HF, NAMED, QUANTIZE = "hf_quant_config.json", "quantization_config.json", "quantize_config.json"
SAME = {
    "alike": (GPTQ, QUANTIZE, GPTQ),
    "fewer entries": (GPTQ, QUANTIZE, {"bits": 4, "group_size": 128}),
    "other words": (AWQ, "quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}),
    "what exporters alone need": (GPTQ, QUANTIZE, {**GPTQ, **TRACES}),
    "an order without groups": (ROWS, QUANTIZE, {**ROWS, "desc_act": True}),
    "nothing excluded": (GPTQ, QUANTIZE, {**GPTQ, "dynamic": {}}),
    "words of 32 bits": ({**GPTQ, "pack_dtype": "int32"}, QUANTIZE, {**GPTQ, "pack_dtype": "torch.int32"}),
    "null": (GPTQ, QUANTIZE, {**GPTQ, "checkpoint_format": None, "group_size": None}),
    "another version of the package": ({**PACKED, "version": "0.11"}, NAMED, {**PACKED, "version": "0.12"}),
    "another version of GPTQ's": ({**GPTQ, "version": "0.4"}, QUANTIZE, {**GPTQ, "version": "0.5", "format": "gptq"}),
    "defaults of groups": (PACKED, NAMED, groups(symmetric=None, observer="mse", zp_dtype=None)),
    "ModelOpt's two forms": (NVFP4, HF, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}),
}


@pytest.mark.parametrize("case", SAME)
def test_what_means_the_same_is_taken(case, tmp_path):
    inside, file, beside = SAME[case]
    found = read(tmp_path, inside, file, beside)
    assert {key: found[key] for key in inside} == inside
    weight = "model.layers.0.mlp.up_proj.weight"
    assert read_quant_config(found, None).format_of(weight) == read_quant_config(inside, None).format_of(weight)


def test_what_one_file_alone_states_counts(tmp_path):
    """Otherwise it would be taken for its default: symmetric, with zero points less one."""
    inside = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    found = read(tmp_path, inside, "quantize_config.json", {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"})
    packed = read_quant_config(found, None).packed
    assert packed is not None and not packed.symmetric and not packed.less_one


@pytest.mark.parametrize("key", ["compression_config", "text_config"])
def test_settings_elsewhere_in_the_config_count_too(key, tmp_path):
    inside = {"quantization_config": GPTQ} if key == "text_config" else GPTQ
    with pytest.raises(CheckpointError, match=r"bits = 4 in the one, bits = 8 in the other"):
        read(tmp_path, inside, "quantize_config.json", {**GPTQ, "bits": 8}, key)


def test_two_files_beside_a_config_without_settings(tmp_path):
    (tmp_path / "quant_config.json").write_text(json.dumps(AWQ))
    with pytest.raises(CheckpointError, match=r"quantize_config.json and .*quant_config.json contradict"):
        read(tmp_path, None, "quantize_config.json", GPTQ)


@pytest.mark.parametrize("inside", [[], "gptq", 4])
def test_settings_that_are_no_object_are_refused_where_they_are_read(inside, tmp_path):
    assert read(tmp_path, inside, "quantize_config.json", GPTQ) == inside


def test_settings_are_completed_wherever_the_config_has_them(tmp_path):
    inside = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "sym": False, "desc_act": True}))
    for entries in ({"quantization_config": inside, "text_config": {"quantization_config": inside}},):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        found = Config.read(tmp_path)["quantization_config"]
        assert (found["sym"], found["desc_act"]) == (False, True)


@pytest.mark.parametrize(
    ("inside", "beside"),
    [(PACKED, {"bits": 4, "group_size": 128, "sym": True}), (PACKED, {"bits": 4}), (NVFP4, {"bits": 4})],
)
def test_a_file_left_over_adds_nothing_to_another_method(inside, beside, tmp_path):
    assert read(tmp_path, inside, "quantize_config.json", beside) == inside


def test_a_method_with_its_algorithm_is_modelopts(tmp_path):
    settings = {**NVFP4, "quant_method": "modelopt_fp4"}
    assert read_quant_config(settings, None).format_of("model.layers.0.mlp.up_proj.weight") == "nvfp4"
