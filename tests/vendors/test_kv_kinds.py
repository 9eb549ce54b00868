"""A plugin's own kind of KV cache on every backend: stored as the kind's shapes say, in no layout of another kind."""

from __future__ import annotations

import pytest
import torch

from inferplane.plugin import HOST, KVKind, KVRequest, register_kv_kind
from inferplane.plugins import discover
from inferplane.types.kv_request import KV_KINDS
from tests.house.rules import IN_TREE

PLUGINS = discover(IN_TREE)
BACKENDS = {entry.name: type(PLUGINS.backend_for_explain(entry.name)) for entry in PLUGINS.devices()}
KINDS = {
    "one vector": lambda request: ((request.dim,),),
    "index keys of one head": lambda request: ((request.heads, request.dim), (request.v_dim,)),
    "three tensors": lambda request: ((request.heads, request.dim), (request.heads, request.v_dim), (request.dim,)),
    "a matrix": lambda request: ((request.heads, request.dim, request.v_dim),),
}
DTYPE = torch.float32


@pytest.fixture(params=KINDS)
def request_(request):
    register_kv_kind(KVKind(request.param, KINDS[request.param]))
    yield KVRequest(request.param, heads=2, dim=64, v_dim=32)
    del KV_KINDS[request.param]


@pytest.mark.parametrize("device", BACKENDS)
def test_entries_of_a_plugin_kind(device, request_):
    layouts = BACKENDS[device]().kv_layouts(request_, DTYPE)
    assert layouts and layouts[0].kv_dtype == "auto"
    for layout in layouts:
        kv = layout.build(request_, 3, DTYPE, torch.device(HOST))
        values = tuple(torch.randn(4, *shape) for shape in request_.entry_shapes)
        size = layout.block_tokens
        kv.write(torch.tensor([2 * size, 2 * size + 1, -1, 2]), *values)
        first, last = (kv.read(torch.tensor([block]), tokens) for block, tokens in ((2, 2), (0, 3)))
        for got, more, want in zip(first, last, values, strict=True):
            error = (torch.cat((got, more[2:])) - want[[0, 1, 3]]).abs().max()
            assert error <= layout.tolerance * want.abs().max(), layout.name


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("other", [KVRequest("gqa", 2, 128, 128), KVRequest("mla", 1, 576)], ids=["gqa", "mla"])
def test_layers_of_a_plugin_kind_share_blocks_with_others(device, other, request_):
    """A model may have layers of both kinds, and all its layers have blocks of one size."""
    offered = [{layout.block_tokens for layout in BACKENDS[device]().kv_layouts(r, DTYPE)} for r in (other, request_)]
    assert set.intersection(*offered)
