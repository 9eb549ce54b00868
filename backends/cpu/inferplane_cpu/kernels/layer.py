"""A whole decoder layer as one native call, for steps that bring few tokens a sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from inferplane.plugin import PLAIN, RANK_PORTABLE, Batch, Kernels, LayerKV, StepKind, When
from inferplane_cpu.kernels.attention import LAYOUTS, cache, kv_b_of, steps, tiled
from inferplane_cpu.kernels.linear import WHEN_CODED, narrow
from inferplane_cpu.kernels.moe import MOST_EXPERTS, routing
from inferplane_cpu.kernels.packed import BYTES, MOST_CODED_COLUMNS, PACKING, PANELS, coded, matrices
from inferplane_cpu.native import Cache, Experts, Latent, Layer, Step, library

KERNELS = Kernels()


def _latent(op: Any) -> bool:
    return bool(op.attn.name == "mla_block")


def _served(op: Any) -> bool:
    attn, mlp = op.attn, op.mlp
    if attn.name not in ("gqa_block", "mla_block") or mlp.name not in ("gated_mlp", "moe"):
        return False
    if attn.reduce is not None or mlp.reduce is not None or (mlp.name == "moe" and mlp.here is not None):
        return False
    return _latent(op) or bool(attn.few.kv.dim == attn.few.kv.v_dim == attn.head_dim)


def _dense(op: Any) -> Any:
    """The gated MLP that all tokens take, or None."""
    return op.mlp if op.mlp.name == "gated_mlp" else op.mlp.shared


def _linears(op: Any) -> list[Any]:
    """Linear children, the router left out."""
    attn, mlp = op.attn, _dense(op)
    own = [attn.q_a, attn.q_b, attn.kv_a] if _latent(op) else [attn.qkv]
    return [x for x in (*own, attn.o, *((mlp.gate_up, mlp.down) if mlp is not None else ())) if x is not None]


def _stacks(op: Any) -> list[Any]:
    """The experts' weights."""
    return [op.mlp.experts.gate_up, op.mlp.experts.down] if op.mlp.name == "moe" else []


def _usual(op: Any) -> bool:
    mlp = _dense(op)
    plain = all(x.act is None and x.out_dtype is None for x in _linears(op))
    router = op.mlp.router if op.mlp.name == "moe" else None
    if router is not None:
        plain = plain and router.bias is None and router.act is None and router.out_dtype is torch.float32
    return plain and (mlp is None or mlp.gate_up.bias is None)


def _stored(path: str) -> bool:
    """Whether a weight is one that the library reads in bfloat16: all but rotary tables and a router's bias."""
    return not (path.endswith("rope.table") or path == "mlp.route.bias")


def _bf16(op: Any) -> bool:
    if any(w.dtype not in (None, torch.bfloat16) for path, w in op.weights() if _stored(path)):
        return False
    route = op.mlp.route if op.mlp.name == "moe" else None
    return op.attn.enter.rope.table.dtype is torch.float32 and (
        route is None or route.bias is None or route.bias.dtype is torch.float32
    )


def _sixteens(op: Any) -> bool:
    mlp = _dense(op)
    return mlp is None or bool(mlp.down.weight.shape[1] % 16 == 0)


def _bounded(op: Any) -> bool:
    return not _stacks(op) or (op.mlp.experts.gate_up.shape[0] <= MOST_EXPERTS and not op.mlp.experts.partial)


def _kv_b(op: Any) -> bool:
    kept = not _latent(op) or op.attn.absorbed.kv_b.format in (PLAIN, "fp8_block")
    return kept and (not _latent(op) or op.attn.expanded.kv_b.bias is None)


def _all_packed(op: Any) -> bool:
    return all(w.format in PANELS for w in (*(x.weight for x in _linears(op)), *_stacks(op)))


def _all_bytes(op: Any) -> bool:
    return all(w.format in BYTES and narrow(w) for w in (*(x.weight for x in _linears(op)), *_stacks(op)))


