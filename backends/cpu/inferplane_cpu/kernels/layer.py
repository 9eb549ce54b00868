"""A whole decoder layer as one native call, for steps that bring few tokens a sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from inferplane.plugin import PLAIN, RANK_PORTABLE, Batch, Kernels, LayerKV, StepKind, When
from inferplane_cpu.kernels import recurrent_block
from inferplane_cpu.kernels.attention import INT4_LAYOUTS, LAYOUTS, has_tile_dims, native_cache
from inferplane_cpu.kernels.layer_description import native_layer, native_step
from inferplane_cpu.kernels.linear import INT8_ACTIVATIONS, RANK_BATCH_INVARIANT, fits_int8_sums
from inferplane_cpu.kernels.moe import MAX_EXPERTS, ROUTE
from inferplane_cpu.kernels.narrow_inputs import NARROW_INPUTS, NarrowInput
from inferplane_cpu.kernels.packing import (
    INT8_ROW_FORMATS,
    LATENT_FORMATS,
    MAX_INT8_COLUMNS,
    PANEL_FORMATS,
    prepare_any_order,
)
from inferplane_cpu.kernels.panel_storage import MXFP4_PACKING, PACKING
from inferplane_cpu.kernels.recurrent_block import (
    has_native_mixer,
    has_native_states,
    has_plain_gates,
    list_gate_ops,
    list_linear_ops,
)
from inferplane_cpu.native import library

KERNELS = Kernels()


def _has_native_parts(op: Any) -> bool:
    attn, mlp = op.attn, op.mlp
    if not _has_native_norms(op) or not (mlp.is_gated_mlp or mlp.has_experts):
        return False
    if mlp.reduce is not None or (mlp.has_experts and mlp.here is not None):
        return False
    if op.attn.has_recurrence:
        return has_native_mixer(attn) and has_native_states(attn)
    if not (attn.has_grouped_queries or attn.has_latent_attention) or attn.reduce is not None:
        return False
    if attn.has_latent_attention:
        return True
    return _enters_natively(attn.enter) and bool(attn.few.kv.dim == attn.few.kv.v_dim == attn.head_dim)


def _enters_natively(enter: Any) -> bool:
    """Whether q and k are rotated, all or their first entries, after norms or none, and that is all. `EXTENSIONS` says
    which norms there may be."""
    plain = not getattr(enter, "norms_last", False) and getattr(enter, "q_factors", None) is None
    return plain and enter.rope is not None


def _has_native_norms(op: Any) -> bool:
    """Whether a norm leads into both blocks and their results are added without a factor; `EXTENSIONS` says which norms
    there may be."""
    return op.attn_norm is not None and op.mlp_norm is not None and getattr(op, "factor", 1) == 1


def _gated_mlp_of(op: Any) -> Any:
    """The gated MLP that all tokens take, or None."""
    return op.mlp if op.mlp.is_gated_mlp else op.mlp.shared


def _linear_ops(op: Any) -> list[Any]:
    """Linear children, the router left out."""
    attn, mlp = op.attn, _gated_mlp_of(op)
    if op.attn.has_recurrence:
        own = list_linear_ops(attn.mixer)
    else:
        own = [*([attn.q_a, attn.q_b, attn.kv_a] if attn.has_latent_attention else [attn.qkv]), attn.o]
    return [x for x in (*own, *((mlp.gate_up, mlp.down) if mlp is not None else ())) if x is not None]


def _expert_weights(op: Any) -> list[Any]:
    """The experts' weights."""
    return [op.mlp.experts.gate_up, op.mlp.experts.down] if op.mlp.has_experts else []


def _has_plain_activations(op: Any) -> bool:
    mlp = _gated_mlp_of(op)
    plain = all(x.activation_quant is None and x.out_dtype is None for x in _linear_ops(op))
    router = op.mlp.router if op.mlp.has_experts else None
    if router is not None:
        plain = plain and router.activation_quant is None and router.out_dtype is torch.float32
    return plain and (mlp is None or mlp.gate_up.bias is None)


