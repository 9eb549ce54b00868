"""Norms, activations, rotation and layers of other forms against torch's own functions, in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inferplane.ops import (
    MLP,
    Activation,
    ActivationMul,
    AddNorm,
    AddRMSNorm,
    BlockLayer,
    DecoderLayer,
    Draw,
    Embedding,
    GatedMLP,
    GQABlock,
    HybridBlock,
    LayerNorm,
    Linear,
    LMHead,
    ParallelLayer,
    PartialRope,
    PrepareAttention,
    ResidualLayer,
    RMSNorm,
    Rope,
    ScaledEmbedding,
    ScaledHead,
    SiluGate,
    WidthRMSNorm,
    placeholder,
)
from inferplane.types import HybridCache
from inferplane.types.batch import Query, make_batch
from tests.unit.support.formulas import rope_table, rotate
from tests.unit.support.small import F32, LAYOUT, bound, w


def near(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_an_rms_norm_with_an_offset():
    x, weight = torch.randn(4, 3, 40), torch.randn(40) * 0.2
    near(bound(RMSNorm(w("n", 40), 1e-5, 1.0), {"n": weight})(x), F.rms_norm(x, (40,), 1 + weight, 1e-5))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias):
    x, weights = torch.randn(5, 97) + 2, {"n": torch.randn(97), "b": torch.randn(97)}
    op = LayerNorm(w("n", 97), 1e-4, w("b", 97) if bias else None)
    near(bound(op, weights)(x), F.layer_norm(x, (97,), weights["n"], weights["b"] if bias else None, 1e-4))


def test_a_layer_norm_whose_weights_differ_by_head():
    x, weight = torch.randn(5, 3, 40), torch.randn(3, 40)
    near(bound(LayerNorm(w("n", 3, 40), 1e-5), {"n": weight})(x), F.layer_norm(x, (40,), eps=1e-5) * weight)


def test_a_norm_of_all_heads_together():
    x, weight = torch.randn(5, 3, 40), torch.randn(120)
    want = F.rms_norm(x.flatten(1), (120,), weight, 1e-5).view(5, 3, 40)
    near(bound(WidthRMSNorm(w("n", 120), 1e-5, 120), {"n": weight})(x), want)


def test_the_sum_and_its_layer_norm():
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    op = bound(AddNorm(LayerNorm(w("n", 64), 1e-5)), {"n": weight})
    normed, total = op(x, residual)
    assert torch.equal(total, x + residual)
    near(normed, F.layer_norm(x + residual, (64,), weight, eps=1e-5))
    assert torch.equal(op(x, None)[1], x)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("relu2", lambda x: x.clamp(min=0) ** 2),
        ("silu", lambda x: x * x.sigmoid()),
    ],
)
def test_activations(name, function):
    x = torch.randn(3, 2 * 37) * 3
    near(Activation(name)(x), function(x))
    near(ActivationMul(name)(x), function(x[:, :37]) * x[:, 37:])
    up, down, bias = torch.randn(24, 74) / 9, torch.randn(74, 24) / 5, torch.randn(24)
    op = MLP(Linear(w("up", 24, 74), w("bias", 24)), Linear(w("down", 74, 24)), Activation(name))
    near(bound(op, {"up": up, "down": down, "bias": bias})(x), function(x @ up.T + bias) @ down.T)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_part_of_a_head_is_rotated(interleaved):
    x, positions = torch.randn(4, 2, 40), torch.tensor([0, 3, 200, 7])
    table, turns = rope_table(24)
    got = bound(PartialRope(Rope(table, interleaved), 24), {})(x, positions)
    assert torch.equal(got[..., 24:], x[..., 24:])
    near(got[..., :24], rotate(x[..., :24], turns[positions][:, None], interleaved=interleaved))


def test_a_scaled_embedding_and_head():
    table, ids = torch.randn(10, 8), torch.tensor([3, 9, 0])
    assert torch.equal(bound(ScaledEmbedding(Embedding(w("e", 10, 8)), 2.5), {"e": table})(ids), table[ids] * 2.5)
    x = torch.randn(3, 8)
    batch = make_batch([Query([1, 2, 3], 0, [0], None)], block_tokens=16, device="cpu")
    for factor, cap in ((0.25, None), (1.0, 0.7), (3.0, 1.5)):
        logits = x @ table.T * factor
        want = logits if cap is None else cap * torch.tanh(logits / cap)
        near(bound(ScaledHead(LMHead(w("e", 10, 8)), factor, cap), {"e": table})(x, batch), want)


def test_queries_that_nothing_changes_are_contiguous():
    """Kernels of attention may read them by their address."""
    sample = next(s for s in PrepareAttention.samples() if s.label == "no_rotation")
    draw = Draw(0, F32, build_kv=lambda request, blocks: LAYOUT.build(request, blocks, F32, torch.device("cpu")))
    q, *more = sample.inputs(draw)
    assert not q.is_contiguous()
    got = bound(sample.op, {})(q, *more)
    assert got.is_contiguous() and torch.equal(got, q)


# ------------------------------------------------------------------ layers, with blocks that only multiply


class Blocks:
    """An attention that doubles and an MLP that triples, as bound ops: the layers' own arithmetic is left."""

    attn = staticmethod(lambda x, batch, kv: 2 * x)
    mlp = staticmethod(lambda x: 3 * x)

    def __init__(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)


