"""Checkpoints of integers, several to a word: GPTQ, AWQ, compressed-tensors; how they are read, and what is refused."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.binding import DictSource
from inferplane.engine import InferplaneWarning, ModelFiles, RunnerOptions
from inferplane.engine.runner.exports.export import export_model
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.plugins import host
from inferplane.quant import read_integers, read_quant_config, settle_order
from inferplane.types import ActivationQuant, Shard
from inferplane_cpu.native import instruction_sets
from tests.e2e.tiny_models import deepseek_config, llama_config, random_model

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order in which a word has them


def words(codes, bits, order=None):
    """int32 of codes along the last dimension, the first in the lowest bits."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    if order is not None:
        codes = codes[..., list(order)]
    total = sum(codes[..., i] << (bits * i) for i in range(each))
    return torch.where(total >= 2**31, total - 2**32, total).int()


def packed(method, module, codes, scale, zero, bits, group, *, less_one=True):
    """A module's tensors: codes `[N, K]` and zero points `[N, G]` from 0, scales `[N, G]`."""
    n, k = codes.shape
    if method == "compressed-tensors":
        found = {"weight_packed": words(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
        if zero is not None:
            found["weight_zero_point"] = words(zero.t(), bits).t()
    else:
        zero = torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero
        order = AWQ_COLUMNS if method == "awq" else None
        stated = (zero.long() - 1) % 2**bits if method == "gptq" and less_one else zero.long()
        weight = words(codes.t(), bits, order) if method == "awq" else words(codes, bits).t()
        found = {"qweight": weight, "qzeros": words(stated.t(), bits, order), "scales": scale.t().half()}
        if method == "gptq":
            found["g_idx"] = (torch.arange(k) // (group or k)).int()
    return {f"{module}.{name}": tensor.contiguous() for name, tensor in found.items()}


def drawn(n, k, bits, group, *, symmetric, seed=0):
    """Codes over their whole range, scales that float16 holds, zero points."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=g)
    groups = -(-k // (group or k))
    zero = None if symmetric else torch.randint(0, 2**bits, (n, groups), generator=g)
    return codes, (torch.rand(n, groups, generator=g) * 0.1 + 0.01).half().float(), zero


def value(codes, scale, zero, bits, group):
    width, k = group or codes.shape[1], codes.shape[1]
    middle = torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero.float()
    wide = (t.repeat_interleave(width, 1)[:, :k] for t in (middle, scale))
    return (codes.float() - next(wide)) * next(wide)


def config(method, bits, group, symmetric):
    if method == "compressed-tensors":
        strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return {"quant_method": method, "format": "pack-quantized", "config_groups": groups}
    both = {"quant_method": method, "bits": bits, "group_size": group or -1}
    return {**both, "zero_point": not symmetric, "version": "gemm"} if method == "awq" else {**both, "sym": symmetric}


FORMS = [
    ("compressed-tensors", 4, 128, True, "int4_group"),
    ("compressed-tensors", 4, 32, True, "int4_group32"),
    ("compressed-tensors", 4, 0, True, "int4_row"),
    ("compressed-tensors", 4, 128, False, "int8_group"),
    ("compressed-tensors", 4, 64, False, "int8_group32"),
    ("compressed-tensors", 4, 32, False, "int8_group32"),
    ("gptq", 4, 64, False, "int8_group32"),
    ("gptq", 4, 32, False, "int8_group32"),
    ("awq", 4, 64, False, "int8_group32"),
    ("awq", 4, 32, False, "int8_group32"),
    ("compressed-tensors", 4, 0, False, "int8_row"),
    ("compressed-tensors", 8, 128, True, "int8_group"),
    ("compressed-tensors", 8, 0, True, "int8_row"),
    ("gptq", 4, 128, True, "int4_group"),
    ("gptq", 4, 64, True, "int4_group64"),
    ("gptq", 4, 0, True, "int4_row"),
    ("gptq", 4, 128, False, "int8_group"),
    ("gptq", 8, 128, True, "int8_group"),
    ("gptq", 8, 0, True, "int8_row"),
    ("awq", 4, 128, False, "int8_group"),
    ("awq", 4, 0, False, "int8_row"),
    ("awq", 4, 128, True, "int4_group"),
    ("awq", 4, 32, True, "int4_group32"),
    ("awq", 4, 0, True, "int4_row"),
]


def read(found, tensors, name, shard=None):
    """As the loader does."""
    format = found.format_of(name)
    return read_integers(found.view(DictSource(tensors)), name, shard or Shard(), format=format)


@pytest.mark.parametrize(("method", "bits", "group", "symmetric", "format"), FORMS)
def test_every_value_arrives(method, bits, group, symmetric, format):
    n, k = 24, 512
    codes, scale, zero = drawn(n, k, bits, group, symmetric=symmetric)
    tensors = packed(method, "a", codes, scale, zero, bits, group) | {"b.weight": torch.ones(3, 2), "a.bias": scale[0]}
    found = read_quant_config(config(method, bits, group, symmetric), set(tensors))
    assert (found.format_of("a.weight"), found.format_of("b.weight")) == (format, "plain")
    view = found.view(DictSource(tensors))
    assert set(view.names()) == {"a.weight", "a.weight_scale", "b.weight", "a.bias"}
    assert view.shape("b.weight") == (3, 2) and view.shape("c.weight") is None and view.dtype("a.weight") is torch.int8
    want = value(codes, scale, zero, bits, group)
    for axis, size in ((0, 1), (0, 3), (1, 2), (1, 4)):
        for rank in range(size):
            got = read(found, tensors, "a.weight", Shard(axis, rank, size))
            assert torch.equal(got.dequantize(), want.chunk(size, axis)[rank])
    assert (
        read_quant_config(config(method, bits, group, symmetric), None).format_of("model.layers.0.mlp.up_proj.weight")
        == format
    )


def test_columns_that_fill_no_word_and_no_group():
    codes, scale, zero = drawn(21, 100, 4, 128, symmetric=False)
    tensors = packed("compressed-tensors", "a", codes, scale, zero, 4, 128)
    found = read_quant_config(config("compressed-tensors", 4, 128, False), set(tensors))
    assert torch.equal(read(found, tensors, "a.weight").dequantize(), value(codes, scale, zero, 4, 128))
    loose = {**tensors, "a.weight_zero_point": (zero - 8).to(torch.int8)}  # as earlier releases write them
    assert torch.equal(read(found, loose, "a.weight").dequantize(), value(codes, scale, zero, 4, 128))


@pytest.mark.parametrize("form", [None, "gptq", "gptq_v2"])
def test_how_gptq_counts_zero_points(form):
    codes, scale, zero = drawn(16, 256, 4, 128, symmetric=False)
    tensors = packed("gptq", "a", codes, scale, zero, 4, 128, less_one=form != "gptq_v2")
    found = read_quant_config({**config("gptq", 4, 128, False), "checkpoint_format": form}, set(tensors))
    assert torch.equal(read(found, tensors, "a.weight").dequantize(), value(codes, scale, zero, 4, 128))
    # Symmetric ones have theirs in the middle, whatever their writer thought of it.
    tensors = packed("gptq", "a", codes, scale, None, 4, 128, less_one=False)
    found = read_quant_config({**config("gptq", 4, 128, True), "checkpoint_format": form}, set(tensors))
    assert torch.equal(read(found, tensors, "a.weight").dequantize(), value(codes, scale, None, 4, 128))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda zeros: zeros + 1, "zero points such as 9, .*zero_point false.*set zero_point to true"),
        (None, "not zero"),
    ],
)
def test_zero_points_of_awq_that_the_config_denies(change, match):
    tensors = packed("awq", "a", *drawn(16, 256, 4, 128, symmetric=True), 4, 128)
    found = read_quant_config(config("awq", 4, 128, True), set(tensors))
    read(found, tensors, "a.weight")
    zeros = tensors.pop("a.qzeros")
    if change is not None:
        tensors["a.qzeros"] = change(zeros)
    with pytest.raises(CheckpointError, match=match):
        read(found, tensors, "a.weight")


BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def whole_bytes(inputs=TOKENS, **changes):
    groups = {"group_0": {"targets": ["Linear"], "weights": {**BYTES, **changes}, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


@pytest.mark.parametrize("form", [(), (1,), (16,), (16, 1)])
def test_bytes_that_are_not_packed(form):
    g = torch.Generator().manual_seed(1)
    data, scale = torch.randint(-128, 128, (16, 96), generator=g).to(torch.int8), torch.rand(16, 1, generator=g)
    scale = scale if 16 in form else scale[:1]
    tensors = {"a.weight": data, "a.weight_scale": scale.reshape(form)}
    found = read_quant_config(whole_bytes(), set(tensors))
    assert torch.equal(read(found, tensors, "a.weight").dequantize(), data.float() * scale)
    assert list(found.view(DictSource(tensors)).names()) == list(tensors)


@pytest.mark.parametrize(
    ("settings", "act"),
    [
        (whole_bytes(), "int8"),
        (whole_bytes(None), ""),
        (whole_bytes({**TOKENS, "dynamic": False, "strategy": "tensor"}), ""),
        (whole_bytes({**TOKENS, "symmetric": False}), ""),
        (whole_bytes(strategy="group", group_size=128), ""),
    ],
)
def test_how_activations_are_coded(settings, act):
    assert str(read_quant_config(settings, None).activation_quants.get("int8_row", "")) == act


NIBBLES = {"num_bits": 4, "strategy": "group", "group_size": 128}
INT4_TOKENS = {**TOKENS, "num_bits": 4}


@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize(("inputs", "act"), [(TOKENS, "int8"), (INT4_TOKENS, "int4")])
@pytest.mark.parametrize(("group", "format"), [(128, "int4_group"), (32, "int4_group32"), (None, "int4_row")])
def test_weights_of_4_bits_beside_activations_of_8_or_4(form, inputs, act, group, format):
    how = {"num_bits": 4, **({"strategy": "group", "group_size": group} if group else {})}
    settings = {**whole_bytes(inputs, **how), "format": form}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_quant_config(settings, {"a.weight", "a.weight_scale", "b.weight_packed", "c.weight"})
    assert [found.format_of(f"{name}.weight") for name in "abc"] == [format, format, "plain"]
    assert found.activation_quants == {format: ActivationQuant(act)}


@pytest.mark.parametrize(
    "inputs",
    [
        {**TOKENS, "dynamic": False},
        {**INT4_TOKENS, "symmetric": False},
        {**INT4_TOKENS, "strategy": "group", "group_size": 128},
        {**TOKENS, "strategy": "group", "group_size": 128},
    ],
)
def test_activations_in_another_form_stay_as_they_are_with_a_warning(inputs):
    with pytest.warns(InferplaneWarning, match=r"activations are quantized \(int of . bits.*That is not applied"):
        found = read_quant_config(whole_bytes(inputs, **NIBBLES), None)
    assert found.activation_quants == {}


def test_activations_of_fewer_bits_than_weights_stay_as_they_are():
    with pytest.warns(InferplaneWarning, match="int of 4 bits"):
        assert read_quant_config(whole_bytes(INT4_TOKENS), None).activation_quants == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "group_size": 96},
        {"quant_method": "gptq", "bits": 4, "group_size": "128"},
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "awq", "bits": 4, "group_size": 16},
        {"quant_method": "awq", "bits": 8, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": False},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False, "version": "gemv"},
        {**config("compressed-tensors", 4, 128, True), "format": "marlin-24"},
        whole_bytes(symmetric=False),
        whole_bytes(num_bits=6),
        whole_bytes(strategy="block"),
        whole_bytes({**TOKENS, "type": "float"}),
        whole_bytes({**TOKENS, "num_bits": 6}),
    ],
)
def test_what_is_not_read_is_refused(settings):
    with pytest.raises(UnsupportedModelError, match=r"not with these settings.*There is:.*'gptq' of 4 or 8 bits"):
        read_quant_config(settings, None)


def test_modules_that_were_left_out():
    settings = {**config("gptq", 4, 128, True), "dynamic": {"-:.*lm_head": {}}}
    assert read_quant_config(settings, {"a.qweight", "lm_head.weight"}).format_of("lm_head.weight") == "plain"


STATED = [
    ({"shape": lambda t: t + 8}, "weight_shape"),
    ({"shape": lambda t: t[:1]}, "weight_shape"),
]
ODD = [
    ({"packed": lambda t: t.float()}, "not a matrix of int32"),
    ({"packed": lambda t: t[0]}, "not a matrix of int32"),
    ({"scale": lambda t: t[:1, :1]}, "no weight of 8 bits as the config says"),
    ({"scale": lambda t: t.int()}, "no weight of 8 bits as the config says"),
    ({"scale": None}, "no weight of 8 bits as the config says"),
    ({"zero": lambda t: t[:1]}, "not zero points"),
    ({"zero": None}, "not zero points"),
    ({"order": lambda t: t.roll(1)}, "desc_act"),
    ({"order": lambda t: t[:-1]}, "not a group for each of 256 columns"),
    ({"order": lambda t: t * 2}, "groups up to 2, and there are 2 scales a row"),
]


@pytest.mark.parametrize(
    ("method", "changes", "what"),
    [*(("gptq", *odd) for odd in ODD), *(("compressed-tensors", *odd) for odd in ODD + STATED)],
)
def test_what_does_not_fit_is_refused(method, changes, what):
    names = {
        "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        "gptq": ("qweight", "scales", "qzeros", "g_idx", ""),
    }
    name = dict(zip(("packed", "scale", "zero", "order", "shape"), names[method], strict=True))
    codes, scale, zero = drawn(16, 256, 4, 128, symmetric=False)
    tensors = packed(method, "a", codes, scale, zero, 4, 128)
    tensors.setdefault(f"a.{name['order']}", (torch.arange(256) // 128).int())
    found = read_quant_config(config(method, 4, 128, False), set(tensors))
    read(found, tensors, "a.weight")
    ((which, change),) = changes.items()
    key = f"a.{name[which]}"
    broken = {k: v for k, v in tensors.items() if k != key}
    if change is not None:
        broken[key] = change(tensors[key])
    with pytest.raises(CheckpointError, match=what):
        read(found, broken, "a.weight")


def test_entries_of_more_bits_than_the_config_says():
    tensors = {"a.weight": torch.full((4, 32), 9, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    found = read_quant_config(config("compressed-tensors", 4, 0, True), set(tensors))
    with pytest.raises(CheckpointError, match=r"entries of 9 to 9.*4 bits"):
        read(found, tensors, "a.weight")


def test_a_share_that_cuts_a_group():
    codes, scale, zero = drawn(16, 384, 4, 128, symmetric=True)
    tensors = packed("gptq", "a", codes, scale, zero, 4, 128)
    found = read_quant_config(config("gptq", 4, 128, True), set(tensors))
    with pytest.raises(CheckpointError, match=r"splits a group of 128 columns.*tensor-parallel size"):
        read(found, tensors, "a.weight", Shard(1, 0, 2))


# -- whole models

MODELS = {"llama": lambda: llama_config(hidden_size=128, intermediate_size=256), "deepseek": deepseek_config}
WHOLE = [
    ("gptq", 4, 128, True),
    ("gptq", 4, 32, True),
    ("awq", 4, 128, False),
    ("awq", 4, 32, True),
    ("compressed-tensors", 4, 32, True),
    ("compressed-tensors", 4, 128, False),
    ("compressed-tensors", 8, 0, True),
]


def ordered(settings, scattered=True):
    """Settings that say that columns are in the order of activations."""
    if scattered and settings["quant_method"] == "gptq":
        settings["desc_act"] = True
    elif scattered:
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return settings


def scatter(method, module, k, group):
    """The groups of columns as activation order leaves them, and the tensor and settings that say so."""
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) // group
    name = f"{module}.g_idx" if method == "gptq" else f"{module}.weight_g_idx"
    return order, {name: order.int()}


def two_folders(tmp_path, model, method, bits, group, symmetric, scattered=False):
    """One model twice: quantized, and with the values that this leaves."""
    paths = tmp_path / "quantized", tmp_path / "plain"
    for path in paths:
        random_model(MODELS[model](), seed=3).save_pretrained(path)
    tensors = load_file(paths[1] / "model.safetensors")
    plain, quantized, count = dict(tensors), {}, 0
    for i, (name, weight) in enumerate(sorted(tensors.items())):
        n, k = weight.shape if weight.ndim == 2 else (0, 0)
        if not name.endswith(("_proj.weight", "_mqa.weight")) or (n % 8 or k % 8):
            quantized[name] = weight
            continue
        codes, scale, zero = drawn(n, k, bits, group, symmetric=symmetric, seed=i)
        scale = (scale / 2**bits).half().float()
        quantized |= packed(method, name.removesuffix(".weight"), codes, scale, zero, bits, group)
        plain[name], count = value(codes, scale, zero, bits, group), count + 1
        if scattered:
            order, more = scatter(method, name.removesuffix(".weight"), k, group)
            middle = torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero.float()
            quantized, plain[name] = quantized | more, (codes.float() - middle[:, order]) * scale[:, order]
    assert count > 8
    for path, found in zip(paths, (quantized, plain), strict=True):
        save_file(found, path / "model.safetensors")
    settings = json.loads((paths[0] / "config.json").read_text())
    settings["quantization_config"] = ordered(config(method, bits, group, symmetric), scattered)
    (paths[0] / "config.json").write_text(json.dumps(settings))
    return paths


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("method", "bits", "group", "symmetric"), WHOLE)
def test_a_model_answers_as_with_the_same_values_plain(model, method, bits, group, symmetric, tmp_path):
    quantized, plain = two_folders(tmp_path, model, method, bits, group, symmetric)
    ids = [list(range(1, 40)), [5, 4, 3]]
    found = []
    for path in (quantized, plain):
        with LLM(path, device="cpu", dtype="float32") as llm:
            assert not llm.runner.loaded.unused
            found.append(llm.logits(ids))
    for got, want in zip(*found, strict=True):
        assert torch.isfinite(want).all() and want.std() > 0.01
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.skipif(not instruction_sets(), reason="not run: no native kernels")
@pytest.mark.parametrize(("method", "bits", "group", "symmetric"), WHOLE)
def test_native_kernels_read_them_as_stored(method, bits, group, symmetric, tmp_path):
    quantized, plain = two_folders(tmp_path, "llama", method, bits, group, symmetric)
    ids, found = [list(range(1, 40))], []
    for path in (quantized, plain):
        with LLM(path, device="cpu", dtype="bfloat16") as llm:
            formats = {w.format for w in llm.runner.plan.weights.values()} - {"plain"}
            assert bool(formats) == (path == quantized) and not llm.runner.plan.dequantized
            found.append(llm.logits(ids)[0].flatten())
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.999


# -- groups that differ


def mixed(*groups):
    """Settings with `(targets, settings of one group)` each."""
    found = {}
    for number, (targets, settings) in enumerate(groups):
        (group,) = settings["config_groups"].values()
        found[f"group_{number}"] = {**group, "targets": targets, "format": settings["format"]}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": found}


def test_groups_of_modules_in_different_formats():
    four, eight = config("compressed-tensors", 4, 32, True), config("compressed-tensors", 8, 128, True)
    settings = mixed((["Linear"], whole_bytes()), (["re:.*down$"], four), (["a.up"], eight))
    g = torch.Generator().manual_seed(1)
    tensors, values = {}, {}
    for module, bits, group in (("a.down", 4, 32), ("a.up", 8, 128)):
        codes, scale, _ = drawn(16, 256, bits, group, symmetric=True)
        tensors |= packed("compressed-tensors", module, codes, scale, None, bits, group)
        values[f"{module}.weight"] = value(codes, scale, None, bits, group)
    data, scale = torch.randint(-127, 128, (16, 96), generator=g).to(torch.int8), torch.rand(16, 1, generator=g)
    tensors |= {"a.q.weight": data, "a.q.weight_scale": scale, "norm.weight": torch.ones(4)}
    values["a.q.weight"] = data.float() * scale
    found = read_quant_config(settings, set(tensors))
    formats = {"a.down.weight": "int4_group32", "a.up.weight": "int8_group", "a.q.weight": "int8_row"}
    assert {name: found.format_of(name) for name in formats} == formats and found.format_of("norm.weight") == "plain"
    assert {name: str(quant) for name, quant in found.activation_quants.items()} == {"int8_row": "int8"}
    assert set(found.view(DictSource(tensors)).names()) >= set(formats)
    for name, want in values.items():
        assert torch.equal(read(found, tensors, name).dequantize(), want), name


@pytest.mark.parametrize(
    "groups",
    [
        [(["re:("], whole_bytes()), (["Linear"], config("compressed-tensors", 4, 32, True))],
        [("Linear", whole_bytes()), (["a"], config("compressed-tensors", 4, 32, True))],
        [(["a"], whole_bytes()), (["b"], whole_bytes(None))],  # one format with and without activations
        [(["a"], whole_bytes()), (["b"], {**config("compressed-tensors", 4, 32, True), "format": "marlin-24"})],
    ],
)
def test_groups_that_cannot_be_read_together(groups):
    with pytest.raises(UnsupportedModelError, match="compressed-tensors"):
        read_quant_config(mixed(*groups), None)


def expanded(found, tensors, name="a.weight"):
    """A weight as it is shown, and that it is shown so."""
    view = found.view(DictSource(tensors))
    assert found.format_of(name) == "plain" and view.shape(name[:-6] + "weight_scale") is None
    assert view.dtype(name).is_floating_point and sum(n.startswith("a.") for n in view.names()) == 1
    out = torch.empty(view.shape(name))
    view.read_into(name, out, Shard())
    half = torch.empty(len(out) // 2, out.shape[1])
    view.read_into(name, half, Shard(0, 1, 2))
    assert torch.equal(half, out[len(out) // 2 :])
    return out


@pytest.mark.parametrize(
    ("method", "bits"), [("gptq", 4), ("gptq", 8), ("compressed-tensors", 4), ("compressed-tensors", 8)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_scattered_columns_are_expanded(method, bits, symmetric):
    """Each column has the scale of the group that `g_idx` names, as activation order leaves them."""
    n, k, group = 24, 512, 128
    codes, scale, zero = drawn(n, k, bits, group, symmetric=symmetric)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1)) // group
    tensors = packed(method, "a", codes, scale, zero, bits, group)
    tensors["a.g_idx" if method == "gptq" else "a.weight_g_idx"] = order.int()
    settings = config(method, bits, group, symmetric)
    if method == "gptq":
        settings["desc_act"] = True
    else:
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    with pytest.warns(InferplaneWarning, match=r"expanded to 16 bits.*weight_only_int8"):
        found = read_quant_config(settings, set(tensors))
    middle = torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero.float()
    assert torch.equal(expanded(found, tensors), (codes.float() - middle[:, order]) * scale[:, order])


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("group", [128, 0])
def test_8_bits_with_zero_points_are_expanded(method, group):
    codes, scale, zero = drawn(24, 256, 8, group, symmetric=False)
    tensors = packed(method, "a", codes, scale, zero, 8, group)
    with pytest.warns(InferplaneWarning, match="8 bits and zero points"):
        found = read_quant_config(config(method, 8, group, False), set(tensors))
    assert torch.equal(expanded(found, tensors), value(codes, scale, zero, 8, group))


def test_a_scale_a_row_has_no_order():
    tensors = packed("gptq", "a", *drawn(24, 256, 4, 0, symmetric=True), 4, 0)
    found = read_quant_config({**config("gptq", 4, 0, True), "desc_act": True}, set(tensors))
    assert found.format_of("a.weight") == "int4_row"


ORDERS = [torch.arange(4), torch.tensor([2, 0, 3, 1]), torch.tensor([1, 1, 3, 0])]
"""Groups of four chunks of adjacent columns."""


@pytest.mark.parametrize("chunks", ORDERS)
@pytest.mark.parametrize(
    ("method", "bits", "group", "symmetric"),
    [
        ("gptq", 4, 128, True),
        ("gptq", 4, 64, False),
        ("gptq", 4, 32, False),
        ("gptq", 8, 128, True),
        ("compressed-tensors", 4, 32, True),
        ("compressed-tensors", 4, 128, False),
    ],
)
def test_an_order_of_whole_groups_is_not_expanded(method, bits, group, symmetric, chunks):
    codes, scale, zero = drawn(24, 4 * group, bits, group, symmetric=symmetric)
    tensors = packed(method, "a", codes, scale, zero, bits, group)
    order = chunks.repeat_interleave(group)
    tensors["a.g_idx" if method == "gptq" else "a.weight_g_idx"] = order.int()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = settle_order(ordered(config(method, bits, group, symmetric)), DictSource(tensors))
        found = read_quant_config(settings, set(tensors))
    middle = torch.full_like(scale, 2 ** (bits - 1)) if zero is None else zero.float()
    want = (codes.float() - middle[:, order]) * scale[:, order]
    assert found.format_of("a.weight") == read_quant_config(config(method, bits, group, symmetric), None).format_of(
        "model.layers.0.mlp.up_proj.weight"
    )
    assert torch.equal(read(found, tensors, "a.weight").dequantize(), want)
    assert torch.equal(read(found, tensors, "a.weight", Shard(1, 1, 2)).dequantize(), want.chunk(2, 1)[1])


def test_an_order_counts_if_any_module_has_it():
    settings = {**ordered(config("gptq", 4, 128, True)), "dynamic": {"+:b": {"desc_act": True}, "-:c": {}}}
    tensors = packed("gptq", "a", *drawn(24, 256, 4, 128, symmetric=True), 4, 128)
    settled = settle_order(settings, DictSource(tensors))
    assert settled["desc_act"] is False and settled["dynamic"]["+:b"] == {"desc_act": False}
    scattered = torch.arange(256) % 2
    for broken in (scattered.int(), scattered.float(), torch.zeros(2, 2).int(), torch.zeros(3).int()):
        assert (
            settle_order(settings, DictSource({**tensors, "b.g_idx": broken, "b.scales": torch.ones(2, 8)})) is settings
        )
    assert settle_order(settings, DictSource({**tensors, "b.g_idx": scattered.int()})) is settings
    for plain in (None, [], config("gptq", 4, 128, True), whole_bytes()):
        assert settle_order(plain, DictSource(tensors)) is plain


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_a_model_with_static_groups_keeps_its_bits(method, tmp_path):
    """Also as an export, which has no columns to look at; and beside the exporter's own file of settings."""
    quantized, plain = two_folders(tmp_path, "llama", method, 4, 32, True)
    settings = json.loads((quantized / "config.json").read_text())
    stated = ordered(settings["quantization_config"])
    (quantized / "config.json").write_text(json.dumps(settings))
    (quantized / "quantization_config.json").write_text(json.dumps(stated))
    export_model(ModelFiles(quantized), host(), "cpu", RunnerOptions(dtype="float32"), tmp_path / "export")
    logits = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*expanded to 16 bits")
        for path in (quantized, plain, tmp_path / "export"):
            with LLM(path, device="cpu", dtype="float32") as llm:
                formats = {w.format for w in llm.runner.plan.weights.values()}
                assert ("int4_group32" in formats) == (path != plain)
                logits.append(llm.logits([list(range(1, 40))])[0])
    assert logits[1].std() > 0.01 and (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[1].abs().max()
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("change", "match"),
    [(lambda t: t[:-1], "not a group for each"), (lambda t: t + 9, "names group"), (lambda t: t - 9, "below 0")],
)
def test_an_order_that_cannot_be(change, match):
    tensors = packed("gptq", "a", *drawn(24, 256, 4, 128, symmetric=True), 4, 128)
    tensors["a.g_idx"] = change(tensors["a.g_idx"])
    with pytest.warns(InferplaneWarning):
        found = read_quant_config({**config("gptq", 4, 128, True), "desc_act": True}, set(tensors))
    with pytest.raises(CheckpointError, match=match):
        found.view(DictSource(tensors)).read_into("a.weight", torch.empty(24, 256), Shard())


def test_groups_that_differ_say_what_is_expanded():
    """A group of 8 bits with zero points beside one of 4 bits without."""
    four, eight = drawn(24, 256, 4, 128, symmetric=True), drawn(24, 256, 8, 128, symmetric=False, seed=1)
    tensors = packed("compressed-tensors", "a", *four, 4, 128) | packed("compressed-tensors", "b", *eight, 8, 128)
    settings = config("compressed-tensors", 4, 128, True)
    other = config("compressed-tensors", 8, 128, False)["config_groups"]["group_0"]
    settings["config_groups"] = {
        "group_0": {**settings["config_groups"]["group_0"], "targets": ["a"]},
        "group_1": {**other, "targets": ["b"]},
    }
    with pytest.warns(InferplaneWarning, match="8 bits and zero points"):
        found = read_quant_config(settings, set(tensors))
    assert found.format_of("a.weight") == "int4_group" and found.format_of("b.weight") == "plain"
    assert torch.equal(read(found, tensors, "a.weight").dequantize(), value(*four, 4, 128))
    out = torch.empty(24, 256)
    found.view(DictSource(tensors)).read_into("b.weight", out, Shard())
    assert torch.equal(out, value(*eight, 8, 128))
