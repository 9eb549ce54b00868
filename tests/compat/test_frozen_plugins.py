"""Plugins of earlier API versions go on working, without an edit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inferplane import plugin, plugins
from inferplane.errors import DeviceError, KernelError, UsageError
from inferplane.types import ActivationQuant, Batch, Context, Features, HostLens, Kernel, KVRequest, Weight


@pytest.fixture
def frozen(monkeypatch):
    """The host with the plugin of API 1.0 alone, and its module."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    host = plugins.discover("only,plugin_v1_0")
    yield host, sys.modules["plugin_v1_0"]
    del sys.modules["plugin_v1_0"]


def test_it_is_still_accepted(frozen):
    host, _ = frozen
    assert plugins.API_VERSION[0] == 1, (
        "a new major: this plugin must now be refused, with both numbers; test that instead"
    )
    assert not host.list_quarantined()
    assert host.plugins()[0].api == (1, 0)
    assert [entry.name for entry in host.devices()] == ["frozen", "frozenfam:lazy"]
    assert host.models() == {"FrozenForCausalLM": "plugin_v1_0:build"}
    assert host.quantization() == {"frozen-q4": "plugin_v1_0:read_q4"}


def test_its_backend(frozen):
    host, module = frozen
    backend = host.backend("frozen")
    state = backend.open()
    assert (state.name, state.arch, state.memory.free_bytes) == ("the frozen device", "frozen1", 2**20)
    assert state.features.lacking(["bf16"]) == []
    assert "nobody knows" in state.features.lacking(["fp8"])[0]
    assert backend.features().lacking(["bf16"]) == []
    assert backend.features("frozen0").lacking(["bf16"]) != []
    assert backend.comm() and backend.timer()() > 0 and backend.capture(None, None) is None
    backend.synchronize()
    assert host.backend("auto").name == "frozen"
    with pytest.raises(DeviceError, match="wait for it"):
        host.backend("frozenfam")
    assert isinstance(host.backend_for_explain("frozenfam"), module.LazyBackend)


def test_its_kernels(frozen):
    host, module = frozen
    kernels = {kernel.op: kernel for kernel in host.kernels("frozen")}
    assert [kernel.name for kernel in kernels.values()] == [
        "frozen:linear", "frozen:rms_norm", "frozen:attention", "frozen-more:linear", "frozen-more:linear",
    ]  # fmt: skip
    assert kernels["attention"].function() is module.attention
    assert kernels["linear"].packs["weight"].fn(torch.ones(2, 3)).shape == (3, 2)
    norm = kernels["rms_norm"]

    class Op:
        eps = 1e-6

        def kv_requests(self):
            return ()

    context = Context(torch.float32, "decode", features=Features(["bf16"]), deterministic=True)
    assert norm.refusals(Op(), context, ["plain"]) == []
    assert norm.prepare(Op(), context) == (torch.float32, "decode")
    assert norm.refusals(Op(), Context(torch.float32, "mixed"), ["q4"]) != []
    with pytest.raises(KernelError):
        type(norm)("rms_norm", "gone", "surely_not_installed:f").function()


def test_its_cache(frozen):
    host, _ = frozen
    backend = host.backend("frozen")
    request = KVRequest("gqa", heads=2, dim=4, v_dim=4)
    (layout,) = backend.kv_layouts(request, torch.float32)
    latent = backend.kv_layouts(KVRequest("mla", 1, 8), torch.float32)
    assert [(paged.name, paged.block_tokens) for paged in latent] == [("paged_8", 8), ("paged_8_int8", 8)]
    assert layout.bytes_per_block(request, torch.float32) == 8 * 16 * 4
    cache = backend.build_kv_cache([request, request], {request: layout}, blocks=3, dtype=torch.float32)
    assert (len(cache.layers), cache.blocks, cache.block_tokens) == (2, 3, 8)
    layer = cache.layers[1]
    k, v = torch.randn(10, 2, 4), torch.randn(10, 2, 4)
    slots = torch.tensor([*range(16, 24), -1, 1])
    layer.write(slots, k, v)
    got_k, got_v = layer.read(torch.tensor([2, 0], dtype=torch.int32), 10)
    assert torch.equal(got_k[:8], k[:8]) and torch.equal(got_v[9], v[9]) and not got_k[8].any()
    layer.copy_blocks(torch.tensor([2]), torch.tensor([1]))
    stored = layer.export(torch.tensor([1]))
    cache.layers[0].load(torch.tensor([0]), stored)
    assert torch.equal(cache.layers[0].read(torch.tensor([0]), 8)[0], k[:8])
    with pytest.raises(UsageError, match="heads first"):
        layer.load(torch.tensor([0]), (torch.zeros(1, 1, 1, 1),))


def test_its_view_of_a_batch(frozen):
    _, module = frozen
    reads = []

    class Cache:
        def read(self, table, tokens):
            reads.append((table.tolist(), tokens))

    integers = torch.arange(3)
    starts, lens, tables = torch.tensor([0, 2, 3]), torch.tensor([2, 9]), torch.tensor([[1, 0], [2, 3]])
    known = HostLens((0, 2, 3), (2, 9))
    batch = Batch(integers, integers, integers, starts, lens, tables, None, "decode", 2, 9, known)
    module.attention(None, integers, Cache(), batch)
    assert reads == [([1, 0], 2), ([2, 3], 9)]


def test_it_observes(frozen):
    host, module = frozen
    host.emit(plugins.Event("device.opened", {"device": "frozen"}))
    assert module.seen == [("device.opened", {"device": "frozen"})]
    assert not host.list_quarantined()


def test_names_of_1_0_that_have_new_ones():
    with pytest.warns(DeprecationWarning, match="Kernel.codes is deprecated; use quantizes_activations_to"):
        kernel = Kernel("linear", "old", "old:linear", codes="fp8", extra_error=0.1)
    with pytest.warns(DeprecationWarning, match="Weight.act is deprecated; use activation_quant"):
        weight = Weight(("a",), (8, 8), format="fp8_row", act="fp8_static")
    assert weight.activation_quant == ActivationQuant("fp8", static=True)
    with pytest.warns(DeprecationWarning, match="is deprecated; use"):
        assert (weight.act, kernel.codes) == ("fp8_static", "fp8")
    assert replace(kernel, rank=50).quantizes_activations_to == "fp8"
    with pytest.raises(AttributeError, match="no attribute 'uninstalled'"):
        plugin.uninstalled  # noqa: B018
