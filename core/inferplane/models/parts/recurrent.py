"""Mixers of recurrent layers that several families share.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from inferplane import ops
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.types import Weight


def gated_delta_net(build: Build, *, grouped: bool) -> Callable[[int, str], ops.RecurrentBlock]:
    """Return a function that builds a layer's gated delta net, with its states, from the layer's number and the mixer's
    name.

    Args:
        build: its config gives heads and sizes.
        grouped: whether the checkpoint has `in_proj_qkvz` and `in_proj_ba`, whose rows are ordered by key heads, not a
            projection for each of qkv, z, b and a.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: several ranks would share the layer, or the activation is another one.
    """
    config = build.config
    _require_one_rank(build)
    config.refuse(hidden_act=("silu",))
    groups, heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    k_dim, v_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    _check_groups(build, ("linear_num_value_heads", heads), ("linear_num_key_heads", groups))
    width, size = config.size("hidden_size"), config.size("linear_conv_kernel_dim")
    channels, values = 2 * groups * k_dim + heads * v_dim, heads * v_dim

    def block(i: int, name: str) -> ops.RecurrentBlock:
        if grouped:
            qkvz = build.linear(f"{name}.in_proj_qkvz", rows=channels + values, columns=width)
            ba = build.linear(f"{name}.in_proj_ba", rows=2 * heads, columns=width)
        else:
            parts = f"{name}.in_proj_qkv", f"{name}.in_proj_z"
            qkvz = build.linear(*parts, rows=(channels, values), columns=width)
            ba = build.linear(f"{name}.in_proj_b", f"{name}.in_proj_a", rows=2 * heads, columns=width)
        norm = build.rms_norm(f"{name}.norm", v_dim)
        mixer = ops.GatedDeltaNet(
            qkvz=qkvz,
            ba=ba,
            conv=_convolution(f"{name}.conv1d", channels, size),
            gates=ops.DeltaRuleGates(_by_head(f"{name}.A_log", heads), _by_head(f"{name}.dt_bias", heads)),
            rule=ops.GatedDeltaRule((groups, heads), (k_dim, v_dim)),
            norm=ops.GatedRMSNorm(norm.weight, norm.eps),
            o=build.linear(f"{name}.out_proj", rows=width, columns=values),
            heads=(groups, heads),
            dims=(k_dim, v_dim),
            grouped=grouped,
        )
        return ops.RecurrentBlock.around(mixer)

    return block


def mamba2(
    build: Build,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    kernel: int,
    conv_bias: bool,
    bias: bool,
    eps: float,
    dt_limits: tuple[float, float],
) -> Callable[[int, str], ops.RecurrentBlock]:
    """Return a function that builds a layer's Mamba-2 mixer, with its states, from the layer's number and the mixer's
    name.

    The entries of a config have other names in each family, so each reads its own.

    Args:
        build: its config gives the hidden size.
        heads: groups and heads. dims: entries of a head, and of its state.
        kernel: size of the convolution. conv_bias: whether it has a bias.
        bias: whether the projections have biases.
        eps: of the norm. dt_limits: the least and the largest time step.

    Raises:
        CheckpointError: the heads cannot share the groups equally.
        UnsupportedModelError: several ranks would share the layer.
    """
    _require_one_rank(build)
    (groups, count), (dim, size) = heads, dims
    _check_groups(build, ("heads", count), ("groups", groups))
    width, inner = build.config.size("hidden_size"), count * dim
    channels = inner + 2 * groups * size

    def block(i: int, name: str) -> ops.RecurrentBlock:
        a_log, dt_bias, skip = (_by_head(f"{name}.{part}", count) for part in ("A_log", "dt_bias", "D"))
        mixer = ops.Mamba2Mixer(
            proj=build.linear(f"{name}.in_proj", rows=inner + channels + count, columns=width, bias=bias),
            conv=_convolution(f"{name}.conv1d", channels, kernel, bias=conv_bias),
            scan=ops.SelectiveScan(a_log, dt_bias, skip, groups, dim, size, dt_limits),
            norm=ops.GatedRMSNorm(Weight((f"{name}.norm.weight",), (inner,)), eps, groups, gate_first=True),
            o=build.linear(f"{name}.out_proj", rows=width, columns=inner, bias=bias),
            heads=heads,
            dims=dims,
        )
        return ops.RecurrentBlock.around(mixer)

    return block


def mamba2_of_config(build: Build, inner: int | None = None) -> dict[str, Any]:
    """The arguments of `mamba2` in a config with Bamba's entries, `mamba_n_heads` and so on.

    Args:
        build: its config gives them.
        inner: entries of all heads; None: `mamba_expand` times the hidden size.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
    """
    config = build.config
    heads = config.size("mamba_n_heads")
    inner = int(config.number("mamba_expand") * config.size("hidden_size")) if inner is None else inner
    dim = inner // heads if config.get("mamba_d_head") in (None, "auto") else config.size("mamba_d_head")
    if dim * heads != inner:
        raise CheckpointError(
            f"{config.name}: mamba_n_heads = {heads} of {dim} entries are not the {inner} of the layer.",
            remedy="correct the entries, or fetch the file again",
        )
    return {
        "heads": (config.size("mamba_n_groups"), heads),
        "dims": (dim, config.size("mamba_d_state")),
        "kernel": config.size("mamba_d_conv"),
        "conv_bias": config.flag("mamba_conv_bias"),
        "bias": config.flag("mamba_proj_bias"),
        "eps": config.number("rms_norm_eps"),
        "dt_limits": _step_limits(config),
    }


def _step_limits(config: Config) -> tuple[float, float]:
    """The least and the largest time step."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    steps = [_read_step(limit) for limit in limits] if isinstance(limits, (list, tuple)) else []
    if len(steps) != 2 or None in steps:
        raise CheckpointError(
            f"{config.name}: time_step_limit is {limits!r}, not two numbers from 0.", remedy="fetch the file again"
        )
    return steps[0], steps[1]  # type: ignore[return-value]


