"""The block of a recurrent layer as one native call, for steps that bring few tokens a sequence."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import PLAIN, RANK_PORTABLE, Batch, Kernels, When
from inferplane_cpu.kernels.linear import RANK_BATCH_INVARIANT
from inferplane_cpu.kernels.packing import (
    PANEL_FORMATS,
    adapt_matrices,
    prepare_any_order,
    with_int8_activations,
)
from inferplane_cpu.kernels.panel_storage import PACKING
from inferplane_cpu.kernels.recurrent import (
    BY_CHANNEL,
    describe_convolution,
    describe_gates,
    describe_norm,
    describe_rule,
    describe_scan,
)
from inferplane_cpu.native import library
from inferplane_cpu.structs import Mixer, Sequences

KERNELS = Kernels()
DELTA_NET, MAMBA2, SHORT_CONV, KIMI_DELTA = range(4)
"""`ip_mixer_kind`."""
PACKED_FIELDS = ("proj", "qkvz", "qkv", "o")
"""Linear layers of mixers that may be of 8 or 4 bits."""
GATE_FIELDS = ("ba", "b", "fg_a", "f_b", "g_b")
"""Linear layers of gates and decays, a few rows a head or of a low rank, which have plain weights beside them."""
EXTENSIONS = ("mamba2_mixer.factors", "silu_gate", "kimi_delta_attention", *BY_CHANNEL)
"""What mixers have besides what the op got first, as `When.extensions` lists it."""


def list_linear_ops(mixer: Any) -> list[Any]:
    """The linear layers of a mixer."""
    return [getattr(mixer, name) for name in (*PACKED_FIELDS, *GATE_FIELDS) if hasattr(mixer, name)]


def list_gate_ops(mixer: Any) -> list[Any]:
    """Those of gates and decays."""
    return [getattr(mixer, name) for name in GATE_FIELDS if hasattr(mixer, name)]


def has_native_mixer(block: Any) -> bool:
    """Whether the library knows a recurrent block's mixer, with activations and results in bfloat16."""
    mixer = block.mixer
    is_known = mixer.is_delta_net or mixer.is_kimi_delta_attention or mixer.is_mamba2 or mixer.is_short_convolution
    return is_known and all(x.activation_quant is None and x.out_dtype is None for x in list_linear_ops(mixer))


def has_native_weights(block: Any) -> bool:
    """Whether its weights have the dtypes that the library reads, or are converted once."""
    return all(x.weight.dtype in (None, torch.bfloat16) for x in list_linear_ops(block.mixer))


def has_native_states(block: Any) -> bool:
    """Whether its states are as the library reads and writes them: the inputs of a convolution in the plan's dtype, the
    state of a recurrence in float32."""
    dtypes = [tensor.dtype for tensor in block.states.tensors]
    return dtypes[0] in (None, torch.bfloat16) and all(dtype is torch.float32 for dtype in dtypes[1:])


def list_packed_weights(mixer: Any) -> list[Any]:
    """The weights of a mixer that may be of 8 or 4 bits."""
    return [getattr(mixer, name).weight for name in PACKED_FIELDS if hasattr(mixer, name)]


def has_plain_gates(block: Any) -> bool:
    """Whether what a mixer computes gates and decays with is not quantized."""
    return all(x.weight.format == PLAIN for x in list_gate_ops(block.mixer))


def has_packed_mixer(block: Any) -> bool:
    """Whether all its linear layers but those of gates are of 8 or 4 bits."""
    packed = all(weight.format in PANEL_FORMATS for weight in list_packed_weights(block.mixer))
    return packed and has_plain_gates(block)


NEEDS = (
    (
        "a gated delta net, Kimi Delta Attention, a Mamba-2 mixer or a short convolution with plain activations",
        has_native_mixer,
    ),
    ("bfloat16 weights", has_native_weights),
    ("states in bfloat16 and float32", has_native_states),
)
PACKED = ("8 or 4 bits in all its linear layers but that of gates", has_packed_mixer)
KINDS = {"qkvz": DELTA_NET, "qkv": KIMI_DELTA, "scan": MAMBA2}
"""Field that only mixers of a kind have -> the kind."""
PACKS = {f"mixer.{name}.weight": PACKING for name in PACKED_FIELDS}


