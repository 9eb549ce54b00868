"""Modules with settings of their own: GPTQModel's `dynamic`, AutoRound's `extra_config` and its packings."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.binding import DictSource
from inferplane.errors import CheckpointError, InferplaneWarning, UnsupportedModelError
from inferplane.models import Config
from inferplane.quant import read_quant_config
from inferplane.quant.by_module import read_extra_config
from inferplane.types import WeightFormat
from tests.e2e.tiny_models import llama_config, random_model
from tests.unit.quant.test_packed_checkpoints import config, drawn, packed, read, value

UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.11.mlp.down_proj", "lm_head"
GPTQ = config("gptq", 4, 128, True)


def modules(method="gptq", less_one=True, **forms):
    """Tensors and values of modules; a form is bits, group and whether it is symmetric."""
    tensors, values = {}, {}
    for i, (module, (bits, group, symmetric)) in enumerate({"up": (4, 128, True), **forms}.items()):
        name = {"up": UP, "down": DOWN, "head": HEAD}[module]
        codes, scale, zero = drawn(16, 256, bits, group, symmetric=symmetric, seed=i)
        tensors |= packed(method, name, codes, scale, zero, bits, group, less_one=less_one)
        values[f"{name}.weight"] = value(codes, scale, zero, bits, group)
    return tensors, values


def check(settings, tensors, values, formats):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_quant_config(settings, set(tensors))
    assert [found.format_of(name) for name in values] == formats
    shown = set(found.view(DictSource(tensors)).names())
    assert shown == {*values, *(f"{name}_scale" for name in values)}
    for name, want in values.items():
        assert torch.equal(read(found, tensors, name).dequantize(), want), name


EIGHT = {"bits": 8, "group_size": -1}


@pytest.mark.parametrize(
    "dynamic",
    [
        {r"+:.*\.11\..*": EIGHT},
        {r".*\.down_proj": EIGHT},
        {r"+:^model\.layers\.11\.mlp\.down_proj$": EIGHT},
        {r"+:model.*down": EIGHT, "+:.*": {"mse": 0.1}},  # the first one that matches counts, alone
        {r"+:down": {"bits": 2}, r"+:.*down": EIGHT},  # from the beginning of a name
        {r"+:.*\.1\..*": {"bits": 2}, r"+:model\.layers\.(1|11)\..*": EIGHT},
        {r"+:.*down": EIGHT, r"-:.*self_attn.*": {}},
        {r"+:model\.language_model\.layers\.11\..*": EIGHT},  # of a model with towers
    ],
)
def test_expressions_of_gptqmodel_change_modules(dynamic):
    tensors, values = modules(down=(8, 0, True))
    check({**GPTQ, "dynamic": dynamic}, tensors, values, ["int4_group", "int8_row"])


@pytest.mark.parametrize(
    ("changes", "form", "format"),
    [
        ({"group_size": 32}, (4, 32, True), "int4_group32"),
        ({"sym": False}, (4, 128, False), "int8_group"),
        ({"sym": False, "group_size": 64, "bits": None}, (4, 64, False), "int8_group32"),
        ({"bits": 8, "damp_percent": 0.1, "pack_dtype": "int32"}, (8, 128, True), "int8_group"),
        ({}, (4, 128, True), "int4_group"),
    ],
)
def test_each_entry_may_change(changes, form, format):
    tensors, values = modules(down=form)
    check({**GPTQ, "dynamic": {"+:.*down": changes}}, tensors, values, ["int4_group", format])


def test_what_is_excluded_stays_plain_and_exclusions_come_first():
    tensors, values = modules()
    settings = {**GPTQ, "dynamic": {"+:.*": {}, r"-:.*\.11\.": {}, "-:lm_head": {}}}
    check(settings, tensors, values, ["int4_group"])
    found = read_quant_config(settings, {*tensors, f"{HEAD}.weight", f"{DOWN}.weight"})
    assert {found.format_of(f"{name}.weight") for name in (HEAD, DOWN)} == {"plain"}
    drawn_at_random = read_quant_config(settings, None)
    formats = [drawn_at_random.format_of(f"{name}.weight") for name in (UP, DOWN)]
    assert formats == ["int4_group", "plain"]


def test_an_order_of_one_module_expands_it_alone():
    tensors, values = modules(down=(4, 128, True))
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)) // 128
    tensors[f"{DOWN}.g_idx"] = order.int()
    with pytest.warns(InferplaneWarning, match="expanded to 16 bits"):
        found = read_quant_config({**GPTQ, "dynamic": {"+:.*down": {"desc_act": True}}}, set(tensors))
    assert [found.format_of(name) for name in values] == ["int4_group", "plain"]
    assert torch.equal(read(found, tensors, f"{UP}.weight").dequantize(), values[f"{UP}.weight"])


def test_a_sym_of_modules_that_are_not_there_is_warned_of():
    """Other entries would fail by the tensors' shapes."""
    tensors, _ = modules()
    with pytest.warns(InferplaneWarning, match="sym = False by dynamic .*thinker.* which names no module"):
        read_quant_config({**GPTQ, "dynamic": {r"+:^thinker\.": {"sym": False}}}, set(tensors))


