"""Mixtures of experts that several families share.

Names of weights are those of Hugging Face checkpoints, in which these families agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferplane import ops
from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.build import ACTIVATION_NAMES, Build
from inferplane.models.parts.layers import dense_mlp, list_layers, plain_mlp
from inferplane.models.reading.config import Config
from inferplane.types import Weight

GATED = "gate_proj", "up_proj", "down_proj"
"""Names of an expert's projections in most checkpoints."""
STACKED = "gate_up_proj", "down_proj"
"""Names of an expert's projections where a layer's experts are stored as one tensor (`stacked_experts`)."""


@dataclass(frozen=True)
class SharedExperts:
    """The MLP that every token takes beside its chosen experts.

    Args:
        size: its inner size, of all shared experts together; 0: there is none.
        name: its name in the checkpoint, below the layer's MLP.
        gate: name of the linear layer that weighs its result; None: it counts in full.
        bias: whether it has biases.
    """

    size: int = 0
    name: str = "shared_experts"
    gate: str | None = None
    bias: bool = False


def mixture_of_experts(
    build: Build,
    name: str,
    route: ops.MoERoute,
    *,
    count: str,
    inner: str = "moe_intermediate_size",
    shared: SharedExperts = SharedExperts(),
    parts: tuple[str, ...] = GATED,
    router: str = "gate",
    act: str = "",
    identities: int = 0,
) -> ops.MoE:
    """Build a mixture-of-experts layer.

    Args:
        build: its config gives the sizes.
        name: prefix of the layer's MLP in the checkpoint.
        route: chooses the experts of a token.
        count: name of the config entry with the number of experts.
        inner: name of the config entry with the size of one expert.
        shared: the MLP that every token takes; the layer sums its result over the ranks together with the others'.
        parts: names of gate, up and down projections in the checkpoint; of two where gate and up are stored as one.
        router: name of the router in the checkpoint, below `name`.
        act: activation of experts and shared MLP without gates, whose `parts` are two; empty: they have gates.
        identities: number of experts behind the others that return what they read.

    Raises:
        CheckpointError: the config lacks an entry.
        UnsupportedModelError: the config names another activation than SiLU or `act`, or several ranks would divide
            gate and up that are stored as one.
    """
    build.config.refuse(hidden_act=ACTIVATION_NAMES[act or "silu"])
    width, experts, size = (build.config.size(entry) for entry in ("hidden_size", count, inner))
    mine = build.placement.experts(count, experts)
    divided = len(mine) == experts  # either a slice of every expert is here, or some experts in full
    rows = build.local_size(inner, size) if divided else size
    mlp = _make_shared_mlp(build, f"{name}.{shared.name}", shared, inner, act)
    *ups, down = parts
    if len(ups) == 1 and not act and divided and build.placement.tp_size > 1:
        raise UnsupportedModelError(
            f"{build.config.name}: a slice of each expert on several ranks, where gate and up are stored as one.",
            there_is="one rank, or expert parallelism",
        )
    if not divided:
        build.ignore(f"{name}.experts.*")  # experts of the other ranks
    build.ignore(*(f"{name}.experts.{experts + e}.*" for e in range(identities)))  # transformers has rows for them
    gate_up = [f"{name}.experts.{e}.{part}" for e in mine for part in ups]
    downs = [f"{name}.experts.{e}.{down}" for e in mine]
    return ops.MoE(
        router=build.router(f"{name}.{router}", experts + identities, width),
        route=route,
        experts=ops.MoEExperts(
            build.weight(gate_up, (len(mine), rows if act else 2 * rows, width), 0 if divided else None),
            build.weight(downs, (len(mine), width, rows), 1 if divided else None),
            partial=not divided or identities > 0,
            act=act,
        ),
        shared=None if mlp is None else replace(mlp, reduce=None),
        reduce=build.reduce(),
        here=None if divided else (mine[0], len(mine)),
        shared_gate=build.router(f"{name}.{shared.gate}", 1, width) if mlp and shared.gate else None,
        first_identity=experts if identities else None,
    )


def _make_shared_mlp(
    build: Build, name: str, shared: SharedExperts, entry: str, act: str
) -> ops.GatedMLP | ops.MLP | None:
    if not shared.size:
        return None
    if act:
        return plain_mlp(build, act, bias=shared.bias, inner=shared.size)(0, name)
    return build.mlp(name, shared.size, build.config.size("hidden_size"), entry, bias=shared.bias)


def limit_gates(
    block: ops.GatedMLP | ops.MoE, limit: float, of_experts: float = 0.0, *, limits_input: bool = False
) -> Any:
    """A layer's MLP with limits behind the activations of its gates (`ops.ActivationMul`); 0: there is none.

    Args:
        block: the MLP, or experts with a shared one or none.
        limit: of the MLP, or of the shared one.
        of_experts: of the others.
        limits_input: gates are limited before their activations instead.
    """
    if isinstance(block, ops.MoE):
        shared: Any = None if block.shared is None else limit_gates(block.shared, limit, limits_input=limits_input)  # type: ignore[arg-type]
        experts: Any = block.experts
        experts = replace(experts, limit=of_experts or None, limits_input=limits_input and of_experts > 0)
        return replace(block, shared=shared, experts=experts)
    if not limit:
        return block
    act, plain = ops.ActivationMul("silu", limit=limit, limits_input=limits_input), block.act
    return replace(block, act=replace(plain, act=act) if isinstance(plain, ops.RotatedActivation) else act)


