"""Mixers that parts build from a checkpoint of transformers, against its modules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from inferplane.binding.link import link
from inferplane.binding.load import load
from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane.models.build import Build
from inferplane.models.parts import gated_delta_net, kimi_delta_attention, mamba2, short_convolution
from inferplane.models.reading.checkpoint import SafetensorsFolder
from inferplane.models.reading.config import Config
from inferplane.models.reading.names import canonical_names
from inferplane.ops import Draw
from inferplane.ops.recurrent.ragged import draw_batch
from inferplane.types import HOST, Placement
from tests.unit.support.ranks import run_ranks
from tests.unit.support.small import BF16, F32, WHOLE_MODEL, plan

SIZES = {"vocab_size": 64, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DELTA = {
    **SIZES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "intermediate_size": 32,
}
MAMBA = {"heads": (2, 6), "dims": (16, 24), "kernel": 4, "eps": 1e-5, "dt_limits": (0.0, float("inf"))}


def qwen3_next(folder):
    config = Qwen3NextConfig(**DELTA, num_experts=2, num_experts_per_tok=1, mlp_only_layers=[0])
    model = save(Qwen3NextForCausalLM(config), folder)
    return model.model.layers[0].linear_attn, "linear_attn", partial(gated_delta_net, grouped=True)


def qwen3_5(folder):
    model = save(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DELTA)), folder)
    return model.model.layers[0].linear_attn, "linear_attn", partial(gated_delta_net, grouped=False)


def lfm2(folder, *, conv_bias=False):
    config = Lfm2Config(**SIZES, num_hidden_layers=1, layer_types=["conv"], conv_bias=conv_bias, intermediate_size=32)
    return save(Lfm2ForCausalLM(config), folder).model.layers[0].conv, "conv", short_convolution


def nemotron_h(folder, groups=2):
    config = NemotronHConfig(
        **SIZES,
        layers_block_type=["linear_attention"],
        n_groups=groups,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=24,
        time_step_min=0.2,  # the least time step, which some tokens fall below
        intermediate_size=32,
    )
    module = save(NemotronHForCausalLM(config), folder).model.layers[0].mixer
    sizes = {**MAMBA, "heads": (groups, 6), "dt_limits": (0.2, float("inf"))}
    return module, "mixer", partial(mamba2, **sizes, conv_bias=True, bias=False)


def falcon_h1(folder):
    """Its form in which the gate comes before the norm, and no multiplier differs from 1."""
    config = FalconH1Config(
        **SIZES,
        num_hidden_layers=1,
        mamba_d_ssm=96,
        mamba_n_groups=2,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        projectors_bias=True,
        rms_norm_eps=1e-5,
        intermediate_size=32,
    )
    module = save(FalconH1ForCausalLM(config), folder).model.layers[0].mamba
    return module, "mamba", partial(mamba2, **MAMBA, conv_bias=True, bias=True)


def kimi_linear(folder):
    config = KimiLinearConfig(
        **{**SIZES, "num_key_value_heads": 4, "linear_num_heads": 6, "linear_head_dim": 16, "intermediate_size": 32},
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
        pad_token_id=None,
    )
    module = save(KimiLinearForCausalLM(config), folder).model.layers[0].self_attn
    return module, "self_attn", kimi_delta_attention


def save(model, folder):
    """The model with random weights, whose rates of decay keep a state for some tokens."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        if name.endswith("norm.weight"):
            parameter.data += 1
    model.eval().save_pretrained(folder)
    return model


MIXERS = [qwen3_next, qwen3_5, lfm2, partial(lfm2, conv_bias=True), nemotron_h, falcon_h1, kimi_linear]


@pytest.mark.parametrize("make", MIXERS, ids=lambda make: getattr(make, "__name__", "lfm2_bias"))
def test_mixers_of_a_checkpoint(make, tmp_path):
    """A prompt as a whole, cut in the middle of a chunk, and in single tokens."""
    module, part, builder = make(tmp_path)
    op, mixer = load_mixer(tmp_path, part, builder)
    want = expect(module)
    for cuts in ([80], [33, 47], [1] * 80):
        assert (run_cuts(op, mixer, cuts) - want).abs().max() <= 1e-5 * want.abs().max()


DIVIDED = [
    *((make, 2) for make in MIXERS),
    (qwen3_5, 6),  # three ranks share a key head
    (partial(nemotron_h, groups=1), 3),  # and the mean of the norm
]


