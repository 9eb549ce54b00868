"""Decoder layers as the native library reads them: described once, and kept on the views that hold their tensors."""

from __future__ import annotations

import ctypes
from typing import Any

from inferplane.plugin import Batch, LayerKV
from inferplane_cpu.kernels.attention import cache, kv_b_of, steps
from inferplane_cpu.kernels.moe import routing
from inferplane_cpu.kernels.packed import How, matrices_as
from inferplane_cpu.native import Cache, Experts, Latent, Layer, Model, Step


def _matrix(child: Any, how: How) -> Any:
    """A linear layer's matrix; the view holds what the copy of it points to."""
    child.described = matrices_as(how, child.weight, child.bias)
    return child.described[0]


def _describe(p: Any, rounded: bool) -> Layer:
    """The layer as the library reads it, described once and kept on its view; the view keeps the tensors."""
    attn, layer, how = p.attn, Layer(rounded=rounded), p.prepared
    layer.attn_norm, layer.attn_eps = p.attn_norm.norm.weight.data_ptr(), p.attn_norm.norm.eps
    layer.mlp_norm, layer.mlp_eps = p.mlp_norm.norm.weight.data_ptr(), p.mlp_norm.norm.eps
    layer.o = _matrix(attn.o, how)
    enter = attn.enter
    layer.rope, layer.interleaved = enter.rope.table.data_ptr(), enter.rope.interleaved
    if hasattr(attn, "qkv"):
        layer.qkv = _matrix(attn.qkv, how)
        if enter.q_norm is not None:
            layer.q_norm, layer.q_eps = enter.q_norm.weight.data_ptr(), enter.q_norm.eps
            layer.k_norm, layer.k_eps = enter.k_norm.weight.data_ptr(), enter.k_norm.eps
        layer.heads, layer.kv_heads = attn.heads
        layer.head_dim, layer.window, layer.scale = attn.head_dim, attn.few.kv.window or 0, attn.few.scale
    else:
        p.latent = _describe_latent(attn, how)
        layer.latent = ctypes.addressof(p.latent)
        layer.heads, layer.kv_heads, layer.scale = attn.dims.heads, 1, attn.absorbed.scale
    mlp = p.mlp
    if hasattr(mlp, "experts"):
        p.routed = _describe_experts(mlp, how)
        layer.routed = ctypes.addressof(p.routed)
        mlp = mlp.shared
    if mlp is not None:
        layer.gate_up, layer.down = _matrix(mlp.gate_up, how), _matrix(mlp.down, how)
    return layer


def _describe_latent(attn: Any, how: How) -> Latent:
    d, enter = attn.dims, attn.enter
    made = Latent(nope=d.nope, rope=d.rope, value=d.value, latent=d.latent)
    made.q_b, made.kv_a = _matrix(attn.q_b, how), _matrix(attn.kv_a, how)
    made.kv_b = kv_b_of(attn.absorbed, attn.absorbed.kv_b)
    made.kv_a_norm, made.kv_a_eps = enter.kv_a_norm.weight.data_ptr(), enter.kv_a_norm.eps
    if attn.q_a is not None:
        made.q_a = _matrix(attn.q_a, how)
        made.q_a_norm, made.q_a_eps = enter.q_a_norm.weight.data_ptr(), enter.q_a_norm.eps
    return made


def _describe_experts(mlp: Any, how: How) -> Experts:
    route, experts = mlp.route, mlp.experts
    experts.described = gate_up, down = matrices_as(how, experts.gate_up), matrices_as(how, experts.down)
    made = routing(route, len(gate_up))
    made.router = _matrix(mlp.router, None)  # in one order whatever comes with it (`as_varied`)
    made.gate_up, made.down = ctypes.addressof(gate_up), ctypes.addressof(down)
    return made


def _step(batch: Batch) -> Step:
    """A step as the library reads it, described once and kept on the batch, whose tensors it points to."""
    step = Step()
    step.batch = steps(batch)
    step.positions, step.slots, step.tokens = batch.positions.data_ptr(), batch.slots.data_ptr(), batch.tokens
    return step


def native_layer(p: Any, rounded: bool) -> Layer:
    found: Layer | None = p.__dict__.get("layer")
    if found is None:
        found = p.layer = _describe(p, rounded)
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
        self.layers = (ctypes.c_void_p * len(views))(*(ctypes.addressof(native_layer(p, False)) for p in views))
        self.caches = (Cache * len(views))(*(cache(kv) for kv in caches[: len(views)]))


def chained(views: tuple[Any, ...], caches: tuple[LayerKV, ...]) -> Described:
    """Some layers and their caches, described at their first call."""
    found: Described | None = views[0].__dict__.get("chained")
    if found is None or found.of is not caches:
        found = views[0].chained = Described(views, caches)
    return found
