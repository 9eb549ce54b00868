"""Static scales of the KV cache in checkpoints: their names, what configs state, and values that are refused."""

import pytest
import torch
from safetensors.torch import save_file

from inferplane.errors import CheckpointError
from inferplane.models.reading.checkpoint import SafetensorsFolder
from inferplane.models.reading.kv_scales import find_kv_scales, of_export, read_kv_scales, values_of_export

FP8 = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
INT8 = {**FP8, "type": "int"}
LAYER = "model.layers.0"
NAMES = [f"{LAYER}.self_attn.k_scale", f"{LAYER}.self_attn.v_scale"]


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.mla_attn.k_scale", "self_attn.mla_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale", "self_attn.kv_scale"),
        ("self_attn.attn.kv_scale", "self_attn.attn.kv_scale"),
        ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale"),
    ],
)
def test_names_of_exporters(k, v):
    names = {f"{LAYER}.{k}", f"{LAYER}.{v}", f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.self_attn.q_scale"}
    found = find_kv_scales({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, names)
    want = {"k": f"{LAYER}.{k}", "v": f"{LAYER}.{v}"}
    assert found is not None and found.tensors == {LAYER: dict.fromkeys("kv", want["k"]) if k == v else want}


@pytest.mark.parametrize("other", ["kv_scale", "k_proj.output_scale", "attn.kv_scale"])
def test_a_scale_of_its_own_counts_before_others(other):
    """In whatever order names come."""
    own, more = f"{LAYER}.self_attn.k_scale", f"{LAYER}.self_attn.{other}"
    for names in ([own, more], [more, own]):
        found = find_kv_scales(None, names)
        assert found is not None and found.tensors[LAYER]["k"] == own


@pytest.mark.parametrize(
    ("settings", "dtype", "why"),
    [
        ({"kv_cache_scheme": FP8}, "fp8", ""),
        ({"kv_cache_scheme": INT8}, "int8", ""),
        ({"kv_cache_scheme": {"type": "float"}}, "fp8", ""),
        ({"kv_cache_quant_algo": "FP8"}, "fp8", ""),
        ({"kv_cache_quant_algo": "INT8"}, "int8", ""),
        ({"static_kv_dtype": "float8_e4m3fn"}, "fp8", ""),
        ({}, "fp8", ""),
        ({"kv_cache_quant_algo": "NVFP4"}, "", "'NVFP4'"),
        ({"kv_cache_scheme": {**FP8, "num_bits": 4}}, "", "4 bits"),
        ({"kv_cache_scheme": {**FP8, "dynamic": True}}, "", "while running"),
        ({"kv_cache_scheme": {**INT8, "symmetric": False}}, "", "zero points"),
    ],
)
def test_what_configs_state(settings, dtype, why):
    found = find_kv_scales(settings, NAMES)
    assert found is not None and found.dtype == dtype and why in found.why_not
    assert [found.serves(x) for x in ("fp8", "int8", "auto")] == [dtype == "fp8", dtype == "int8", False]


def test_scales_that_are_stated_and_not_there():
    assert find_kv_scales(None, ["model.layers.0.self_attn.k_proj.weight"]) is None
    found = find_kv_scales({"kv_cache_scheme": FP8}, [])
    assert found is not None and not found.serves("fp8") and "no tensors" in found.why_not


def read(folder, heads=2, **values):
    tensors = {f"{LAYER}.self_attn.{name}_scale": value for name, value in values.items()}
    save_file(tensors, folder / "model.safetensors")
    source = SafetensorsFolder(folder)
    found = find_kv_scales({"kv_cache_scheme": FP8}, list(source.names()))
    assert found is not None
    return read_kv_scales(source, found, heads)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number(shape, dtype, tmp_path):
    got = read(tmp_path, k=torch.full(shape, 0.5, dtype=dtype), v=torch.full(shape, 0.25, dtype=dtype))
    assert got == {LAYER: (0.5, 0.25)}


def test_of_scales_a_head_the_largest(tmp_path):
    assert read(tmp_path, k=torch.tensor([0.5, 2.0]), v=torch.tensor([[0.25], [0.125]])) == {LAYER: (2.0, 0.25)}


def test_a_latent_needs_no_scale_of_values(tmp_path):
    assert read(tmp_path, k=torch.tensor(0.5)) == {LAYER: (0.5,)}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("heads", [1, 2])
def test_no_positive_number(value, heads, tmp_path):
    with pytest.raises(CheckpointError, match=r"v_scale, a scale of the KV cache, is .*positive numbers"):
        read(tmp_path, k=torch.tensor(1.0), v=torch.tensor([value, 1.0][:heads]))


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, 32), torch.ones(1, dtype=torch.int8)])
def test_another_form(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"k_scale.* has shape .*one for each of 2 KV heads"):
        read(tmp_path, k=value, v=torch.tensor(1.0))


def test_values_without_keys(tmp_path):
    with pytest.raises(CheckpointError, match=r"1 layer\(s\) lack a scale of the KV cache"):
        read(tmp_path, v=torch.tensor(1.0))


def test_of_an_export():
    stored = {"dtype": "int8", "layers": {LAYER: [0.5, 0.25]}}
    assert of_export(stored).serves("int8") and values_of_export(stored) == {LAYER: (0.5, 0.25)}
    for wrong in ([0.5, -1.0], ["a", 1.0], 3):
        with pytest.raises(CheckpointError):
            values_of_export({"dtype": "int8", "layers": {LAYER: wrong}})
