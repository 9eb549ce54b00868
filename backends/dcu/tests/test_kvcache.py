"""Blocks of heads beside a cache in canonical form."""

from __future__ import annotations

import pytest
import torch

from inferplane.plugin import KVRequest, UsageError
from inferplane_dcu.kvcache import HEADS, layouts

REQUEST = KVRequest("gqa", 2, 64, 64)


def build(blocks):
    (layout,) = [x for x in layouts(REQUEST) if x.name == HEADS]
    return layout, layout.build(REQUEST, blocks, torch.float32, torch.device("cpu"))


def test_keys_lie_by_head_and_values_are_turned():
    layout, kv = build(3)
    k, v = torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    kv.write(torch.tensor([2 * 64 + 5, -1]), k, v)
    assert torch.equal(kv.keys[2, :, 5], k[0]) and torch.equal(kv.values[2, :, :, 5], v[0])
    assert torch.equal(kv.keys[3, :, 63], k[1]), "slot -1 is the spare block's"
    table = torch.tensor([2], dtype=torch.int32)
    read = kv.read(table, 6)
    assert torch.equal(read[0][5], k[0]) and torch.equal(read[1][5], v[0])
    assert layout.bytes_per_block(REQUEST, torch.bfloat16) == 64 * 2 * 128 * 2


def test_other_shapes_are_refused_whole():
    _, kv = build(3)
    before = kv.keys.clone()
    with pytest.raises(UsageError, match="cannot load"):
        kv.load(torch.tensor([1]), (torch.ones(1, 2, 64, 64), torch.ones(1, 2, 32, 64)))
    assert torch.equal(kv.keys, before)