def _has_bf16_weights(op: Any) -> bool:
    """Whether its weights have the dtypes that the library reads: float32 in the rotary table and a router's bias,
    bfloat16 in all others but those of a mixer that are converted. Several kernels ask, so it is found once for each
    op."""
    return bool(op.once("inferplane_cpu.has_bf16_weights", _find_bf16_weights, op))


def _find_bf16_weights(op: Any) -> bool:
    bias = op.mlp.route.bias if op.mlp.has_experts else None
    table, converted = None, []
    if op.attn.has_recurrence:
        linear = [x.weight for x in list_linear_ops(op.attn.mixer)]
        converted = [w for _, w in op.attn.weights() if not any(w is x for x in linear)]
    else:
        rope = op.attn.enter.rope
        table = getattr(rope, "rope", rope).table
    in_float32 = [w for w in (table, bias) if w is not None]
    others = (w for _, w in op.weights() if not any(w is x for x in (*in_float32, *converted)))
    return all(w.dtype is torch.float32 for w in in_float32) and all(w.dtype in (None, torch.bfloat16) for w in others)


def _has_inner_multiple_of_16(op: Any) -> bool:
    mlp = _gated_mlp_of(op)
    return mlp is None or bool(mlp.down.weight.shape[1] % 16 == 0)


def _has_all_experts(op: Any) -> bool:
    return not _expert_weights(op) or (op.mlp.experts.gate_up.shape[0] <= MAX_EXPERTS and not op.mlp.experts.partial)


def _has_stored_kv_b(op: Any) -> bool:
    return not op.attn.has_latent_attention or _has_kv_b_in(op, (PLAIN, "fp8_block"))


def _has_packed_kv_b(op: Any) -> bool:
    return op.attn.has_latent_attention and _has_kv_b_in(op, LATENT_FORMATS)


def _has_kv_b_in(op: Any, formats: tuple[str, ...]) -> bool:
    return op.attn.absorbed.kv_b.format in formats and op.attn.expanded.kv_b.bias is None


def _list_packed_weights(op: Any) -> list[Any]:
    """Weights that kernels for quantized ones read in panels."""
    gates = list_gate_ops(op.attn.mixer) if op.attn.has_recurrence else []
    return [*(x.weight for x in _linear_ops(op) if not any(x is y for y in gates)), *_expert_weights(op)]


def _has_plain_gates(op: Any) -> bool:
    return not op.attn.has_recurrence or has_plain_gates(op.attn)


def _has_packed_weights(op: Any) -> bool:
    return _has_plain_gates(op) and all(w.format in PANEL_FORMATS for w in _list_packed_weights(op))


def _has_mxfp4_experts(op: Any) -> bool:
    others = (x.weight.format for x in _linear_ops(op))
    return (
        op.mlp.has_experts
        and all(w.format == "mxfp4" for w in _expert_weights(op))
        and all(format == PLAIN for format in others)
    )


def _has_int8_row_weights(op: Any) -> bool:
    fits = all(w.format in INT8_ROW_FORMATS and fits_int8_sums(w) for w in _list_packed_weights(op))
    return fits and _has_plain_gates(op)


def _has_narrow_weights(narrow: NarrowInput) -> Callable[[Any], bool]:
    return lambda op: _has_plain_gates(op) and all(w.format in narrow.weights for w in _list_packed_weights(op))