def describe_mixer(view: Any, adapt: Any) -> Mixer:
    """The mixer of a view as the library reads it."""
    kind = next((kind for field, kind in KINDS.items() if hasattr(view, field)), SHORT_CONV)
    made = Mixer(kind=kind)
    made.memory = []

    def matrix(child: Any, adapt: Any = adapt) -> Any:
        made.memory.append(adapt_matrices(adapt, child.weight, child.bias))
        return made.memory[-1][0]

    def struct(described: Any) -> Any:
        made.memory.append(described)
        return described[0]

    made.conv, made.o = struct(describe_convolution(view.conv)), matrix(view.o)
    made.proj = matrix(getattr(view, {DELTA_NET: "qkvz", KIMI_DELTA: "qkv"}.get(kind, "proj")))
    plain = None if adapt is with_int8_activations else adapt
    if kind in (DELTA_NET, KIMI_DELTA):
        made.gates = matrix(view.ba if kind == DELTA_NET else view.b, plain)
        made.rule, made.grouped = describe_rule(view.rule), kind == DELTA_NET and view.grouped
        made.memory.append(gates := describe_gates(view.gates))
        made.a_log, made.dt_bias = (weight.data_ptr() for weight in gates)
    if kind == KIMI_DELTA:
        made.low, made.decay_up, made.gate_up = (matrix(x, plain) for x in (view.fg_a, view.f_b, view.g_b))
    if kind == MAMBA2:
        made.scan = struct(describe_scan(view.scan))
        if view.factors is not None:
            made.memory.append(factors := view.factors.float().contiguous())
            made.factors = factors.data_ptr()
    if kind != SHORT_CONV:
        made.norm = struct(describe_norm(view.norm))
    return made


def native_mixer(view: Any) -> Mixer:
    """The mixer of a recurrent block as the library reads it, described once."""
    found: Mixer = view.once("inferplane_cpu.mixer", describe_mixer, view.mixer, view.prepared)
    return found


def states_in_place(batch: Batch) -> Sequences:
    """The sequences of a step whose states are read and written in their slots; described once."""
    found: Sequences = batch.once("inferplane_cpu.states_in_place", _describe_in_place, batch)
    return found


def _describe_in_place(batch: Batch) -> Sequences:
    rows = batch.list_states()
    pointers = batch.query_start.data_ptr(), batch.seq_lens.data_ptr(), batch.slots.data_ptr()
    return Sequences(*pointers, rows.read.data_ptr(), rows.write.data_ptr(), len(batch.seq_lens))


def _make_function(name: str) -> Any:
    def recurrent_block(view: Any, x: torch.Tensor, batch: Batch, kv: Any) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        states = [tensor.data_ptr() for tensor in kv.tensors]
        library().ip_recurrent_block(
            native_mixer(view),
            states_in_place(batch),
            x.data_ptr(),
            states[0],
            states[1] if len(states) > 1 else None,
            out.data_ptr(),
        )
        return out

    recurrent_block.__name__ = name
    return recurrent_block


def _declare(name: str, formats: tuple[str, ...], *needs: Any, **options: Any) -> None:
    """Declare a kernel: projections, convolution, recurrence and norm by one team of threads, without leaving the call;
    states are read and written where they are.

    Args:
        name: ends with `_panels` for weights of 8 and 4 bits.
        formats: of weights, beside plain ones.
        needs: further conditions.
        options: further fields of `Kernel`.
    """
    when = When(
        (torch.bfloat16,),
        (PLAIN, *formats),
        step_kinds=("decode",),
        features=("native",),
        needs=(*NEEDS, *needs),
        extensions=EXTENSIONS,
    )
    KERNELS("recurrent_block", "native", when=when, **{"rank": RANK_PORTABLE, **options})(_make_function(name))


_declare("recurrent_block_batch_invariant", ("fp8_block",), rank=RANK_BATCH_INVARIANT, batch_invariant=True)
_declare("recurrent_block", ("fp8_block",), prepare=prepare_any_order)
_declare("recurrent_block_panels", PANEL_FORMATS, PACKED, packs=PACKS, batch_invariant=True)
