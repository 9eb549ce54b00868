"""Stacks of experts with inputs before outputs, read as single experts from a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from inferplane.models.reading.checkpoint import SafetensorsFolder
from inferplane.models.reading.stacked_experts import split_stacks
from inferplane.types.placement import WHOLE, Shard

LAYER = "model.layers.1.mlp.experts"


@pytest.fixture
def stack(tmp_path):
    g = torch.Generator().manual_seed(0)
    tensors = {
        f"{LAYER}.gate_up_proj": torch.randn(3, 6, 10, generator=g).bfloat16(),
        f"{LAYER}.gate_up_proj_bias": torch.randn(3, 10, generator=g),
        f"{LAYER}.down_proj_blocks": torch.randint(0, 256, (3, 6, 2, 16), generator=g, dtype=torch.uint8),
        f"{LAYER}.down_proj_scales": torch.randint(0, 256, (3, 6, 2), generator=g, dtype=torch.uint8),
        f"{LAYER}.down_proj": torch.randn(6, 4, generator=g),  # no stack
        "model.norm.weight": torch.randn(6, generator=g),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors, SafetensorsFolder(tmp_path, split_stacks)


def read(source, name, shard=WHOLE, dtype=torch.float32):
    shape = list(source.shape(name))
    first, last = shard.bounds(shape[shard.axis])
    shape[shard.axis] = last - first
    out = torch.full(shape, torch.nan).to(dtype)
    source.read_into(name, out, shard)
    return out


def test_names_and_values(stack):
    tensors, source = stack
    kinds = {"gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight_blocks", "down_proj.weight_scales"}
    names = {f"{LAYER}.{e}.{kind}" for e in range(3) for kind in kinds}
    assert set(source.names()) == {*names, f"{LAYER}.down_proj", "model.norm.weight"}
    for e in range(3):
        weight = tensors[f"{LAYER}.gate_up_proj"][e].float()
        assert torch.equal(read(source, f"{LAYER}.{e}.gate_up_proj.weight"), weight.t())
        assert torch.equal(read(source, f"{LAYER}.{e}.gate_up_proj.bias")[0], tensors[f"{LAYER}.gate_up_proj_bias"][e])
        for kind in ("blocks", "scales"):
            got = read(source, f"{LAYER}.{e}.down_proj.weight_{kind}", dtype=torch.uint8)
            assert torch.equal(got, tensors[f"{LAYER}.down_proj_{kind}"][e])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_a_transposed_expert(stack, axis, rank):
    tensors, source = stack
    want = tensors[f"{LAYER}.gate_up_proj"][2].float().t().chunk(2, axis)[rank]
    assert torch.equal(read(source, f"{LAYER}.2.gate_up_proj.weight", Shard(axis, rank, 2)), want)