def _if_native(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A predicate that holds for every layer that native kernels do not take anyway."""
    return lambda op: not _has_native_parts(op) or holds(op)


LAYER_OPS = ("decoder_layer", "residual_layer")
EXTENSIONS = (
    *("rms_norm.offset", "activation_mul", "attention.sinks", "attention.softcap", "clamped_experts"),
    *ROUTE.extensions,
    *("prepare_attention", "partial_rope", "gqa_block.output_gate", "recurrent_block", *recurrent_block.EXTENSIONS),
)
"""What layers have besides what the op got first, as `When.extensions` lists it."""
NEEDS = (
    (
        "grouped-query or latent attention or a mixer, a gated MLP or experts, RMS norms, on one rank",
        _has_native_parts,
    ),
    ("plain activations, and an MLP without bias", _if_native(_has_plain_activations)),
    ("bfloat16 weights, a float32 rotary table and a float32 bias of the router", _if_native(_has_bf16_weights)),
    ("an inner width that is a multiple of 16", _if_native(_has_inner_multiple_of_16)),
    (f"all experts here, at most {MAX_EXPERTS}", _if_native(_has_all_experts)),
)
STORED_KV_B = ("a kv_b in bfloat16 or FP8 without bias", _if_native(_has_stored_kv_b))
PACKED_KV_B = ("latent attention with a kv_b of 8 or 4 bits without bias", _if_native(_has_packed_kv_b))


def _fits_tiles(op: Any) -> bool:
    attn = op.attn
    plain = attn.has_grouped_queries and not attn.output_gate
    return plain and op.mlp.is_gated_mlp and has_tile_dims(attn.head_dim)


def _when(formats: tuple[str, ...], step_kind: StepKind, *needs: Any, kv_b: Any = STORED_KV_B) -> When:
    features: tuple[str, ...] = ("native",)
    if step_kind == "mixed":
        features = ("native", "tiles")
        needs = (
            (
                "grouped queries without gates, a gated MLP and heads of a multiple of 32 up to 256",
                _if_native(_fits_tiles),
            ),
            *needs,
        )
    return When(
        (torch.bfloat16,),
        (PLAIN, *formats),
        kv_layouts=(*LAYOUTS, *INT4_LAYOUTS),
        step_kinds=(step_kind,),
        features=features,
        needs=(*NEEDS, kv_b, *needs),
        extensions=EXTENSIONS,
    )


PACKED_WEIGHTS = ("8 or 4 bits in all its linear layers and experts", _if_native(_has_packed_weights))
MXFP4_EXPERTS = ("MXFP4 in its experts alone", _if_native(_has_mxfp4_experts))
INT8_ROW_WEIGHTS = (
    f"int8 by rows of at most {MAX_INT8_COLUMNS} columns in all its linear layers and experts",
    _if_native(_has_int8_row_weights),
)
LINEAR_PATHS = ("attn.qkv", "attn.q_a", "attn.q_b", "attn.kv_a", "attn.o", "mlp.gate_up", "mlp.down")
PACKS = {f"{path}.weight": PACKING for path in (*LINEAR_PATHS, "mlp.shared.gate_up", "mlp.shared.down")}
PACKS |= {f"attn.mixer.{name}.weight": PACKING for name in recurrent_block.PACKED_FIELDS}
PACKS |= {"mlp.experts.gate_up": PACKING, "mlp.experts.down": PACKING}
MXFP4_PACKS = {"mlp.experts.gate_up": MXFP4_PACKING, "mlp.experts.down": MXFP4_PACKING}
DENSE_PACKS = {f"{path}.weight": PACKING for path in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
PACKS_KV_B = {**PACKS, "attn.absorbed.kv_b": PACKING, "attn.expanded.kv_b.weight": PACKING}


def _make_layer_function(name: str, rounded: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A kernel's function of this name; `rounded` as in `native_layer`."""

    def decoder_layer(
        view: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, step = native_layer(view, rounded), native_step(batch)
        step.cache = native_cache(kv)
        x = x.contiguous()
        out, summed = torch.empty_like(x), torch.empty_like(x)
        other = None if residual is None else (residual := residual.contiguous()).data_ptr()
        library().ip_decoder_layer(
            ctypes.byref(layer), ctypes.byref(step), x.data_ptr(), other, out.data_ptr(), summed.data_ptr()
        )
        return out, summed

    decoder_layer.__name__ = name
    return decoder_layer


def _declare(name: str, when: When, *, ops: tuple[str, ...] = LAYER_OPS, **options: Any) -> None:
    """Declare a kernel of each of `ops`: norms, projections, rotation, cache write, attention and MLP by one team of
    threads, without leaving the call. Products of many tokens are on tiles (csrc/products/tile_products.h); weights of
    8 and 4 bits are expanded there while they are multiplied.

    Args:
        name: ends with the weights' kind: `_panels` of 8 and 4 bits, `_mxfp4` of experts in MXFP4, `_w8a8` and the
            names of `NARROW_INPUTS` with activations of fewer bits before every product; `_many` before that is for
            many tokens. The kernel of `residual_layer` has that op's name before.
        when: its conditions.
        ops: names of the ops.
        options: further fields of `Kernel`.
    """
    for op in ops:
        function = _make_layer_function(name.replace("decoder_layer", op), when.step_kinds == ("mixed",))
        KERNELS(op, "native", when=when, **{"rank": RANK_PORTABLE, **options})(function)


INVARIANT: dict[str, Any] = {"batch_invariant": True}
_declare("decoder_layer_batch_invariant", _when(("fp8_block",), "decode"), rank=RANK_BATCH_INVARIANT, **INVARIANT)
# Not invariant: on AMX one token and two have other last bits than more, since bfloat16 weights are read row by row.
_declare("decoder_layer", _when(("fp8_block",), "decode"), prepare=prepare_any_order)
EXPERTS: dict[str, Any] = {"ops": ("decoder_layer",), "packs": PACKS}
_declare("decoder_layer_panels", _when(PANEL_FORMATS, "decode", PACKED_WEIGHTS), **EXPERTS, **INVARIANT)
_declare(
    "decoder_layer_latent_panels",
    _when(PANEL_FORMATS, "decode", PACKED_WEIGHTS, kv_b=PACKED_KV_B),
    ops=("decoder_layer",),
    packs=PACKS_KV_B,
    **INVARIANT,
)
MXFP4: dict[str, Any] = {"ops": ("decoder_layer",), "packs": MXFP4_PACKS}
MXFP4_WHEN = _when(("mxfp4",), "decode", MXFP4_EXPERTS)
_declare("decoder_layer_mxfp4_batch_invariant", MXFP4_WHEN, **{**MXFP4, **INVARIANT}, rank=RANK_BATCH_INVARIANT)
_declare("decoder_layer_mxfp4", MXFP4_WHEN, **MXFP4, prepare=prepare_any_order)
_declare("decoder_layer_many", _when(("fp8_block",), "mixed"))
_declare("decoder_layer_many_panels", _when(PANEL_FORMATS, "mixed", PACKED_WEIGHTS), **EXPERTS)
# No family has experts or latents between norms before and after: no sample would hold their packing to anything.
DENSE: dict[str, Any] = {"ops": ("residual_layer",), "packs": DENSE_PACKS}
DENSE_PARTS = (
    "grouped-query attention and a gated MLP",
    _if_native(lambda op: op.attn.has_grouped_queries and op.mlp.is_gated_mlp),
)
_declare("decoder_layer_panels", _when(PANEL_FORMATS, "decode", PACKED_WEIGHTS, DENSE_PARTS), **DENSE, **INVARIANT)
_declare("decoder_layer_many_panels", _when(PANEL_FORMATS, "mixed", PACKED_WEIGHTS), **DENSE)
W8A8: dict[str, Any] = {**EXPERTS, **INT8_ACTIVATIONS}
_declare("decoder_layer_w8a8", _when(INT8_ROW_FORMATS, "decode", INT8_ROW_WEIGHTS), **W8A8, **INVARIANT)
_declare("decoder_layer_many_w8a8", _when(INT8_ROW_FORMATS, "mixed", INT8_ROW_WEIGHTS), **W8A8)
for narrow in NARROW_INPUTS:
    weights = (
        f"{', '.join(narrow.weights)} in all its linear layers and experts",
        _if_native(_has_narrow_weights(narrow)),
    )
    options: dict[str, Any] = {**EXPERTS, **narrow.options(4)}
    _declare(f"decoder_layer_{narrow.name}", _when(narrow.weights, "decode", weights), **options, **INVARIANT)
    _declare(f"decoder_layer_many_{narrow.name}", _when(narrow.weights, "mixed", weights), **options)
