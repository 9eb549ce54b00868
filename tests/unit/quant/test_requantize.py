"""Quantized weights put into another format while they are read: values, pieces, slices, warnings."""

import sys
from collections import Counter

import pytest
import torch

from inferplane.binding import DictSource
from inferplane.ops import FORMATS, encode
from inferplane.quant import read_quant_config, requantize_on_load
from inferplane.quant.online import quantize, quantize_on_load
from inferplane.quant.requantize import count_requantized, explain_requantized, requantize
from inferplane.types import QTensor, Shard, Weight

TARGETS = ("int8_group", "int4_group32", "int4_group64", "int8_row", "fp8_block", "fp8_row")
NAME = "model.layers.0.mlp.down_proj.weight"


def drawn(n, k):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * 0.1


def equal(a, b):
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stored", FORMATS)
def test_pieces_are_those_of_all_values_at_once(stored, target, monkeypatch):
    monkeypatch.setattr(sys.modules[requantize.__module__], "ENTRIES_AT_ONCE", 256 * 192)
    q = encode(drawn(700, 192), stored)
    got, want = requantize(q, target), quantize(q.dequantize(), target)
    assert equal(got, want) and (got.block, got.bits) == (want.block, want.bits)
    # Of the largest entry, 448 in FP8; in 4 bits what is opposite to -8 saturates at 7.
    half_step = 16.5 if "fp8" in target else 1.01 if "int4" in target else 0.51
    assert (got.dequantize() - q.dequantize()).abs().max() <= half_step * got.scale.abs().max()


def test_zero_points_are_part_of_the_values():
    q = encode(drawn(300, 64), "int4_group32")
    shifted = QTensor(q.data + 3, q.scale, zero=torch.full_like(q.scale, 3), block=q.block, bits=8)
    assert equal(requantize(shifted, "int8_group"), requantize(q, "int8_group"))


def test_the_float32_copy_is_bounded(monkeypatch):
    sizes, expand = [], QTensor.dequantize

    def record(self, *args):
        found = expand(self, *args)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(QTensor, "dequantize", record)
    module = sys.modules[requantize.__module__]
    monkeypatch.setattr(module, "ENTRIES_AT_ONCE", 2**15)
    requantize(encode(drawn(1000, 128), "fp8_block"), "int4_group32")
    assert len(sizes) == 4 and max(sizes) <= 2**15
    sizes.clear()
    requantize(encode(drawn(300, 512), "fp8_block"), "int4_group32")
    assert max(sizes) == module.ROWS * 512, "of a wide weight 128 rows"


def test_a_number_that_is_none_remains_one():
    q = encode(drawn(256, 128), "fp8_block")
    q.data.view(torch.uint8)[200, 5] = 0x7F
    assert requantize(q, "int8_group").scale.isnan().any()


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def checkpoint(**more):
    q = encode(drawn(256, 256), "fp8_block")
    return {NAME: q.data, f"{NAME}_scale_inv": q.scale, **more}, q


def formats(scheme, tensors, settings=FP8, latent=()):
    config = {"quantization_config": settings}
    return requantize_on_load(quantize_on_load(scheme, config, latent), read_quant_config(settings, set(tensors)))


@pytest.mark.parametrize("shard", [Shard(), Shard(0, 1, 2), Shard(1, 1, 2)])
def test_a_rank_reads_its_slice(shard):
    tensors, q = checkpoint()
    found = formats("weight_only_int4", tensors)
    got = found.readers["int4_group32"](DictSource(tensors), NAME, shard)
    first, last = shard.bounds(256)
    mine = q.dequantize().narrow(shard.axis, first, last - first)
    assert equal(got, quantize(mine, "int4_group32"))


def test_the_format_that_the_scheme_makes_is_taken_as_it_is():
    tensors, q = checkpoint()
    q.scale.mul_(1.7)  # no scale that quantizing the values again would give
    tensors[f"{NAME}_scale_inv"] = q.scale
    found = formats("a8w8_fp8_wint4", tensors)
    assert equal(found.readers["fp8_block"](DictSource(tensors), NAME, Shard()), q)


def test_what_the_checkpoint_has_in_plain_follows_the_scheme():
    head, norm = "lm_head.weight", "model.norm.weight"
    tensors, _ = checkpoint(**{head: drawn(64, 256), norm: torch.ones(256)})
    found = formats("weight_only_int4", tensors)
    assert [found.format_of(n) for n in (NAME, head, norm)] == ["int4_group32", "int8_group", "plain"]
    got = found.readers["int8_group"](DictSource(tensors), head, Shard())
    assert equal(got, quantize(tensors[head], "int8_group"))


def test_what_the_scheme_leaves_alone_stays_as_it_is_stored():
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    q = encode(drawn(256, 256), "fp8_block")
    tensors = {name: q.data, f"{name}_scale_inv": q.scale}
    assert formats("a8w8", tensors).format_of(name) == "fp8_block"
    assert formats("weight_only_int4", tensors).format_of(name) == "fp8_block"
    assert formats("weight_only_int4", tensors, latent={"int4_group32"}).format_of(name) == "int4_group32"


def test_activations_are_quantized_as_the_scheme_says():
    tensors, _ = checkpoint()
    assert read_quant_config(FP8, set(tensors)).activation_quants
    assert not formats("weight_only_int8", tensors).activation_quants
    assert formats("a8w8", tensors).activation_quants.keys() == {"int8_row"}
    assert formats("a8w8_fp8_wint4", tensors).activation_quants.keys() >= {"fp8_block", "int4_group64"}


def test_without_a_checkpoint_the_config_decides():
    found = requantize_on_load(quantize_on_load("weight_only_int4", {}), read_quant_config(FP8, None))
    assert found.format_of(NAME) == "int4_group32"
    assert found.format_of("model.layers.0.self_attn.kv_b_proj.weight") == "fp8_block"


def test_weights_that_do_not_become_smaller_are_named():
    def pairs(stored, now):
        weights = [Weight(("a", "b"), (8, 8), format=now), Weight(("c",), (8,)), Weight(("d",), (4, 8), format=stored)]
        return count_requantized(weights, lambda name: "plain" if name == "c" else stored)

    assert pairs("fp8_block", "int4_group32") == Counter({("fp8_block", "int4_group32"): 2})
    assert not explain_requantized(pairs("fp8_block", "int4_group32"), "weight_only_int4")
    (grown,) = explain_requantized(pairs("int4_group", "int8_group"), "weight_only_int8")
    assert "take more memory" in grown and "2 from int4_group to int8_group" in grown
    (same,) = explain_requantized(pairs("fp8_block", "int8_row"), "a8w8")
    assert "no smaller" in same and "2 from fp8_block to int8_row" in same
    assert not explain_requantized({}, None)
