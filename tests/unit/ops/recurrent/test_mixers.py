"""Mixers against transformers' modules with the same weights, over steps that cut a sequence anywhere."""

from __future__ import annotations

import pytest
import torch
from transformers import KimiLinearConfig, Lfm2Config, Mamba2Config, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as OtherMamba2
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from inferplane.ops import (
    CausalConv1d,
    DeltaRuleGates,
    Draw,
    GatedDeltaNet,
    GatedDeltaRule,
    GatedRMSNorm,
    KimiDeltaAttention,
    Linear,
    Mamba2Mixer,
    SelectiveScan,
    ShortConv,
)
from inferplane.ops.recurrent.ragged import draw_batch
from tests.unit.ops.recurrent.test_recurrent import CUTS, close, numbers
from tests.unit.support.small import F32

WIDTH, TOKENS = 40, 130


def randomize(module):
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=i, scale=0.3) + (1.0 if parameter.ndim == 1 else 0.0))
    return module.eval()


def linear(module):
    return Linear(module.weight.data, None if module.bias is None else module.bias.data)


def convolution(module, *, silu=True):
    return CausalConv1d(module.weight.data[:, 0], None if module.bias is None else module.bias.data, silu)


def matches(op, module, cuts, *shapes):
    x = numbers(TOKENS, WIDTH, seed=50)
    with torch.no_grad():
        want = module(x[None])[0]
    states, results, before = [torch.full((1, *shape), torch.nan) for shape in shapes], [], 0
    for n in cuts:
        y, *states = op(x[before : before + n], draw_batch(Draw(0, F32), [(n, before)]), *states)
        results.append(y)
        before += n
    assert close(torch.cat(results), want)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("grouped", [True, False])
def test_gated_delta_net(cuts, grouped):
    groups, heads, k_dim, v_dim = 2, 6, 16, 24
    sizes = {"linear_num_key_heads": groups, "linear_num_value_heads": heads}
    sizes |= {"linear_key_head_dim": k_dim, "linear_value_head_dim": v_dim, "layer_types": ["linear_attention"]}
    module = randomize(Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=WIDTH, num_hidden_layers=1, **sizes), 0))
    qkvz, ba, each = module.in_proj_qkvz.weight.data, module.in_proj_ba.weight.data, heads // groups
    if not grouped:  # rows of all heads' q first, then k, v and z
        parts = qkvz.unflatten(0, (groups, -1)).split((k_dim, k_dim, each * v_dim, each * v_dim), 1)
        qkvz = torch.cat([part.flatten(0, 1) for part in parts])
        ba = torch.cat([part.flatten(0, 1) for part in ba.unflatten(0, (groups, -1)).split((each, each), 1)])
    op = GatedDeltaNet(
        Linear(qkvz),
        Linear(ba),
        convolution(module.conv1d),
        DeltaRuleGates(module.A_log.data, module.dt_bias.data),
        GatedDeltaRule((groups, heads), (k_dim, v_dim)),
        GatedRMSNorm(module.norm.weight.data, module.norm.variance_epsilon),
        linear(module.out_proj),
        (groups, heads),
        (k_dim, v_dim),
        grouped,
    )
    matches(op, module, cuts, (2 * groups * k_dim + heads * v_dim, 3), (heads, k_dim, v_dim))


@pytest.mark.parametrize("cuts", CUTS)
def test_kimi_delta_attention(cuts):
    heads, dim = 3, 20
    sizes = {"hidden_size": WIDTH, "linear_num_heads": heads, "linear_head_dim": dim, "num_hidden_layers": 1}
    module = randomize(KimiLinearDeltaAttention(KimiLinearConfig(**sizes, layer_types=["linear_attention"]), 0))
    forget = module.forget_gate

    def join(*parts):
        return Linear(torch.cat([part.weight.data for part in parts]))

    op = KimiDeltaAttention(
        qkv=join(module.q_proj, module.k_proj, module.v_proj),
        fg_a=join(forget.f_a_proj, module.g_a_proj),
        b=linear(module.b_proj),
        f_b=linear(forget.f_b_proj),
        g_b=linear(module.g_b_proj),
        conv=convolution(module.conv1d),
        gates=DeltaRuleGates(forget.A_log.data.flatten(), forget.dt_bias.data, by_channel=True),
        rule=GatedDeltaRule((heads, heads), (dim, dim), by_channel=True),
        norm=GatedRMSNorm(module.o_norm.weight.data, module.o_norm.variance_epsilon, act="sigmoid"),
        o=linear(module.o_proj),
        heads=heads,
        dim=dim,
    )
    matches(op, module, cuts, (3 * heads * dim, 3), (heads, dim, dim))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("groups", "bias"), [(1, False), (2, True)])
def test_mamba2(cuts, groups, bias):
    heads, dim, size = 4, 20, 16
    config = Mamba2Config(
        hidden_size=WIDTH,
        num_heads=heads,
        head_dim=dim,
        state_size=size,
        n_groups=groups,
        num_hidden_layers=1,
        use_bias=bias,
        use_conv_bias=bias,
    )
    module = randomize(OtherMamba2(config, 0))
    op = Mamba2Mixer(
        linear(module.in_proj),
        convolution(module.conv1d),
        SelectiveScan(module.A_log.data, module.dt_bias.data, module.D.data, groups, dim, size),
        GatedRMSNorm(module.norm.weight.data, module.norm.variance_epsilon, groups, gate_first=True),
        linear(module.out_proj),
        (groups, heads),
        (dim, size),
    )
    matches(op, module, cuts, (heads * dim + 2 * groups * size, 3), (heads, dim, size))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(cuts, bias):
    module = Lfm2ShortConv(Lfm2Config(hidden_size=WIDTH, num_hidden_layers=1, layer_types=["conv"], conv_bias=bias), 0)
    randomize(module)
    op = ShortConv(linear(module.in_proj), convolution(module.conv, silu=False), linear(module.out_proj))
    matches(op, module, cuts, (WIDTH, 2))