def _read_step(limit: Any) -> float | None:
    """A number from 0, which may be infinite as transformers writes it; None for anything else."""
    if limit == {"__float__": "Infinity"}:
        return math.inf
    return float(limit) if isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit >= 0 else None


def short_convolution(build: Build) -> Callable[[int, str], ops.RecurrentBlock]:
    """Return a function that builds a layer's short convolution, with its states, from the layer's number and the
    mixer's name.

    Args:
        build: its config gives the sizes.

    Raises:
        CheckpointError: the config lacks an entry.
        UnsupportedModelError: several ranks would share the layer.
    """
    config = build.config
    _require_one_rank(build)
    width, size, bias = config.size("hidden_size"), config.size("conv_L_cache"), config.flag("conv_bias")

    def block(i: int, name: str) -> ops.RecurrentBlock:
        mixer = ops.ShortConv(
            proj=build.linear(f"{name}.in_proj", rows=3 * width, columns=width, bias=bias),
            conv=_convolution(f"{name}.conv", width, size, bias=bias, silu=False),
            o=build.linear(f"{name}.out_proj", rows=width, columns=width, bias=bias),
        )
        return ops.RecurrentBlock.around(mixer)

    return block


def _convolution(name: str, channels: int, size: int, *, bias: bool = False, silu: bool = True) -> ops.CausalConv1d:
    bias_weight = Weight((f"{name}.bias",), (channels,)) if bias else None
    return ops.CausalConv1d(Weight((f"{name}.weight",), (channels, size)), bias_weight, silu)


def _by_head(name: str, heads: int) -> Weight:
    """A number for each head; float32, because rates of decay are exponents of it."""
    return Weight((name,), (heads,), torch.float32)


def _require_one_rank(build: Build) -> None:
    if build.placement.tp_size > 1:
        raise UnsupportedModelError(
            f"{build.config.name}: recurrent layers on {build.placement.tp_size} ranks.", there_is="one rank"
        )


def _check_groups(build: Build, many: tuple[str, int], few: tuple[str, int]) -> None:
    if many[1] % few[1]:
        raise CheckpointError(
            f"{build.config.name}: {many[0]} = {many[1]} cannot be shared equally by {few[0]} = {few[1]}.",
            remedy="correct the entries, or fetch the file again",
        )
