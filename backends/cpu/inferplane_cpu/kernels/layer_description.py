"""Decoder layers as the native library reads them: described once, and kept on the views that hold their tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from inferplane.plugin import Batch, LayerKV
from inferplane_cpu.kernels.attention import cache, kv_b_of, steps
from inferplane_cpu.kernels.moe import describe_routing
from inferplane_cpu.kernels.packing import Adapt, adapted_matrices
from inferplane_cpu.native import Cache, Experts, Latent, Layer, Model, Step


def _matrix(child: Any, adapt: Adapt) -> Any:
    """A linear layer's matrix; the view holds what the copy of it points to."""
    child.described = adapted_matrices(adapt, child.weight, child.bias)
    return child.described[0]


def _describe(view: Any, rounded: bool) -> Layer:
    """The layer as the library reads it, described once and kept on its view; the view keeps the tensors."""
    attn, layer, adapt = view.attn, Layer(rounded=rounded), view.prepared
    layer.attn_norm, layer.attn_eps = view.attn_norm.norm.weight.data_ptr(), view.attn_norm.norm.eps
    layer.mlp_norm, layer.mlp_eps = view.mlp_norm.norm.weight.data_ptr(), view.mlp_norm.norm.eps
    layer.o = _matrix(attn.o, adapt)
    enter = attn.enter
    layer.rope, layer.interleaved = enter.rope.table.data_ptr(), enter.rope.interleaved
    if hasattr(attn, "qkv"):
        layer.qkv = _matrix(attn.qkv, adapt)
        if enter.q_norm is not None:
            layer.q_norm, layer.q_eps = enter.q_norm.weight.data_ptr(), enter.q_norm.eps
            layer.k_norm, layer.k_eps = enter.k_norm.weight.data_ptr(), enter.k_norm.eps
        layer.heads, layer.kv_heads = attn.heads
        layer.head_dim, layer.window, layer.scale = attn.head_dim, attn.few.kv.window or 0, attn.few.scale
    else:
        view.latent = _describe_latent(attn, adapt)
        layer.latent = ctypes.addressof(view.latent)
        layer.heads, layer.kv_heads, layer.scale = attn.dims.heads, 1, attn.absorbed.scale
    mlp = view.mlp
    if hasattr(mlp, "experts"):
        view.routed = _describe_experts(mlp, adapt)
        layer.routed = ctypes.addressof(view.routed)
        mlp = mlp.shared
    if mlp is not None:
        layer.gate_up, layer.down = _matrix(mlp.gate_up, adapt), _matrix(mlp.down, adapt)
    return layer


def _describe_latent(attn: Any, adapt: Adapt) -> Latent:
    d, enter = attn.dims, attn.enter
    made = Latent(nope=d.nope, rope=d.rope, value=d.value, latent=d.latent)
    made.q_b, made.kv_a = _matrix(attn.q_b, adapt), _matrix(attn.kv_a, adapt)
    made.kv_b = kv_b_of(attn.absorbed, attn.absorbed.kv_b)
    made.kv_a_norm, made.kv_a_eps = enter.kv_a_norm.weight.data_ptr(), enter.kv_a_norm.eps
    if attn.q_a is not None:
        made.q_a = _matrix(attn.q_a, adapt)
        made.q_a_norm, made.q_a_eps = enter.q_a_norm.weight.data_ptr(), enter.q_a_norm.eps
    return made


def _describe_experts(mlp: Any, adapt: Adapt) -> Experts:
    route, experts = mlp.route, mlp.experts
    experts.described = gate_up, down = adapted_matrices(adapt, experts.gate_up), adapted_matrices(adapt, experts.down)
    made = describe_routing(route, len(gate_up))
    made.router = _matrix(mlp.router, None)  # in one order whatever comes with it (`prepare_any_order`)
    made.gate_up, made.down = ctypes.addressof(gate_up), ctypes.addressof(down)
    return made


def _step(batch: Batch) -> Step:
    """A step as the library reads it, described once and kept on the batch, whose tensors it points to."""
    step = Step()
    step.batch = steps(batch)
    step.positions, step.slots, step.tokens = batch.positions.data_ptr(), batch.slots.data_ptr(), batch.tokens
    return step


def native_layer(view: Any, rounded: bool) -> Layer:
    found: Layer | None = view.__dict__.get("layer")
    if found is None:
        found = view.layer = _describe(view, rounded)
    return found


def native_step(batch: Batch) -> Step:
    found: Step | None = batch.__dict__.get("native")
    if found is None:
        found = batch.__dict__["native"] = _step(batch)
    return found


class Described:
    """All layers of a model and their caches as the library reads them; `model`, once asked for, is all of it."""

    model: Model | None = None

    def __init__(self, views: tuple[Any, ...], caches: tuple[LayerKV, ...]) -> None:
        self.of = caches
        self.layers = (ctypes.c_void_p * len(views))(*(ctypes.addressof(native_layer(view, False)) for view in views))
        self.caches = (Cache * len(views))(*(cache(kv) for kv in caches[: len(views)]))


def chained(views: tuple[Any, ...], caches: tuple[LayerKV, ...]) -> Described:
    """Some layers and their caches, described at their first call."""
    found: Described | None = views[0].__dict__.get("chained")
    if found is None or found.of is not caches:
        found = views[0].chained = Described(views, caches)
    return found
