"""The structs of the native kernels' C interface.

They mirror csrc/structs.h, which documents every struct and field. A struct holds addresses: the code that fills
it keeps the tensors behind them alive.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any


def _of(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of one type."""
    return [(name, kind) for name in names]


class Matrix(Structure):
    """`ip_matrix`: a weight `[n, k]` of one of `KINDS`."""

    _fields_ = [
        *_of(c_int32, "kind", "group"),
        *_of(c_int64, "n", "k", "ld"),
        *_of(c_void_p, "data", "scale", "scale_f16", "bias", "scale_exponent", "scale_code", "scale_unit"),
        *_of(c_void_p, "minimum", "minimum_f16", "minimum_code", "minimum_unit"),
        *_of(c_int32, "input"),
    ]


class Cache(Structure):
    """`ip_cache`: one layer's paged KV cache; slot s begins at `s * stride`, its scales at `s * groups`."""

    _fields_ = [
        *_of(c_void_p, "k", "v"),
        *_of(c_int64, "k_stride", "v_stride"),
        *_of(c_void_p, "k_scale", "v_scale"),
        *_of(c_int64, "k_groups", "v_groups"),
        *_of(c_int32, "block", "k_kind", "v_kind"),
        *_of(c_void_p, "k_ranges", "v_ranges", "first", "first_scale"),
        *_of(c_int64, "k_head", "v_head"),
    ]


class RaggedBatch(Structure):
    """`ip_batch`: query tokens, lengths and block tables of a ragged batch."""

    _fields_ = [*_of(c_void_p, "start", "lens", "tables"), *_of(c_int64, "sequences", "table_width")]


class Norm(Structure):
    """`ip_norm`: an RMS norm; without a weight, none."""

    _fields_ = [("weight", c_void_p), *_of(c_float, "eps", "offset")]


class Latent(Structure):
    """`ip_latent`: weights and sizes of latent attention."""

    _fields_ = [
        *_of(Matrix, "q_a", "q_b", "kv_a", "kv_b"),
        *_of(Norm, "q_a_norm", "kv_a_norm"),
        *_of(c_int64, "nope", "rope", "value", "latent"),
    ]


class ClampedGate(Structure):
    """`ip_clamped_gate`: the gate of op `clamped_experts`."""

    _fields_ = _of(c_float, "alpha", "limit")


class GateLimits(Structure):
    """`ip_gate_limits`: limits of a gated result's factors; infinity: none."""

    _fields_ = _of(c_float, "input", "output", "other")


class Hyper(Structure):
    """`ip_hyper`: hyper-connections, or their head."""

    _fields_ = [
        *_of(c_void_p, "fn", "base", "scale"),
        *_of(c_int64, "streams", "width"),
        *_of(c_float, "norm_eps", "eps", "sinkhorn_eps"),
        *_of(c_int32, "iterations", "head", "wide"),
    ]


class Experts(Structure):
    """`ip_experts`: a router, how it chooses, and the experts' matrices."""

    _fields_ = [
        ("router", Matrix),
        *_of(c_void_p, "bias", "gate_up", "down"),
        *_of(c_int64, "experts", "top", "groups", "top_groups"),
        ("factor", c_float),
        *_of(c_int32, "score", "best_two", "renormalize"),
        ("clamped", c_void_p),
        *_of(c_float, "least_sum", "sum_eps"),
    ]


class Sequences(Structure):
    """`ip_sequences`: the sequences of a step, and where their states are."""

    _fields_ = [*_of(c_void_p, "start", "lens", "slots", "read", "write"), ("sequences", c_int64)]