def add(norm):
    return lambda x, residual: (norm(x if residual is None else x + residual), x if residual is None else x + residual)


NORM, OTHER = (lambda x: x / 7), (lambda x: x.sin())


@pytest.mark.parametrize("residual", [torch.randn(3, 8), None])
def test_norms_after_the_blocks(residual):
    view = Blocks(attn_norm=None, attn_after=NORM, mlp_norm=None, mlp_after=OTHER, factor=1.0)
    x = torch.randn(3, 8)
    out, rest = ResidualLayer.__call__(view, x, residual, None, None)
    h = x if residual is None else x + residual
    h = h + NORM(2 * h)
    near(rest, h)
    near(out + rest, h + OTHER(3 * h))


def test_norms_on_both_sides_and_a_factor():
    view = Blocks(attn_norm=add(NORM), attn_after=OTHER, mlp_norm=add(OTHER), mlp_after=NORM, factor=0.3)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    out, rest = ResidualLayer.__call__(view, x, residual, None, None)
    h = x + residual
    h = h + OTHER(2 * NORM(h)) * 0.3
    near(rest, h)
    near(out, NORM(3 * OTHER(h)) * 0.3)


def test_blocks_side_by_side():
    view = Blocks(norm=add(NORM))
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    out, rest = ParallelLayer.__call__(view, x, residual, None, None)
    near(out + rest, (x + residual) + 5 * NORM(x + residual))


@pytest.mark.parametrize("residual", [torch.randn(3, 8), None])
@pytest.mark.parametrize("mixes", [True, False])
def test_a_layer_of_one_block(mixes, residual):
    view = Blocks(norm=add(NORM), block=Blocks.attn if mixes else Blocks.mlp, mixes=mixes)
    x = torch.randn(3, 8)
    out, rest = BlockLayer.__call__(view, x, residual, None, None)
    h = x if residual is None else x + residual
    near(rest, h)
    near(out, (2 if mixes else 3) * NORM(h))


def test_attention_and_a_recurrence_side_by_side():
    view = Blocks(recurrence=lambda x, batch, states: states * x.sin(), attn_factors=(2.0, 0.5))
    view.recurrence_factors = 3.0, 0.25
    x = torch.randn(3, 8)
    got = HybridBlock.__call__(view, x, None, HybridCache("kv", 7.0))
    near(got, 2 * (2 * x) * 0.5 + 7 * (3 * x).sin() * 0.25)


def test_a_gate_without_a_norm():
    x, gate = torch.randn(2, 4, 40)
    near(bound(SiluGate(), {})(x, gate), x * F.silu(gate))


def test_kernels_of_known_layers_do_not_take_them():
    """Every form counts as an extension for kernels of the ops above, and of the ops that hold one."""
    block, mlp = GQABlock.samples()[0].op, GatedMLP.samples()[0].op
    add_norm = AddRMSNorm(RMSNorm(placeholder(64), 1e-6))
    layer = DecoderLayer(add_norm, block, add_norm, mlp)
    assert not layer.extensions()
    shifted = AddRMSNorm(RMSNorm(placeholder(64), 1e-6, 1.0))
    assert DecoderLayer(shifted, block, add_norm, mlp).extensions() == {"rms_norm.offset"}
    gelu = GatedMLP(mlp.gate_up, mlp.down, ActivationMul("gelu"))
    assert DecoderLayer(add_norm, block, add_norm, gelu).extensions() == {"activation_mul"}
    other = ResidualLayer(None, block, add_norm.norm, None, mlp, add_norm.norm)
    assert other.extensions_below() == {"residual_layer"}
