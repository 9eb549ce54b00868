"""A whole decoder layer as one native call, for steps that bring few tokens a sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from inferplane.plugin import PLAIN, RANK_PORTABLE, Batch, Kernels, LayerKV, StepKind, When
from inferplane_cpu.kernels.attention import LAYOUT, cache, steps, tiled
from inferplane_cpu.kernels.packed import PACKING, PANELS, matrices
from inferplane_cpu.native import Cache, Layer, Step, library

KERNELS = Kernels()
LINEARS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")


def _children(op: Any) -> list[Any]:
    return [getattr(getattr(op, a), b) for a, _, b in (path.partition(".") for path in LINEARS)]


def _grouped(op: Any) -> bool:
    attn, mlp = op.attn, op.mlp
    if attn.name != "gqa_block" or mlp.name != "gated_mlp" or attn.reduce is not None or mlp.reduce is not None:
        return False
    return bool(attn.few.kv.dim == attn.few.kv.v_dim == attn.head_dim)


def _usual(op: Any) -> bool:
    linears = _children(op)
    return all(x.act is None and x.out_dtype is None for x in linears) and linears[2].bias is None


def _bf16(op: Any) -> bool:
    weights = [w for path, w in op.weights() if not path.endswith("rope.table")]
    return all(w.dtype in (None, torch.bfloat16) for w in weights) and op.attn.enter.rope.table.dtype is torch.float32


def _sixteens(op: Any) -> bool:
    return bool(op.mlp.down.weight.shape[1] % 16 == 0)


def _all_packed(op: Any) -> bool:
    return all(x.weight.format in PANELS for x in _children(op))


def _if_grouped(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A predicate that has nothing to say of other layers."""
    return lambda op: not _grouped(op) or holds(op)


NEEDS = (
    ("grouped-query attention and a gated MLP on one rank", _grouped),
    ("plain activations, and an MLP without bias", _if_grouped(_usual)),
    ("bfloat16 weights and a float32 rotary table", _if_grouped(_bf16)),
    ("an inner width that is a multiple of 16", _if_grouped(_sixteens)),
)


def _tiled(op: Any) -> bool:
    return tiled(op.attn.head_dim)


def _when(formats: tuple[str, ...], step_kind: StepKind, *needs: Any) -> When:
    features: tuple[str, ...] = ("native",)
    if step_kind == "mixed":
        features = ("native", "amx")
        needs = (("heads of a multiple of 32 up to 256", _if_grouped(_tiled)), *needs)
    return When(
        (torch.bfloat16,),
        (PLAIN, *formats),
        kv_layouts=(LAYOUT,),
        step_kinds=(step_kind,),
        features=features,
        needs=(*NEEDS, *needs),
    )


ALL_PACKED = ("8 or 4 bits in all its linear layers", _if_grouped(_all_packed))
PACKS = {f"{path}.weight": PACKING for path in LINEARS}


def _describe(p: Any, rounded: bool) -> Layer:
    """The layer as the library reads it, described once and kept on its view; the view keeps the tensors."""
    attn, layer = p.attn, Layer(rounded=rounded)
    for path, child in zip(("qkv", "o", "gate_up", "down"), (attn.qkv, attn.o, p.mlp.gate_up, p.mlp.down), strict=True):
        child.described = matrices(child.weight, child.bias)  # holds what the copy below points to
        setattr(layer, path, child.described[0])
    layer.attn_norm, layer.attn_eps = p.attn_norm.norm.weight.data_ptr(), p.attn_norm.norm.eps
    layer.mlp_norm, layer.mlp_eps = p.mlp_norm.norm.weight.data_ptr(), p.mlp_norm.norm.eps
    enter = attn.enter
    if enter.q_norm is not None:
        layer.q_norm, layer.q_eps = enter.q_norm.weight.data_ptr(), enter.q_norm.eps
        layer.k_norm, layer.k_eps = enter.k_norm.weight.data_ptr(), enter.k_norm.eps
    layer.rope, layer.interleaved = enter.rope.table.data_ptr(), enter.rope.interleaved
    layer.heads, layer.kv_heads = attn.heads
    layer.head_dim, layer.window, layer.scale = attn.head_dim, attn.few.kv.window or 0, attn.few.scale
    return layer