@pytest.mark.parametrize(("make", "ranks"), DIVIDED)
def test_mixers_are_divided_over_ranks(make, ranks, tmp_path, monkeypatch):
    module, part, builder = make(tmp_path)
    want = expect(module)

    def run(rank):
        op, mixer = load_mixer(tmp_path, part, builder, Placement(rank, ranks))
        assert op.conv.weight.shape[0] < load_mixer(tmp_path, part, builder)[0].conv.weight.shape[0]
        return run_cuts(op, mixer, [33, 1, 46])

    for got in run_ranks(run, ranks, monkeypatch):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def load_mixer(folder, part, builder, placement=WHOLE_MODEL):
    """The mixer of a checkpoint's first layer: the op, and bound as a function."""
    build = Build(Config.read(folder), placement)
    prefix = next(name for name, _ in module_names(folder, build) if f".{part}." in name).split(f".{part}.")[0]
    op = builder(build)(0, f"{prefix}.{part}").mixer
    source = SafetensorsFolder(folder, partial(canonical_names, config=build.config))
    p = plan(op, dtype=F32)
    return op, link(p, load(p, source, HOST).packed)["mixed"]


def draw_inputs():
    return torch.randn(80, SIZES["hidden_size"], generator=torch.Generator().manual_seed(6))


def expect(module):
    """What transformers' module returns."""
    with torch.no_grad():
        return module(draw_inputs()[None])[0]


def run_cuts(op, mixer, cuts):
    """The results of steps of so many tokens, which begin with states of NaN."""
    x, results, before = draw_inputs(), [], 0
    states = [torch.full((1, *state.shape), torch.nan) for state in op.list_states()]
    for n in cuts:
        y, *states = mixer(x[before : before + n], draw_batch(Draw(0, F32), [(n, before)]), *states)
        results.append(y)
        before += n
    return torch.cat(results)


def module_names(folder, build):
    source = SafetensorsFolder(folder, partial(canonical_names, config=build.config))
    return [(name, source.shape(name)) for name in source.names()]


def test_weights_of_convolutions_have_no_empty_dimension(tmp_path):
    qwen3_next(tmp_path)
    shapes = dict(module_names(tmp_path, Build(Config.read(tmp_path))))
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (2 * 2 * 16 + 6 * 24, 4)


def test_numbers_of_heads_stay_float32(tmp_path):
    """Rates of decay are exponentials of them: their rounding to the plan's dtype would be seen."""
    qwen3_5(tmp_path)
    op = gated_delta_net(Build(Config.read(tmp_path)), grouped=False)(0, "model.layers.0.linear_attn").mixer
    p = plan(op, dtype=BF16)
    source = SafetensorsFolder(tmp_path, partial(canonical_names, config=Config.read(tmp_path)))
    assert {weight.dtype for _, weight in op.gates.weights()} == {F32} and load(p, source, HOST).packed


def test_what_is_not_implemented_is_refused():
    build = Build(Config({**DELTA, "linear_conv_kernel_dim": 4, "conv_L_cache": 3, "hidden_act": "silu"}))
    assert gated_delta_net(build, grouped=True)(0, "x").mixer.heads == (2, 6)
    three, four = (replace(build, placement=Placement(tp_rank=0, tp_size=n)) for n in (3, 4))
    for make, entry in ((partial(gated_delta_net, grouped=True), "key_heads"), (nemotron_parts, "groups")):
        with pytest.raises(UsageError, match=f"{entry} = 2 cannot be shared equally by 3 ranks"):
            make(three)
    with pytest.raises(UsageError, match="hidden_size = 48 cannot be shared equally by 5 ranks"):
        short_convolution(replace(build, placement=Placement(tp_rank=0, tp_size=5)))
    with pytest.raises(UnsupportedModelError, match="norms over 2 groups of heads on 4 ranks"):
        mamba2(four, **{**MAMBA, "heads": (2, 8)}, conv_bias=True, bias=False)
    with pytest.raises(CheckpointError, match="cannot be shared equally"):
        gated_delta_net(Build(Config({**build.config, "linear_num_value_heads": 5})), grouped=True)
    with pytest.raises(CheckpointError, match="cannot be shared equally"):
        mamba2(build, **{**MAMBA, "heads": (4, 6)}, conv_bias=True, bias=False)


nemotron_parts = partial(mamba2, **MAMBA, conv_bias=True, bias=False)
