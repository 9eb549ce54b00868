"""Mixers of recurrent layers that several families share.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from inferplane import ops
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.build import Build
from inferplane.models.reading.config import Config
from inferplane.types import WHOLE, Shard, Weight


def gated_delta_net(build: Build, *, grouped: bool) -> Callable[[int, str], ops.RecurrentBlock]:
    """Return a function that builds a layer's gated delta net, with its states, from the layer's number and the mixer's
    name.

    Args:
        build: its config gives heads and sizes.
        grouped: whether the checkpoint has `in_proj_qkvz` and `in_proj_ba`, whose rows are ordered by key heads, not a
            projection for each of qkv, z, b and a.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: the activation is another one.
        UsageError: the ranks cannot share the heads.
    """
    config = build.config
    config.refuse(hidden_act=("silu",))
    groups, heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    k_dim, v_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    _check_groups(build, ("linear_num_value_heads", heads), ("linear_num_key_heads", groups))
    width, size = config.size("hidden_size"), config.size("linear_conv_kernel_dim")
    place, count = build.placement, build.local_size("linear_num_value_heads", heads)
    if grouped:  # the rows of a key head, its values' among them, are stored together
        mine, key_shard = build.local_size("linear_num_key_heads", groups), build.shard(0)
    else:
        mine, key_shard = place.heads("linear_num_key_heads", groups)
    keys = groups * k_dim, key_shard
    stored = _divide(build, keys, keys, (heads * v_dim, build.shard(0)))
    values = count * v_dim

    def block(i: int, name: str) -> ops.RecurrentBlock:
        if grouped:
            rows = sum(stored.rows) + values
            qkvz = build.linear(f"{name}.in_proj_qkvz", rows=rows, columns=width, axis=0)
            ba = build.linear(f"{name}.in_proj_ba", rows=2 * count, columns=width, axis=0)
        else:
            parts = *stored.list_names(f"{name}.in_proj_qkv"), f"{name}.in_proj_z"
            shards = None if stored.shards is None else (*stored.shards, build.shard(0))
            qkvz = build.linear(*parts, rows=(*stored.rows, values), columns=width, shards=shards)
            ba = build.linear(f"{name}.in_proj_b", f"{name}.in_proj_a", rows=2 * count, columns=width, axis=0)
        norm = build.rms_norm(f"{name}.norm", v_dim)
        mixer = ops.GatedDeltaNet(
            qkvz=qkvz,
            ba=ba,
            conv=_convolution(f"{name}.conv1d", stored, size),
            gates=ops.DeltaRuleGates(
                _by_head(build, f"{name}.A_log", count), _by_head(build, f"{name}.dt_bias", count)
            ),
            rule=ops.GatedDeltaRule((mine, count), (k_dim, v_dim)),
            norm=ops.GatedRMSNorm(norm.weight, norm.eps),
            o=build.linear(f"{name}.out_proj", rows=width, columns=values, axis=1),
            heads=(mine, count),
            dims=(k_dim, v_dim),
            grouped=grouped,
            reduce=build.reduce(),
        )
        return ops.RecurrentBlock.around(mixer)

    return block


def kimi_delta_attention(build: Build) -> Callable[[int, str], ops.RecurrentBlock]:
    """Return a function that builds a layer's Kimi Delta Attention, with its states, from the layer's number and the
    mixer's name.

    Args:
        build: its config gives heads and sizes: `linear_num_heads`, `linear_head_dim`, which is also the rank of the
            gates, and `linear_conv_kernel_dim`.

    Raises:
        CheckpointError: the config lacks an entry.
        UnsupportedModelError: the activation is another one.
        UsageError: the ranks cannot share the heads.
    """
    config = build.config
    config.refuse(hidden_act=("silu",))
    width, size = config.size("hidden_size"), config.size("linear_conv_kernel_dim")
    dim = rank = config.size("linear_head_dim")
    heads = build.local_size("linear_num_heads", config.size("linear_num_heads"))
    inner, by_head = heads * dim, build.shard(0)

    def block(i: int, name: str) -> ops.RecurrentBlock:
        def up(part: str, rows: int, columns: int) -> ops.Linear:
            return build.linear(f"{name}.{part}", rows=rows, columns=columns, axis=0)

        convolved = tuple(f"{name}.{part}_conv1d.weight" for part in "qkv")
        dt_bias = Weight((f"{name}.dt_bias",), (inner,), torch.float32, shard=by_head)
        norm = build.rms_norm(f"{name}.o_norm", dim)
        mixer = ops.KimiDeltaAttention(
            qkv=build.linear(*(f"{name}.{part}_proj" for part in "qkv"), rows=3 * inner, columns=width, axis=0),
            fg_a=build.linear(f"{name}.f_a_proj", f"{name}.g_a_proj", rows=2 * rank, columns=width),
            b=up("b_proj", heads, width),
            f_b=up("f_b_proj", inner, rank),
            g_b=up("g_b_proj", inner, rank),
            conv=ops.CausalConv1d(Weight(convolved, (3 * inner, size), shard=by_head, rows=(inner,) * 3)),
            gates=ops.DeltaRuleGates(_by_head(build, f"{name}.A_log", heads), dt_bias, by_channel=True),
            rule=ops.GatedDeltaRule((heads, heads), (dim, dim), by_channel=True),
            norm=ops.GatedRMSNorm(norm.weight, norm.eps, act="sigmoid"),
            o=build.linear(f"{name}.o_proj", rows=width, columns=inner, axis=1),
            heads=heads,
            dim=dim,
            reduce=build.reduce(),
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
    norm: bool = True,
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
        norm: whether there is one; else the gate stands alone.

    Raises:
        CheckpointError: the heads cannot share the groups equally.
        UnsupportedModelError: some ranks, but not all, would have to share a group, over which the norm is.
        UsageError: the ranks cannot share the heads.
    """
    (groups, all_heads), (dim, size) = heads, dims
    _check_groups(build, ("heads", all_heads), ("groups", groups))
    place, width = build.placement, build.config.size("hidden_size")
    count, (mine, group_shard) = build.local_size("heads", all_heads), place.heads("groups", groups)
    if norm and 1 < groups < place.tp_size:
        raise UnsupportedModelError(
            f"{build.config.name}: norms over {groups} groups of heads on {place.tp_size} ranks.",
            there_is=f"up to {groups} ranks",
        )
    sums: Any = {"reduce": build.reduce(), "ranks": place.tp_size} if groups < place.tp_size else {}
    inner, by_head, by_group = count * dim, build.shard(0), (groups * size, group_shard)
    in_heads = all_heads * dim, by_head
    stored = _divide(build, in_heads, in_heads, by_group, by_group, (all_heads, by_head))
    convolved = _divide(build, in_heads, by_group, by_group)

    def block(i: int, name: str) -> ops.RecurrentBlock:
        a_log, dt_bias, skip = (_by_head(build, f"{name}.{part}", count) for part in ("A_log", "dt_bias", "D"))
        names, weight = stored.list_names(f"{name}.in_proj"), Weight((f"{name}.norm.weight",), (inner,), shard=by_head)
        mixer = ops.Mamba2Mixer(
            proj=build.linear(*names, rows=stored.rows, columns=width, bias=bias, shards=stored.shards),
            conv=_convolution(f"{name}.conv1d", convolved, kernel, bias=conv_bias),
            scan=ops.SelectiveScan(a_log, dt_bias, skip, mine, dim, size, dt_limits),
            norm=ops.GatedRMSNorm(weight, eps, mine, gate_first=True, **sums) if norm else ops.SiluGate(),
            o=build.linear(f"{name}.out_proj", rows=width, columns=inner, axis=1, bias=bias),
            heads=(mine, count),
            dims=dims,
            reduce=build.reduce(),
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
        "eps": config.number_from_zero("rms_norm_eps"),
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
        UsageError: the ranks cannot share the channels.
    """
    config = build.config
    width, size, bias = config.size("hidden_size"), config.size("conv_L_cache"), config.flag("conv_bias")

    mine, channels = build.local_size("hidden_size", width), (width, build.shard(0))
    stored, convolved = _divide(build, channels, channels, channels), _divide(build, channels)

    def block(i: int, name: str) -> ops.RecurrentBlock:
        names = stored.list_names(f"{name}.in_proj")
        mixer = ops.ShortConv(
            proj=build.linear(*names, rows=stored.rows, columns=width, bias=bias, shards=stored.shards),
            conv=_convolution(f"{name}.conv", convolved, size, bias=bias, silu=False),
            o=build.linear(f"{name}.out_proj", rows=width, columns=mine, axis=1, bias=bias),
            reduce=build.reduce(),
        )
        return ops.RecurrentBlock.around(mixer)

    return block


class _Stored(NamedTuple):
    """Sections of rows that a checkpoint stores in one tensor, one after another, each divided over the ranks by heads:
    this rank's rows of each, and their slices, None on one rank."""

    rows: tuple[int, ...]
    shards: tuple[Shard, ...] | None

    def list_names(self, name: str) -> tuple[str, ...]:
        """The tensor's name for each section."""
        return (name,) * len(self.rows)


def _divide(build: Build, *sections: tuple[int, Shard]) -> _Stored:
    """What this rank reads of a tensor of sections, each with its rows and the slice of its heads."""
    total = sum(rows for rows, _ in sections)
    if build.placement.tp_size == 1:
        return _Stored((total,), None)
    firsts = accumulate((rows for rows, _ in sections), initial=0)
    shards = tuple(replace(shard, section=(first, rows, total)) for (rows, shard), first in zip(sections, firsts))
    return _Stored(tuple(rows // shard.size for rows, shard in sections), shards)


def _convolution(name: str, stored: _Stored, size: int, *, bias: bool = False, silu: bool = True) -> ops.CausalConv1d:
    channels, shards = sum(stored.rows), stored.shards or WHOLE

    def weight(part: str, *shape: int) -> Weight:
        return Weight(stored.list_names(f"{name}.{part}"), shape, shard=shards, rows=stored.rows)

    return ops.CausalConv1d(weight("weight", channels, size), weight("bias", channels) if bias else None, silu)


def _by_head(build: Build, name: str, heads: int) -> Weight:
    """A number for each of this rank's heads; float32, because rates of decay are exponents of it."""
    return Weight((name,), (heads,), torch.float32, shard=build.shard(0))


def _check_groups(build: Build, many: tuple[str, int], few: tuple[str, int]) -> None:
    if many[1] % few[1]:
        raise CheckpointError(
            f"{build.config.name}: {many[0]} = {many[1]} cannot be shared equally by {few[0]} = {few[1]}.",
            remedy="correct the entries, or fetch the file again",
        )
