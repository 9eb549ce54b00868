"""Convolutions, recurrences and gated norms of recurrent layers on native kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.plugin import RANK_PORTABLE, Batch, Kernels, When
from inferplane_cpu.native import library
from inferplane_cpu.structs import Convolution, DeltaRule, HeadRows, NormWithGate, Scan, Sequences

KERNELS = Kernels()
NATIVE = When(dtypes=(torch.bfloat16,), features=("native",))
OPTIONS: dict[str, Any] = {"when": NATIVE, "rank": RANK_PORTABLE, "batch_invariant": True}
BY_CHANNEL = ("delta_rule_gates.by_channel", "gated_delta_rule.by_channel", "gated_rms_norm.act")
"""What delta rules with a decay for each channel have, as `When.extensions` lists it."""
CHANNELS: dict[str, Any] = {**OPTIONS, "when": replace(NATIVE, extensions=BY_CHANNEL)}
Described = tuple[Any, tuple[torch.Tensor | None, ...]]
"""A struct, and the tensors that it points to."""


def native_sequences(batch: Batch) -> Sequences:
    """The sequences of a step as the library reads them, with a row of states each; described once. They point to the
    batch's tensors."""
    found: Sequences = batch.once("inferplane_cpu.sequences", _describe_sequences, batch)
    return found


def _describe_sequences(batch: Batch) -> Sequences:
    starts, lens, slots = batch.query_start, batch.seq_lens, batch.slots
    return Sequences(starts.data_ptr(), lens.data_ptr(), slots.data_ptr(), None, None, len(lens))


def _in_float(weight: torch.Tensor) -> torch.Tensor:
    return weight.float().contiguous()


def describe_convolution(op: Any) -> Described:
    """An op `causal_conv1d` as the library reads it."""
    channels, size = op.weight.shape
    weight = op.weight.to(torch.bfloat16).t().contiguous()
    bias = None if op.bias is None else op.bias.to(torch.bfloat16).contiguous()
    pointer = None if bias is None else bias.data_ptr()
    return Convolution(weight.data_ptr(), pointer, channels, size, op.silu), (weight, bias)


def describe_scan(op: Any) -> Described:
    """An op `selective_scan` as the library reads it."""
    weights = tuple(_in_float(w) for w in (op.a_log, op.dt_bias, op.skip))
    sizes = op.groups, len(op.a_log), op.head_dim, op.state_size
    return Scan(*(w.data_ptr() for w in weights), *sizes, *op.dt_limits), weights


def describe_norm(op: Any) -> Described:
    """An op `gated_rms_norm` or `silu_gate` as the library reads it."""
    if not hasattr(op, "weight"):
        return NormWithGate(None, 1, 0.0, False, False), ()
    weight = _in_float(op.weight)
    return NormWithGate(weight.data_ptr(), op.groups, op.eps, op.gate_first, op.act == "sigmoid"), (weight,)


def describe_rule(op: Any) -> DeltaRule:
    """An op `gated_delta_rule` as the library reads it."""
    return DeltaRule(*op.heads, *op.dims, op.by_channel)


def describe_gates(op: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of an op `delta_rule_gates`, in float32."""
    return _in_float(op.a_log), _in_float(op.dt_bias)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The same entries, with those of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(*parts: torch.Tensor) -> Any:
    """Tensors `[T, heads, D]`, whose entries are side by side, as an array that the library reads."""
    return (HeadRows * len(parts))(*(HeadRows(part.data_ptr(), *part.stride()[:2]) for part in parts))


@KERNELS("causal_conv1d", "native", **OPTIONS)
def causal_conv1d(view: Any, x: torch.Tensor, batch: Batch, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of channels, token by token."""
    conv, _ = view.once("inferplane_cpu.convolution", describe_convolution, view)
    x, state = _dense(x), state.contiguous()
    y, after = x.new_empty(x.shape), torch.empty_like(state)
    pointers = state.data_ptr(), after.data_ptr(), y.data_ptr()
    library().ip_causal_conv1d(conv, native_sequences(batch), x.data_ptr(), x.stride(0), *pointers)
    return y, after


@KERNELS("delta_rule_gates", "native", **CHANNELS)
def delta_rule_gates(view: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32."""
    a_log, dt_bias = view.once("inferplane_cpu.gates", describe_gates, view)
    a, b = _dense(a), _dense(b)
    decay, beta = (torch.empty(rows.shape, dtype=torch.float32) for rows in (a, b))
    rows = a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0)
    channels = a.shape[1] // b.shape[1] if view.by_channel else 0
    library().ip_delta_rule_gates(
        a_log.data_ptr(), dt_bias.data_ptr(), *rows, *b.shape, channels, decay.data_ptr(), beta.data_ptr()
    )
    return decay, beta


@KERNELS("gated_delta_rule", "native", **CHANNELS)
def gated_delta_rule(
    view: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token; a block of columns of a head's state stays in the cache."""
    rule = view.once("inferplane_cpu.delta_rule", describe_rule, view)
    q, k, v, decay, beta = (_dense(t) for t in (q, k, v, decay, beta))
    state = state.contiguous()
    y, after = v.new_empty(v.shape), torch.empty_like(state)
    gates = decay.data_ptr(), decay.stride(0), beta.data_ptr(), beta.stride(0)
    pointers = state.data_ptr(), after.data_ptr(), y.data_ptr()
    library().ip_gated_delta_rule(rule, native_sequences(batch), _heads(q, k, v), *gates, *pointers)
    return y, after


def _gate(view: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    norm, _ = view.once("inferplane_cpu.norm_with_gate", describe_norm, view)
    heads = x.shape[-2] if x.dim() == 3 else 1
    rows = [_dense(t if t.dim() == 3 else t.reshape(-1, 1, t.shape[-1])) for t in (x, gate)]
    y = torch.empty(x.shape, dtype=x.dtype)
    library().ip_gated_norm(norm, *(_heads(t) for t in rows), rows[0].shape[0], heads, x.shape[-1], y.data_ptr())
    return y


@KERNELS("gated_rms_norm", "native", **CHANNELS)
def gated_rms_norm(view: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Row by row, sums in one order."""
    return _gate(view, x, gate)


@KERNELS("silu_gate", "native", **OPTIONS)
def silu_gate(view: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once."""
    return _gate(view, x, gate)


@KERNELS("selective_scan", "native", **OPTIONS)
def selective_scan(
    view: Any,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token; rows of a head's state stay in the cache."""
    scan, _ = view.once("inferplane_cpu.scan", describe_scan, view)
    x, dt, b, c = (_dense(t) for t in (x, dt, b, c))
    state = state.contiguous()
    y, after = x.new_empty(x.shape), torch.empty_like(state)
    pointers = state.data_ptr(), after.data_ptr(), y.data_ptr()
    library().ip_selective_scan(scan, native_sequences(batch), _heads(x, b, c), dt.data_ptr(), dt.stride(0), *pointers)
    return y, after
