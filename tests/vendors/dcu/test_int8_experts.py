"""Experts in int8: their order, with and without a configuration, and the order of pairs."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.ops import OPS
from inferplane.ops.draw import Draw
from inferplane.ops.formats import dequantize_rows, encode
from inferplane.ops.quantize import Quantize
from inferplane_dcu import vendor
from inferplane_dcu.kernels import moe_int8
from tests.vendors.dcu import chip, emulate_moe, emulated
from tests.vendors.products import check_experts, error

pytestmark = chip.whole
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def unheard(monkeypatch):
    """What is called here is not what the backend calls."""
    monkeypatch.setattr(emulated.EMULATOR, "listeners", [])


def test_marlins_order_and_back():
    weight = encode(Draw(3, BF16).normal(3, 48, 128), "int8_row")
    packed = moe_int8.Int8Marlin(weight)
    assert packed.data.shape == (3, 2, 64 * 48)
    for e in range(3):
        assert torch.equal(emulate_moe.plain_int8(packed.data[e], 128), weight.data[e].t()), "as the vendor reads it"
        assert torch.equal(packed.dequantize(e, torch.float32), weight.data[e].float() * weight.scale[e])


@pytest.mark.parametrize("tokens", [1, emulate_moe.MOST_TOKENS, emulate_moe.MOST_TOKENS + 1])
def test_with_a_configuration_and_without(tokens, monkeypatch):
    """Where lightop has none, torch multiplies by the same packed weights; each size is looked up once."""
    draw = Draw(5, BF16)
    x, gate_up, down = draw.normal(tokens, 64), draw.normal(5, 128, 64) / 8, draw.normal(5, 64, 64) / 8
    quantized = {"gate_up": encode(gate_up, "int8_row"), "down": encode(down, "int8_row")}
    weights = draw.uniform(tokens, 2, low=0.1)
    ids = torch.stack([torch.tensor(draw.permutation(5)[:2]) for _ in range(tokens)])
    view = SimpleNamespace(**{n: moe_int8.Int8Marlin(w) for n, w in quantized.items()})
    view.prepared = moe_int8.Int8ExpertCalls()
    products, looked_up = [], []
    product, config = view.prepared.product, view.prepared.config
    monkeypatch.setattr(view.prepared, "product", lambda *args: (products.append(args), product(*args)))
    monkeypatch.setattr(view.prepared, "config", lambda *args: (looked_up.append(args), config(*args))[1])
    rounded = dequantize_rows(*Quantize("int8", 0)(x), 0)
    plain = [w.dequantize() for w in quantized.values()]
    for _ in range(2):
        got = moe_int8.moe_experts_w8a8(view, x, weights, ids.int())
        if tokens > emulate_moe.MOST_TOKENS:
            check_experts(got, x, *plain, weights, ids)
        else:
            gate, up = torch.einsum("tkjd,td->tkj", plain[0][ids].float(), rounded).chunk(2, -1)
            want = torch.einsum("tkdj,tkj->tkd", plain[1][ids].float(), torch.nn.functional.silu(gate) * up)
            assert error(got, (want * weights[..., None]).sum(1)) <= OPS["moe_experts"].tolerance[BF16] + 0.01
    assert len(products) == (4 if tokens <= emulate_moe.MOST_TOKENS else 0)
    assert len(looked_up) == 1 and looked_up[0][7:] == (*vendor.device(), "bfloat16")


def test_pairs_are_in_the_order_of_experts_and_tokens():
    """Unused places hold the number of pairs, and blocks behind the last one an expert that there is."""
    ids = torch.tensor([[2, 0], [2, 1], [0, 2]])
    pairs, owners, used = moe_int8.align_pairs(ids, 4, 2)
    assert all(t.dtype is torch.int32 for t in (pairs, owners, used))
    assert used.tolist() == [8] and pairs[:8].tolist() == [1, 4, 3, 6, 0, 2, 5, 6]
    assert owners[:4].tolist() == [0, 1, 2, 2] and set(pairs[8:].tolist()) <= {6} and int(owners.max()) < 4
    assert owners.numel() * 2 == pairs.numel() >= 6 + 4


def test_the_name_that_tables_go_by_is_the_vendors_own(monkeypatch):
    assert vendor.table_device() == vendor.device(), "where no module of the vendor's says it"
    module = ModuleType("lightop.envs")
    module.LMSLIM_GPU_NAME = "BW1000_H"
    monkeypatch.setitem(sys.modules, "lightop.envs", module)
    assert vendor.table_device() == ("BW1000_H", vendor.device()[1])