def _if_served(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A predicate that has nothing to say of other layers."""
    return lambda op: not _served(op) or holds(op)


NEEDS = (
    ("grouped-query or latent attention and a gated MLP or experts, on one rank", _served),
    ("plain activations, and an MLP without bias", _if_served(_usual)),
    ("bfloat16 weights, a float32 rotary table and a float32 bias of the router", _if_served(_bf16)),
    ("an inner width that is a multiple of 16", _if_served(_sixteens)),
    (f"all experts here, at most {MOST_EXPERTS}", _if_served(_bounded)),
    ("a kv_b in bfloat16 or FP8 without bias", _if_served(_kv_b)),
)


def _tiled(op: Any) -> bool:
    return op.attn.name == "gqa_block" and op.mlp.name == "gated_mlp" and tiled(op.attn.head_dim)


def _when(formats: tuple[str, ...], step_kind: StepKind, *needs: Any) -> When:
    features: tuple[str, ...] = ("native",)
    if step_kind == "mixed":
        features = ("native", "tiles")
        needs = (
            ("grouped-query attention, a gated MLP and heads of a multiple of 32 up to 256", _if_served(_tiled)),
            *needs,
        )
    return When(
        (torch.bfloat16,),
        (PLAIN, *formats),
        kv_layouts=LAYOUTS,
        step_kinds=(step_kind,),
        features=features,
        needs=(*NEEDS, *needs),
    )


ALL_PACKED = ("8 or 4 bits in all its linear layers and experts", _if_served(_all_packed))
ALL_BYTES = (
    f"int8 by rows of at most {MOST_CODED_COLUMNS} columns in all its linear layers and experts",
    _if_served(_all_bytes),
)
LINEARS = ("attn.qkv", "attn.q_a", "attn.q_b", "attn.kv_a", "attn.o", "mlp.gate_up", "mlp.down")
CODED = object()
"""What is prepared for a kernel whose products round activations to 8 bits."""
PACKS = {f"{path}.weight": PACKING for path in (*LINEARS, "mlp.shared.gate_up", "mlp.shared.down")}
PACKS |= {"mlp.experts.gate_up": PACKING, "mlp.experts.down": PACKING}


def _stack(weight: Any, alone: bool, bias: torch.Tensor | None = None) -> Any:
    """A weight's matrices; `alone`: for activations of 8 bits."""
    found = matrices(weight, bias)
    return coded(found) if alone else found


def _matrix(child: Any, alone: bool = False) -> Any:
    """A linear layer's matrix; the view holds what the copy of it points to."""
    child.described = _stack(child.weight, alone, child.bias)
    return child.described[0]


def _describe(p: Any, rounded: bool) -> Layer:
    """The layer as the library reads it, described once and kept on its view; the view keeps the tensors."""
    attn, layer, alone = p.attn, Layer(rounded=rounded), p.prepared is CODED
    layer.attn_norm, layer.attn_eps = p.attn_norm.norm.weight.data_ptr(), p.attn_norm.norm.eps
    layer.mlp_norm, layer.mlp_eps = p.mlp_norm.norm.weight.data_ptr(), p.mlp_norm.norm.eps
    layer.o = _matrix(attn.o, alone)
    enter = attn.enter
    layer.rope, layer.interleaved = enter.rope.table.data_ptr(), enter.rope.interleaved
    if hasattr(attn, "qkv"):
        layer.qkv = _matrix(attn.qkv, alone)
        if enter.q_norm is not None:
            layer.q_norm, layer.q_eps = enter.q_norm.weight.data_ptr(), enter.q_norm.eps
            layer.k_norm, layer.k_eps = enter.k_norm.weight.data_ptr(), enter.k_norm.eps
        layer.heads, layer.kv_heads = attn.heads
        layer.head_dim, layer.window, layer.scale = attn.head_dim, attn.few.kv.window or 0, attn.few.scale
    else:
        p.latent = _describe_latent(attn, alone)
        layer.latent = ctypes.addressof(p.latent)
        layer.heads, layer.kv_heads, layer.scale = attn.dims.heads, 1, attn.absorbed.scale
    mlp = p.mlp
    if hasattr(mlp, "experts"):
        p.routed = _describe_experts(mlp, alone)
        layer.routed = ctypes.addressof(p.routed)
        mlp = mlp.shared
    if mlp is not None:
        layer.gate_up, layer.down = _matrix(mlp.gate_up, alone), _matrix(mlp.down, alone)
    return layer


def _describe_latent(attn: Any, alone: bool) -> Latent:
    d, enter = attn.dims, attn.enter
    made = Latent(nope=d.nope, rope=d.rope, value=d.value, latent=d.latent)
    made.q_b, made.kv_a = _matrix(attn.q_b, alone), _matrix(attn.kv_a, alone)
    made.kv_b = kv_b_of(attn.absorbed, attn.absorbed.kv_b)
    made.kv_a_norm, made.kv_a_eps = enter.kv_a_norm.weight.data_ptr(), enter.kv_a_norm.eps
    if attn.q_a is not None:
        made.q_a = _matrix(attn.q_a, alone)
        made.q_a_norm, made.q_a_eps = enter.q_a_norm.weight.data_ptr(), enter.q_a_norm.eps
    return made


def _describe_experts(mlp: Any, alone: bool) -> Experts:
    route, experts = mlp.route, mlp.experts
    experts.described = gate_up, down = _stack(experts.gate_up, alone), _stack(experts.down, alone)
    made = routing(route, len(gate_up))
    made.router = _matrix(mlp.router)
    made.gate_up, made.down = ctypes.addressof(gate_up), ctypes.addressof(down)
    return made


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
    """As `decoder_layer`, for many tokens on tiles (csrc/tiles.h)."""
    return _run(p, x, residual, batch, kv, True)


@KERNELS("decoder_layer", "native", when=_when(PANELS, "mixed", ALL_PACKED), rank=RANK_PORTABLE, packs=PACKS)
def decoder_layer_many_panels(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer_many`, for weights of 8 and 4 bits, which are expanded while they are multiplied."""
    return _run(p, x, residual, batch, kv, True)


@KERNELS(
    "decoder_layer",
    "native",
    when=_when(BYTES, "decode", ALL_BYTES),
    rank=RANK_PORTABLE,
    packs=PACKS,
    prepare=lambda op, ctx: CODED,
    chain=chain,
    batch_invariant=True,
    **WHEN_CODED,
)
def decoder_layer_w8a8(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer_panels`, with activations in 8 bits before every product."""
    return _run(p, x, residual, batch, kv, False)


@KERNELS(
    "decoder_layer",
    "native",
    when=_when(BYTES, "mixed", ALL_BYTES),
    rank=RANK_PORTABLE,
    packs=PACKS,
    prepare=lambda op, ctx: CODED,
    **WHEN_CODED,
)
def decoder_layer_many_w8a8(
    p: Any, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoder_layer_w8a8`, for many tokens on tiles (csrc/tiles.h)."""
    return _run(p, x, residual, batch, kv, True)