class Layer(Structure):
    """`ip_layer`: weights and sizes of a decoder layer. `memory` holds the arrays that it points to."""

    memory: list[Any]
    _fields_ = [
        *_of(Matrix, "qkv", "o", "gate_up", "down"),
        *_of(Norm, "attn_norm", "attn_after", "mlp_norm", "mlp_after", "q_norm", "k_norm"),
        ("rope", c_void_p),
        *_of(c_int64, "heads", "kv_heads", "head_dim", "rope_dim", "window"),
        ("scale", c_float),
        *_of(c_int32, "interleaved", "rounded", "activation"),
        ("softcap", c_float),
        ("sinks", c_void_p),
        *_of(c_void_p, "latent", "routed", "mixer"),
        ("output_gate", c_int32),
    ]


class Step(Structure):
    """`ip_step`: a batch, its positions and slots, and one layer's cache."""

    _fields_ = [
        ("batch", RaggedBatch),
        ("cache", Cache),
        *_of(c_void_p, "positions", "slots"),
        ("tokens", c_int64),
        ("sequences", Sequences),
    ]


class Sampling(Structure):
    """`ip_sampling`: rows of logits and how a token is drawn from each."""

    _fields_ = [
        ("logits", c_void_p),
        ("is_bf16", c_int32),
        *_of(c_int64, "ld", "rows", "vocab"),
        *_of(c_void_p, "temperature", "top_p", "min_p", "uniform", "top_k"),
    ]


class LayerSteps(Structure):
    """`ip_layer_steps`: the steps of layers, and which one each of them has."""

    _fields_ = _of(c_void_p, "steps", "number")


class LogitScale(Structure):
    """`ip_logit_scale`: what is done with logits."""

    _fields_ = _of(c_float, "factor", "cap")


class Model(Structure):
    """`ip_model`: a language model's layers, embedding, last norm and head."""

    _fields_ = [
        ("layers", c_void_p),
        ("count", c_int64),
        *_of(Matrix, "embed", "head"),
        ("norm", Norm),
        ("embed_factor", c_float),
        ("logit_scale", LogitScale),
    ]


class ModelIO(Structure):
    """`ip_model_io`: inputs and outputs of a model's step."""

    _fields_ = [
        *_of(c_void_p, "ids", "rows"),
        ("num_rows", c_int64),
        *_of(c_void_p, "logits", "argmax", "hidden"),
    ]


class HeadRows(Structure):
    """`ip_head_rows`: heads of tokens."""

    _fields_ = [("data", c_void_p), *_of(c_int64, "row", "head")]


class Convolution(Structure):
    """`ip_convolution`: a causal convolution; its weight is `[size, channels]`."""

    _fields_ = [*_of(c_void_p, "weight", "bias"), *_of(c_int64, "channels", "size"), ("silu", c_int32)]


class DeltaRule(Structure):
    """`ip_delta_rule`: sizes of the gated delta rule."""

    _fields_ = [*_of(c_int64, "groups", "heads", "k_dim", "v_dim"), ("by_channel", c_int32)]


class Scan(Structure):
    """`ip_scan`: weights and sizes of Mamba-2's scan."""

    _fields_ = [
        *_of(c_void_p, "a_log", "dt_bias", "skip"),
        *_of(c_int64, "groups", "heads", "dim", "size"),
        *_of(c_float, "dt_min", "dt_max"),
    ]


class NormWithGate(Structure):
    """`ip_norm_with_gate`: an RMS norm with a gate, or the gate alone."""

    _fields_ = [
        *(("weight", c_void_p), ("groups", c_int64), ("eps", c_float)),
        *_of(c_int32, "gate_first", "sigmoid"),
    ]


class Mixer(Structure):
    """`ip_mixer`: the mixer of a recurrent layer. `memory` holds what it points to."""

    memory: list[Any]
    _fields_ = [
        *_of(Matrix, "proj", "gates", "o", "low", "decay_up", "gate_up"),
        ("conv", Convolution),
        ("rule", DeltaRule),
        ("scan", Scan),
        ("norm", NormWithGate),
        *_of(c_void_p, "a_log", "dt_bias", "factors"),
        *_of(c_int32, "kind", "grouped"),
    ]
