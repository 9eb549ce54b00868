"""Kinds of caches are open: a plugin names one, and everything in core that handles entries follows its shapes."""

import pytest
import torch

from inferplane.errors import UsageError
from inferplane.ops import Draw
from inferplane.types import KVKind, KVRequest, LayerKV, register_kv_kind
from inferplane.types.kv_request import KV_KINDS


class PlainKV(LayerKV):
    """Entries by slot; has only the required methods."""

    layout, block_tokens = "plain_2", 2

    def __init__(self, request, blocks):
        self.request = request
        self.entries = [torch.zeros(blocks * 2, *shape) for shape in request.entry_shapes]

    def write(self, slots, *values):
        for entry, value in zip(self.entries, values):
            entry[slots[slots >= 0]] = value[slots >= 0]

    def read(self, table, tokens):
        return tuple(entry[self._slots_of(table)][:tokens] for entry in self.entries)


@pytest.fixture
def indexed_keys():
    kind = KVKind("indexed_keys", lambda request: ((request.heads, request.dim), (request.v_dim,)))
    register_kv_kind(kind)
    yield KVRequest("indexed_keys", 2, 4, 3)
    del KV_KINDS["indexed_keys"]


def test_a_plugin_names_a_kind(indexed_keys):
    assert indexed_keys.entry_shapes == ((2, 4), (3,)) and indexed_keys.entries == 11
    _, kv = Draw(1, torch.float32, build_kv=PlainKV).step(indexed_keys, [(1, 4), (2, 2)])
    assert [tuple(t.shape) for t in kv.read(torch.tensor([0, 2]), 3)] == [(3, 2, 4), (3, 3)]


def test_names_are_unique_and_known(indexed_keys):
    with pytest.raises(UsageError, match="registered already"):
        register_kv_kind(KVKind("indexed_keys", lambda request: ()))
    with pytest.raises(
        UsageError, match=r"'state' is unknown.*compressor_rows, gqa, index_keys, index_rows, indexed_keys, mla"
    ):
        assert KVRequest("state", 1, 4).entries


def test_copy_export_and_load_need_no_code_of_a_layout():
    request = KVRequest("gqa", 2, 3, 5)
    kv, other = PlainKV(request, 4), PlainKV(request, 4)
    values = tuple(torch.randn(8, *shape) for shape in request.entry_shapes)
    kv.write(torch.arange(8), *values)
    kv.copy_blocks(torch.tensor([1, 2]), torch.tensor([2, 1]))
    k = kv.read(torch.arange(4), 8)[0]
    assert torch.equal(k[2:4], values[0][4:6]) and torch.equal(k[4:6], values[0][2:4])
    stored = kv.export(torch.tensor([3, 0]))
    other.load(torch.tensor([1, 2]), stored)
    assert torch.equal(other.read(torch.tensor([1, 2]), 4)[1], kv.read(torch.tensor([3, 0]), 4)[1])
    with pytest.raises(UsageError, match="plain_2 cannot load"):
        other.load(torch.tensor([1]), stored)