def test_settings_of_modules_that_are_not_there_need_not_be_read():
    tensors, values = modules()
    check({**GPTQ, "dynamic": {"+:.*visual.*": {"bits": 3}}}, tensors, values, ["int4_group"])
    every, values = modules(up=(8, 128, True))
    check({**GPTQ, "bits": 3, "dynamic": {"+:.*": {"bits": 8}}}, every, values, ["int8_group"])


@pytest.mark.parametrize("names", [None, {f"{DOWN}.qweight"}])
@pytest.mark.parametrize(
    ("dynamic", "match"),
    [
        ({"+:.*down": {"bits": 3}}, r"'gptq' with bits = 3, .* by dynamic '\+:\.\*down' is not implemented"),
        ({"+:.*down": {"group_size": 96}}, "group_size = 96"),
        ({"+:.*down": {"adapter": {"rank": 8}}}, "adapter = .*not implemented"),
        ({"+:.*down": {"pack_dtype": "int16"}}, "pack_dtype = int16"),
        ({"+:(": {"bits": 8}}, r"dynamic = \( \(.*not understood"),
        ({"+:.*": 8}, "dynamic = .*not understood"),
        ([".*"], "dynamic = .*not understood"),
        ({3: {"bits": 8}}, "dynamic = .*not understood"),
    ],
)
def test_settings_of_modules_that_are_not_read_are_refused_by_name(dynamic, match, names):
    with pytest.raises(UnsupportedModelError, match=match):
        read_quant_config({**GPTQ, "dynamic": dynamic}, names)


@pytest.mark.parametrize(
    "settings",
    [
        {**GPTQ, "dynamic": {"+:.*": {"bits": 3}}},
        {"quant_method": "auto-round", "packing_format": "auto_round:other"},
    ],
)
def test_a_plugin_reads_what_is_not_read_here(settings):
    seen = []

    def open_format(given):
        seen.append(given)
        return WeightFormat(read=lambda source, name, shard: None, weights=lambda names: [f"{UP}.weight"])

    method = settings["quant_method"]
    found = read_quant_config(settings, {f"{UP}.qweight", f"{UP}.weight"}, {method: open_format})
    assert found.format_of(f"{UP}.weight") == method and seen == [settings]


# ------------------------------------------------------------------ AutoRound

ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "autoround_version": "0.9"}
PACKINGS = [
    ("auto_round:auto_gptq", "gptq", True),
    ("auto_round:gptq", "gptq", True),
    ("auto_round:auto_gptq:exllamav2", "gptq", True),
    (None, "gptq", True),
    ("auto", "gptq", True),
    ("auto_round", "gptq", False),
    ("auto_round:gptqmodel", "gptq", False),
    ("auto_round:auto_awq", "awq", False),
    ("auto_round:awq", "awq", False),
]