def _step(batch: Batch) -> Step:
    """A step as the library reads it, described once and kept on the batch, whose tensors it points to."""
    step = Step()
    step.batch = steps(batch)
    step.positions, step.slots, step.tokens = batch.positions.data_ptr(), batch.slots.data_ptr(), batch.tokens
    return step


def _native_layer(p: Any, rounded: bool) -> Layer:
    found: Layer | None = p.__dict__.get("layer")
    if found is None:
        found = p.layer = _describe(p, rounded)
    return found


def _native_step(batch: Batch) -> Step:
    found: Step | None = batch.__dict__.get("native")
    if found is None:
        found = batch.__dict__["native"] = _step(batch)
    return found


def _run(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    layer, step = _native_layer(p, rounded), _native_step(batch)
    step.cache = cache(kv)
    x = x.contiguous()
    out, summed = torch.empty_like(x), torch.empty_like(x)
    other = None if residual is None else (residual := residual.contiguous()).data_ptr()
    library().ip_decoder_layer(
        ctypes.byref(layer), ctypes.byref(step), x.data_ptr(), other, out.data_ptr(), summed.data_ptr()
    )
    return out, summed


class Described:
    """All layers of a model and their caches as the library reads them."""

    def __init__(self, views: tuple[Any, ...], caches: tuple[LayerKV, ...]) -> None:
        self.of = caches
        self.layers = (ctypes.c_void_p * len(views))(*(ctypes.addressof(_native_layer(p, False)) for p in views))
        self.caches = (Cache * len(views))(*(cache(kv) for kv in caches[: len(views)]))


def chain(
    views: tuple[Any, ...], x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, caches: tuple[LayerKV, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers in one call, with nothing but barriers between them; one after the other where it takes none."""
    found: Described | None = views[0].__dict__.get("chained")
    if found is None or found.of is not caches:
        found = views[0].chained = Described(views, caches)
    x = x.contiguous()
    out, summed = torch.empty_like(x), torch.empty_like(x)
    other = None if residual is None else (residual := residual.contiguous()).data_ptr()
    if library().ip_decoder_layers(
        found.layers,
        found.caches,
        len(views),
        ctypes.byref(_native_step(batch)),
        x.data_ptr(),
        other,
        out.data_ptr(),
        summed.data_ptr(),
    ):
        return out, summed
    for p, kv in zip(views, caches, strict=False):
        x, residual = _run(p, x, residual, batch, kv, False)
    assert residual is not None
    return x, residual


@KERNELS(
    "decoder_layer",
    "native",
    when=_when(("fp8_block",), "decode"),
    rank=RANK_PORTABLE,
    chain=chain,
    batch_invariant=True,
)
def decoder_layer(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms, projections, rotation, cache write, attention and MLP by one team of threads, without leaving the call."""
    return _run(p, x, residual, batch, kv, False)


@KERNELS(
    "decoder_layer",
    "native",
    when=_when(PANELS, "decode", ALL_PACKED),
    rank=RANK_PORTABLE,
    packs=PACKS,
    chain=chain,
    batch_invariant=True,
)
def decoder_layer_panels(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer`, for weights of 8 and 4 bits."""
    return _run(p, x, residual, batch, kv, False)


@KERNELS("decoder_layer", "native", when=_when(("fp8_block",), "mixed"), rank=RANK_PORTABLE)
def decoder_layer_many(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer`, for many tokens on AMX."""
    return _run(p, x, residual, batch, kv, True)


@KERNELS("decoder_layer", "native", when=_when(PANELS, "mixed", ALL_PACKED), rank=RANK_PORTABLE, packs=PACKS)
def decoder_layer_many_panels(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer_many`, for weights of 8 and 4 bits, which are expanded while they are multiplied."""
    return _run(p, x, residual, batch, kv, True)