def experts_per_token(
    config: Config, entry: str, groups: int = 1, top_groups: int = 1, *, entry_of_chosen: str = "num_experts_per_tok"
) -> int:
    """Read the number of experts per token, and check that a router can choose them.

    Args:
        config: the model's.
        entry: name of the config entry with the number of experts.
        groups: number of expert groups. top_groups: number of groups that a token may choose from.
        entry_of_chosen: name of the config entry with the number of experts per token.

    Raises:
        CheckpointError: the numbers contradict each other.
    """
    total, chosen = config.size(entry), config.size(entry_of_chosen)
    each = total // groups
    what = ""
    if total % groups:
        what = f"{total} experts cannot form {groups} equal groups"
    elif top_groups > groups:
        what = f"topk_group = {top_groups} exceeds n_group = {groups}"
    elif chosen > total:
        what = f"{entry_of_chosen} = {chosen} exceeds {entry} = {total}"
    elif chosen > top_groups * each:
        what = f"{entry_of_chosen} = {chosen} exceeds the {top_groups * each} experts in topk_group = {top_groups} "
        what += "groups"
    if what:
        raise CheckpointError(f"{config.name}: {what}.", remedy="correct the entries, or fetch the file again")
    return chosen


def name_parts(build: Build) -> tuple[str, ...]:
    """Names of an expert's projections in families whose checkpoints have stacks of experts, but for quantized ones."""
    quantized = build.config.get("quantization_config") is not None
    return GATED if quantized else STACKED


def softmax_experts(
    build: Build, shared: SharedExperts = SharedExperts(), *, renormalize: bool | None = None, stacked: bool = False
) -> Callable[[int, str], ops.GatedMLP | ops.MoE]:
    """Return a function that builds a layer's MLP in Qwen's form, from the layer's number and the MLP's name.

    The router takes a softmax over all experts. `mlp_only_layers`, and `decoder_sparse_step` if it is above 1, name
    layers without experts.

    Args:
        build: its config gives the sizes.
        shared: the MLP that every token takes in layers with experts.
        renormalize: whether the chosen experts' weights are divided by their sum; None: as `norm_topk_prob` says.
        stacked: whether checkpoints store a layer's experts as one tensor.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.

    Source: arXiv 2407.10671.
    """
    config, count = build.config, "num_experts"
    chosen, step = experts_per_token(config, count), config.size("decoder_sparse_step", 1)
    plain = list_layers(config, "mlp_only_layers", ())
    renormalize = config.flag("norm_topk_prob") if renormalize is None else renormalize
    route = ops.MoERoute(None, chosen, "softmax", renormalize=renormalize)
    parts = name_parts(build) if stacked else GATED

    def feed_forward(i: int, name: str) -> ops.GatedMLP | ops.MoE:
        if i in plain or (i + 1) % step:
            return dense_mlp(build)(i, name)
        return mixture_of_experts(build, name, route, count=count, shared=shared, parts=parts)

    return feed_forward


def fine_grained_experts(
    build: Build,
    is_sparse: Callable[[int], bool] | None = None,
    *,
    shared: SharedExperts | None = None,
    act: str = "",
) -> Callable[[int, str], ops.GatedMLP | ops.MoE]:
    """Return a function that builds a layer's MLP in DeepSeek-V3's form, from the layer's number and the MLP's name.

    The router takes sigmoids, chooses with a correction bias among the best groups, and shared experts are added.

    Args:
        build: its config gives the sizes.
        is_sparse: whether a layer has experts; None: from layer `first_k_dense_replace` on.
        shared: the MLP that every token takes; None: `n_shared_experts` of the experts' size.
        act: activation of experts and shared MLP without gates; empty: they have gates.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.

    Source: arXiv 2412.19437, section 2.1.2.
    """
    config = build.config
    count, first = "n_routed_experts", config.count("first_k_dense_replace")
    total, route = config.size(count), _sigmoid_routing(config)
    beside = shared or SharedExperts(config.count("n_shared_experts") * config.size("moe_intermediate_size"))

    def feed_forward(i: int, name: str) -> ops.GatedMLP | ops.MoE:
        if i < first if is_sparse is None else not is_sparse(i):
            return dense_mlp(build)(i, name)
        bias = Weight((f"{name}.gate.e_score_correction_bias",), (total,), torch.float32)
        by_bias, parts = replace(route, bias=bias), GATED[1:] if act else GATED
        return mixture_of_experts(build, name, by_bias, count=count, shared=beside, parts=parts, act=act)

    return feed_forward


def _sigmoid_routing(config: Config) -> ops.MoERoute:
    """Build the routing that all layers share; each layer adds its own correction bias."""
    groups, top_groups = config.size("n_group", 1), config.size("topk_group", 1)
    total, chosen = config.size("n_routed_experts"), experts_per_token(config, "n_routed_experts", groups, top_groups)
    if groups > 1 and total // groups < 2:
        raise CheckpointError(
            f"{config.name}: n_group = {groups} leaves {total // groups} expert per group, and a group is scored by "
            "its best two.",
            remedy="correct the entries, or fetch the file again",
        )
    renormalize, factor = config.flag("norm_topk_prob"), config.factor("routed_scaling_factor")
    return ops.MoERoute(None, chosen, "sigmoid", groups, top_groups, "top2", renormalize, factor)
