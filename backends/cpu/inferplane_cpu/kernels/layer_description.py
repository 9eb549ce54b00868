"""Decoder layers and steps as the native library reads them, described once for a view and for a batch."""

from __future__ import annotations

import ctypes
from typing import Any

from inferplane.plugin import Batch
from inferplane_cpu.kernels.attention import float_sinks, kv_b_of, native_batch
from inferplane_cpu.kernels.moe import NativeExperts, describe_routing
from inferplane_cpu.kernels.packing import Adapt, adapt_matrices
from inferplane_cpu.kernels.recurrent_block import describe_mixer, states_in_place
from inferplane_cpu.kernels.rowwise import activation_of, native_norm
from inferplane_cpu.structs import Experts, Latent, Layer, Norm, Step


def native_layer(view: Any, rounded: bool) -> Layer:
    """A layer as the library reads it, described once.

    Args:
        view: of a layer bound to a native kernel.
        rounded: for many tokens, on tiles.
    """
    found: Layer = view.once("inferplane_cpu.layer", _describe, view, rounded)
    return found


def native_step(batch: Batch) -> Step:
    """A step as the library reads it, described once; it points to the batch's tensors."""
    return batch.once("inferplane_cpu.step", _describe_step, batch)


class _OwnedArrays(list[Any]):
    """What a description points to; it lives as long as the description."""

    def matrix(self, child: Any, adapt: Adapt) -> Any:
        """A linear layer's matrix, whose array stays here."""
        self.append(adapt_matrices(adapt, child.weight, child.bias))
        return self[-1][0]


def _describe(view: Any, rounded: bool) -> Layer:
    layer, adapt = Layer(rounded=rounded), view.prepared
    layer.memory = memory = _OwnedArrays()
    layer.attn_norm, layer.mlp_norm = native_norm(view.attn_norm.norm), native_norm(view.mlp_norm.norm)
    layer.attn_after, layer.mlp_after = (_norm_after(view, name) for name in ("attn_after", "mlp_after"))
    if hasattr(view.attn, "mixer"):
        memory.append(mixer := describe_mixer(view.attn.mixer, adapt))
        layer.mixer, layer.o = ctypes.addressof(mixer), mixer.o
    else:
        _describe_attention(layer, view.attn, adapt, memory)
    mlp = view.mlp
    if hasattr(mlp, "experts"):
        memory.append(routed := _describe_experts(mlp, adapt, memory))
        layer.routed = ctypes.addressof(routed)
        mlp = mlp.shared
    if mlp is not None:
        layer.gate_up, layer.down = memory.matrix(mlp.gate_up, adapt), memory.matrix(mlp.down, adapt)
        layer.activation = activation_of(mlp.act)
    return layer


def _describe_attention(layer: Layer, attn: Any, adapt: Adapt, memory: _OwnedArrays) -> None:
    layer.o = memory.matrix(attn.o, adapt)
    enter = attn.enter
    rope = getattr(enter.rope, "rope", enter.rope)
    layer.rope, layer.interleaved = rope.table.data_ptr(), rope.interleaved
    if not hasattr(attn, "qkv"):
        memory.append(latent := _describe_latent(attn, adapt, memory))
        layer.latent = ctypes.addressof(latent)
        layer.heads, layer.kv_heads, layer.scale = attn.dims.heads, 1, attn.absorbed.scale
        return
    layer.qkv = memory.matrix(attn.qkv, adapt)
    if enter.q_norm is not None:
        layer.q_norm, layer.k_norm = native_norm(enter.q_norm), native_norm(enter.k_norm)
    layer.heads, layer.kv_heads = attn.heads
    layer.rope_dim, layer.output_gate = getattr(enter.rope, "size", 0), attn.output_gate
    layer.head_dim, layer.window, layer.scale = attn.head_dim, attn.few.kv.window or 0, attn.few.scale
    layer.softcap = attn.few.softcap or 0.0
    if attn.few.sinks is not None:
        memory.append(sinks := float_sinks(attn.few))
        layer.sinks = sinks.data_ptr()


def _norm_after(view: Any, name: str) -> Norm:
    """The norm of a block's result; none in an op `decoder_layer`."""
    norm = getattr(view, name, None)
    return Norm() if norm is None else native_norm(norm)


def _describe_latent(attn: Any, adapt: Adapt, memory: _OwnedArrays) -> Latent:
    d, enter = attn.dims, attn.enter
    made = Latent(nope=d.nope, rope=d.rope, value=d.value, latent=d.latent)
    made.q_b, made.kv_a = memory.matrix(attn.q_b, adapt), memory.matrix(attn.kv_a, adapt)
    made.kv_b = kv_b_of(attn.absorbed, attn.absorbed.kv_b)
    made.kv_a_norm = native_norm(enter.kv_a_norm)
    if attn.q_a is not None:
        made.q_a = memory.matrix(attn.q_a, adapt)
        made.q_a_norm = native_norm(enter.q_a_norm)
    return made


def _describe_experts(mlp: Any, adapt: Adapt, memory: _OwnedArrays) -> Experts:
    experts = NativeExperts(mlp.experts, adapt)
    memory.append(experts)
    made = describe_routing(mlp.route, len(experts.gate_up))
    made.router = memory.matrix(mlp.router, None)  # in one order whatever comes with it (`prepare_any_order`)
    made.gate_up, made.down = ctypes.addressof(experts.gate_up), ctypes.addressof(experts.down)
    made.clamped = experts.clamped
    return made


def _describe_step(batch: Batch) -> Step:
    step = Step()
    step.batch = native_batch(batch)
    step.positions, step.slots, step.tokens = batch.positions.data_ptr(), batch.slots.data_ptr(), batch.tokens
    if batch.states is not None:
        step.sequences = states_in_place(batch)
    return step
