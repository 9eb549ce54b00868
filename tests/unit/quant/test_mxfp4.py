"""MXFP4 as gpt-oss stores it, against transformers' own unpacking, and what is no such weight."""

from __future__ import annotations

import pytest
import torch

from inferplane.binding import DictSource
from inferplane.errors import CheckpointError
from inferplane.ops import encode
from inferplane.quant import read_quant_config
from inferplane.quant.mxfp4 import read
from inferplane.types.placement import WHOLE, Shard

NAME = "model.layers.0.mlp.experts.3.gate_up_proj.weight"
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def stored(rows=6, groups=4, low=110, high=140):
    g = torch.Generator().manual_seed(0)
    return {
        f"{NAME}_blocks": torch.randint(0, 256, (rows, groups, 16), generator=g, dtype=torch.uint8),
        f"{NAME}_scales": torch.randint(low, high, (rows, groups), generator=g, dtype=torch.uint8),
    }


def test_values_are_those_that_transformers_reads():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = stored(low=0, high=250)
    blocks, scales = (t[None] for t in tensors.values())
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    q = read(DictSource(tensors), NAME, WHOLE)
    assert torch.equal(q.dequantize(), want)
    assert q.block == (1, 32) and set(q.data.unique().tolist()) == {
        s * m for m in (0, 1, 2, 3, 4, 6, 8, 12) for s in (1, -1)
    }


@pytest.mark.parametrize("axis", [0, 1])
def test_each_rank_reads_its_part(axis):
    source = DictSource(stored())
    whole = read(source, NAME, WHOLE).dequantize()
    parts = [read(source, NAME, Shard(axis, rank, 2)).dequantize() for rank in range(2)]
    assert torch.equal(torch.cat(parts, axis), whole)
    with pytest.raises(CheckpointError, match="splits a group of 32 columns"):
        read(DictSource(stored(groups=3)), NAME, Shard(1, 0, 2))


def test_a_scale_that_is_no_number_remains_one():
    tensors = stored()
    tensors[f"{NAME}_scales"][2, 1] = 255
    values = read(DictSource(tensors), NAME, WHOLE).dequantize()
    assert values[2, 32:64].isnan().all() and values.isnan().sum() == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop(f"{NAME}_scales"),
        lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"][:, :-1]}),
        lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"][..., :8]}),
        lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"].int()}),
    ],
)
def test_what_does_not_fit_is_refused(change):
    tensors = stored()
    change(tensors)
    formats = read_quant_config(SETTINGS, tensors)
    with pytest.raises(CheckpointError, match="is no MXFP4 weight"):
        formats.view(DictSource(tensors)).shape(NAME)


def test_which_weights_have_the_format():
    formats = read_quant_config(SETTINGS, {*stored(), "lm_head.weight"})
    assert formats.format_of(NAME) == "mxfp4" and formats.format_of("lm_head.weight") == "plain"
    by_config = read_quant_config(SETTINGS, None).format_of
    assert by_config(NAME) == "mxfp4" and by_config("model.layers.0.self_attn.q_proj.weight") == "plain"

    view = formats.view(DictSource(stored()))
    assert view.shape(NAME) == (6, 128) and NAME in view.names()


def test_quantizing_rounds_to_the_nearest_value():
    w = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    w[2, 32:64] = 0
    q = encode(w, "mxfp4")
    got = q.dequantize()
    exact = encode(got, "mxfp4")
    assert torch.equal(exact.dequantize(), got), "what is exact stays"
    assert (got[2, 32:64] == 0).all()
    scale = 2 * q.expand_scale()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * torch.tensor([[1.0], [-1.0]])
    nearest = (w[..., None] / scale[..., None] - grid.flatten()).abs().amin(-1) * scale
    assert torch.allclose((got - w).abs(), nearest, atol=1e-6)
    assert (w.abs() / scale).amax() < 8, "the shared power of two is at least an eighth of the largest magnitude"


@pytest.mark.parametrize(("name", "format"), [("wq_b", "fp8_block"), ("wk", "fp8_block"), ("weights_proj", "plain")])
def test_an_indexer_without_tensors_has_the_published_formats(name, format):
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read_quant_config(settings, None).format_of(f"model.layers.3.self_attn.indexer.{name}.weight") == format