@pytest.mark.parametrize(("packing", "method", "less_one"), PACKINGS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_packings_of_auto_round(packing, method, less_one, symmetric):
    tensors, values = modules(method, less_one, up=(4, 128, symmetric))
    settings = {**ROUND, "sym": symmetric, "packing_format": packing, "data_type": "int", "act_bits": 16}
    check(settings, tensors, values, ["int4_group" if symmetric else "int8_group"])


def test_a_packing_in_the_entry_of_older_releases():
    tensors, values = modules("awq")
    settings = {**ROUND, "quant_method": "intel/auto-round", "backend": "autoround:awq"}
    check(settings, tensors, values, ["int4_group"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format = 'auto_round:llm_compressor', which is not"),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format = 'auto_round:fp8_static'"),
        ({"packing_format": "auto_round:exllamav2", "sym": False}, "'auto_round:exllamav2' with zero points"),
        (
            {"packing_format": "auto_round:exllamav2", "extra_config": {"model.layers.0.mlp.up_proj": {"sym": False}}},
            "'auto_round:exllamav2' with zero points",
        ),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "'awq' with bits = 8"),
        ({"bits": 3}, "'gptq' with bits = 3"),
        ({"act_bits": 8}, "act_bits = 8"),
        ({"data_type": "mx_fp"}, "data_type = mx_fp"),
        ({"rotation_config": {"block_size": 32}}, "rotation_config"),
        ({"extra_config": {UP: {"bits": 2}}}, f"bits = 2, .* by extra_config '{UP}'"),
        ({"extra_config": {UP: {"act_bits": 8}}}, "act_bits = 8"),
        ({"extra_config": {UP: 8}}, "extra_config = .*not understood"),
        ({"extra_config": {0: {"bits": 8}}}, "extra_config = .*not understood"),
        ({"extra_config": {"(": {"bits": 8}}}, "extra_config = .*not understood"),
    ],
)
@pytest.mark.parametrize("names", [None, {f"{UP}.qweight"}])
def test_other_settings_of_auto_round_are_refused_by_name(changes, match, names):
    with pytest.raises(UnsupportedModelError, match=match):
        read_quant_config({**ROUND, **changes}, names)


@pytest.mark.parametrize(
    "extra",
    [
        {DOWN: {"bits": 8}},
        {DOWN: {"bits": 8, "data_type": "int", "act_bits": 16, "sym": True}, ".*mlp.*": {"bits": 2}, UP: {}},
        {"layers.11.": {"bits": 8}, "down_proj": {"bits": 2}},  # the first that is found anywhere in the name
        {".*11.*": {"bits": 8, "act_bits": None}, "lm_head": {"bits": 16, "data_type": "fp"}},
        {DOWN.replace("model.", "model.language_model.", 1): {"bits": 8}},
        {"model.layers.1.mlp.down_proj": {"bits": 2}, DOWN: {"bits": 8}},
        {"up": {}, DOWN: {"bits": 8}},
    ],
)
def test_layers_of_their_own(extra):
    tensors, values = modules(down=(8, 128, True))
    check({**ROUND, "extra_config": extra}, tensors, values, ["int4_group", "int8_group"])


def test_many_layers_of_towers_cost_little():
    """Each would be tried on every module: a model of experts has 20,000."""
    expressions = {f"model.visual.blocks.{i}.mlp.fc1": {"bits": 16} for i in range(300)}
    rules = read_extra_config({"extra_config": {**expressions, "down_proj": {"bits": 8}}}, {f"{DOWN}.qweight"})
    assert [rule.text for rule in rules] == ["extra_config 'down_proj'"] and rules.find(DOWN) == next(iter(rules))


def test_layers_with_zero_points_of_their_own():
    for packing, method, less_one in PACKINGS[:1] + PACKINGS[-2:]:
        tensors, values = modules(method, less_one, down=(4, 128, False))
        settings = {**ROUND, "packing_format": packing, "extra_config": {DOWN: {"sym": False}}}
        check(settings, tensors, values, ["int4_group", "int8_group"])


def test_layers_of_16_bits_are_plain_also_without_a_checkpoint():
    extra = {DOWN: {"bits": 16, "data_type": "float"}, ".*layers.3.*": {"bits": 16}}
    found = read_quant_config({**ROUND, "extra_config": extra}, None)
    names = [UP, DOWN, "model.layers.3.mlp.up_proj"]
    assert [found.format_of(f"{name}.weight") for name in names] == ["int4_group", "plain", "plain"]


@pytest.mark.parametrize(
    ("inside", "beside", "refused"),
    [
        (None, {**ROUND, "packing_format": "auto_round:auto_awq"}, ""),
        ({**ROUND, "packing_format": "auto_round:gptq"}, {**ROUND, "packing_format": "auto_round:auto_gptq"}, ""),
        ({**ROUND, "packing_format": "auto_round:auto_gptq"}, config("gptq", 4, 128, True), ""),
        (config("awq", 4, 128, True), {**ROUND, "packing_format": "auto_round:auto_awq"}, ""),
        ({"bits": 4, "group_size": 128}, {**ROUND, "packing_format": "auto_round:auto_awq"}, ""),
        ({**ROUND, "packing_format": "auto_round:fp8"}, {**ROUND, "packing_format": "auto_round:fp8"}, ""),
        (config("awq", 4, 128, True), {**ROUND, "packing_format": "auto_round:auto_gptq"}, "quant_method = awq"),
        ({**ROUND, "extra_config": {UP: {"bits": 8}}}, {**ROUND, "extra_config": {UP: {"bits": 2}}}, "extra_config"),
        (ROUND, {**ROUND, "bits": 8}, "bits = 4 in the one, bits = 8"),
    ],
)
def test_the_file_of_auto_round(inside, beside, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({} if inside is None else {"quantization_config": inside}))
    (tmp_path / "quantization_config.json").write_text(json.dumps(beside))
    if refused:
        with pytest.raises(CheckpointError, match=refused):
            Config.read(tmp_path)
        return
    found = Config.read(tmp_path)["quantization_config"]
    assert found["quant_method"] == (inside or beside).get("quant_method", "auto-round")
    if "fp8" not in str(found):
        assert read_quant_config(found, None).format_of(f"{UP}.weight") == "int4_group"


# ------------------------------------------------------------------ whole models


@pytest.mark.parametrize("kind", ["dynamic", "extra_config"])
def test_a_model_of_4_and_8_bits_answers_as_its_values(kind, tmp_path):
    """Whole layers and parts of fused weights (k beside q and v) have 8 bits."""
    paths = tmp_path / "quantized", tmp_path / "plain"
    for path in paths:
        random_model(llama_config(hidden_size=128, intermediate_size=256), seed=3).save_pretrained(path)
    tensors = load_file(paths[1] / "model.safetensors")
    plain, quantized, extra = dict(tensors), {}, {}
    for i, (name, weight) in enumerate(sorted(tensors.items())):
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or module.endswith("o_proj"):
            quantized[name] = weight
            continue
        bits = 8 if ".1." in name or "k_proj" in name else 4
        codes, scale, zero = drawn(*weight.shape, bits, 128, symmetric=True, seed=i)
        scale = (scale / 2**bits).half().float()
        quantized |= packed("gptq", module, codes, scale, zero, bits, 128)
        plain[name] = value(codes, scale, zero, bits, 128)
        extra |= {module: {"bits": 8}} if bits == 8 else {}
    for path, found in zip(paths, (quantized, plain), strict=True):
        save_file(found, path / "model.safetensors")
    dynamic = {r"-:.*o_proj": {}, r"+:.*\.1\..*": {"bits": 8}, r"+:.*k_proj": {"bits": 8}}
    own = {**GPTQ, "dynamic": dynamic} if kind == "dynamic" else {**ROUND, "extra_config": extra}
    settings = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**settings, "quantization_config": own}))
    logits = []
    for path in paths:
        with LLM(path, device="cpu", dtype="float32") as llm:
            assert not llm.runner.loaded.unused
            formats = {w.format for w in llm.runner.plan.weights.values()}
            assert (formats >= {"int4_group", "int8_group"}) == (path == paths[0])
            logits.append(llm.logits([list(range(1, 40))])[0])
    assert logits[1].std() > 0.01 and (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[1].abs().max()
