"""The mock's kernels, at three levels, over weights that are transposed, padded to 64 columns with NaN, or both.

They work on the device's memory (`lowered`), in float32, and round once. They never ask the host for lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.binding.link import View
from inferplane.ops import MoERoute, Rope
from inferplane.plugin import Batch, HostLens, Kernel, LayerKV, Packing, Row, When
from tests.mock_device.hidden import DeviceTensor, lifted, lowered
from tests.mock_device.kvcache import HEADS_FIRST, LATENT, HiddenKV

RANK = 90
PADDED = Packing("mock.padded64", lambda w: F.pad(w, (0, -w.shape[-1] % 64), value=torch.nan))
TRANSPOSED = Packing("mock.t", lambda w: w.transpose(-1, -2).contiguous())
BOTH = Packing("mock.t_padded64", lambda w: PADDED.fn(w.transpose(-1, -2)).contiguous())


def device_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel written for the device's memory, to be called with tensors of the device."""

    @functools.wraps(function)
    def kernel(p: Any, *args: Any) -> Any:
        return lifted(function(_lower_view(p), *map(_lower_argument, args)))

    return kernel


def _lower_view(view: Any) -> Any:
    def low(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            assert isinstance(value, DeviceTensor), "a weight was left on the host"
            return value.raw
        return _lower_view(value) if isinstance(value, View) else value

    return SimpleNamespace(**{name: low(value) for name, value in vars(view).items()})


def _lower_argument(arg: Any) -> Any:
    if not isinstance(arg, Batch):
        return arg if isinstance(arg, LayerKV) else lowered(arg)
    raw = replace(arg, **{f.name: lowered(getattr(arg, f.name)) for f in fields(arg) if f.name not in ("few", "many")})
    return replace(raw, host_lens=HostLens(tuple(raw.query_start.tolist()), tuple(raw.seq_lens.tolist())))


def norm(x: torch.Tensor, p: Any) -> torch.Tensor:
    h = x.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + p.eps) * p.weight[: x.shape[-1]].float()


@device_code
def rms_norm(p, x):
    return norm(x, p).to(x.dtype)


@device_code
def add_rms_norm(p, x, residual):
    s = x.clone() if residual is None else x + residual
    return norm(s, p.norm).to(x.dtype), s


def product(x: torch.Tensor, linear: Any, columns: int) -> torch.Tensor:
    y = (x.float() @ linear.weight.float())[..., :columns]
    return y if linear.bias is None else y + linear.bias.float()


def rotate(rope: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return Rope.__call__(rope, x.float(), positions)


def sequences(batch: Batch) -> Iterator[Row]:
    """The step's sequences; padded ones have no tokens and are left out."""
    return batch.rows()


def hidden_keys(query_tokens: int, tokens: int) -> torch.Tensor:
    """Which keys a query may not see."""
    return torch.ones(query_tokens, tokens, dtype=torch.bool).triu(tokens - query_tokens + 1)


def remember(kv: HiddenKV, slots: torch.Tensor, *values: torch.Tensor) -> None:
    """Write the step's own tokens; padded rows go to the spare block."""
    kv.write_raw(slots, *values)


def attend(q: torch.Tensor, batch: Batch, keys_values: Callable[..., Any], scale: float, width: int) -> torch.Tensor:
    """Causal attention, q `[T, H, D]` -> `[T, H, width]`, float32; rows of padding stay NaN."""
    out = q.new_full((*q.shape[:2], width), torch.nan)
    for a, b, n, table in sequences(batch):
        k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in keys_values(table, n))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k) * scale
        scores = scores.masked_fill(hidden_keys(b - a, n), -torch.inf)
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out


def gqa(p: Any, x: torch.Tensor, batch: Batch, kv: HiddenKV, scratch: torch.dtype) -> torch.Tensor:
    """Grouped-query attention, float32 `[T, D]`; `scratch` is the dtype in which K and V are remembered."""
    (h, g), d = p.heads, p.head_dim
    q, k, v = product(x, p.qkv, (h + 2 * g) * d).view(len(x), -1, d).split((h, g, g), 1)
    if p.enter.q_norm is not None:
        q, k = norm(q, p.enter.q_norm), norm(k, p.enter.k_norm)
    remember(kv, batch.slots, rotate(p.enter.rope, k, batch.positions).to(scratch), v.to(scratch))
    o = attend(rotate(p.enter.rope, q, batch.positions), batch, kv.read_raw, p.few.scale, p.few.kv.v_dim)
    return product(o.flatten(1), p.o, x.shape[1])


def mla(p: Any, x: torch.Tensor, batch: Batch, kv: HiddenKV, scratch: torch.dtype) -> torch.Tensor:
    """Latent attention in its expanded form for every step, float32 `[T, D]`."""
    d, c = p.dims, x
    if p.q_a is not None:
        rank = p.q_b.weight.shape[0]
        c = norm(product(x, p.q_a, rank), p.enter.q_a_norm)
    q_nope, q_rope = (
        product(c, p.q_b, d.heads * (d.nope + d.rope)).view(len(x), d.heads, -1).split((d.nope, d.rope), -1)
    )
    latent, k_rope = product(x, p.kv_a, d.latent + d.rope).split((d.latent, d.rope), -1)
    k_rope = rotate(p.rope, k_rope[:, None], batch.positions)[:, 0]
    remember(kv, batch.slots, torch.cat((norm(latent, p.enter.kv_a_norm), k_rope), -1).to(scratch))

    def keys_values(table: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        latent, k_rope = kv.read_raw(table, n)[0].float().split((d.latent, d.rope), -1)
        both = product(latent, p.expanded.kv_b, d.heads * (d.nope + d.value)).view(n, d.heads, -1)
        k, v = both.split((d.nope, d.value), -1)
        return torch.cat((k, k_rope[:, None].expand(n, d.heads, d.rope)), -1), v

    q = torch.cat((q_nope, rotate(p.rope, q_rope, batch.positions)), -1)
    return product(attend(q, batch, keys_values, p.expanded.scale, d.value).flatten(1), p.o, x.shape[1])


def mlp(p: Any, x: torch.Tensor) -> torch.Tensor:
    inner = p.down.weight.shape[0]
    gate, up = product(x, p.gate_up, 2 * inner).chunk(2, -1)
    return product(F.silu(gate) * up, p.down, x.shape[1])


def moe(p: Any, x: torch.Tensor) -> torch.Tensor:
    experts, inner = p.experts.down.shape[:2]
    weights, ids = MoERoute.__call__(p.route, product(x, p.router, experts))
    share = torch.zeros(len(x), experts).scatter_(1, ids, weights)
    gate, up = torch.einsum("td,edi->eti", x.float(), p.experts.gate_up.float())[..., : 2 * inner].chunk(2, -1)
    y = torch.einsum("eti,eid->etd", F.silu(gate) * up, p.experts.down.float())[..., : x.shape[1]]
    y = torch.einsum("etd,te->td", y, share)
    return y if p.shared is None else y + mlp(p.shared, x)


@device_code
def gqa_block(p, x, batch, kv):
    return gqa(p, x, batch, kv, x.dtype).to(x.dtype)


@device_code
def mla_block(p, x, batch, kv):
    return mla(p, x, batch, kv, x.dtype).to(x.dtype)


@device_code
def decoder_layer(p, x, residual, batch, kv):
    s = x.float() if residual is None else x.float() + residual.float()
    attention = gqa if hasattr(p.attn, "qkv") else mla
    s = s + attention(p.attn, norm(s, p.attn_norm.norm), batch, kv, x.dtype)
    h = norm(s, p.mlp_norm.norm)
    y = moe(p.mlp, h) if hasattr(p.mlp, "experts") else mlp(p.mlp, h)
    return y.to(x.dtype), s.to(x.dtype)


@device_code
def gated_mlp(p, x):
    return mlp(p, x).to(x.dtype)


@device_code
def mixture(p, x):
    return moe(p, x).to(x.dtype)


GQA_PACKS = {"qkv.weight": TRANSPOSED, "o.weight": BOTH}
MLA_PACKS = {
    **{f"{name}.weight": BOTH for name in ("q_a", "q_b", "kv_a", "o")},
    "expanded.kv_b.weight": TRANSPOSED,
    "absorbed.kv_b": TRANSPOSED,  # unused, but two packings of one weight would be a second copy
}
MLP_PACKS = {"gate_up.weight": BOTH, "down.weight": TRANSPOSED}
MOE_PACKS = {
    "router.weight": BOTH,
    "experts.gate_up": BOTH,
    "experts.down": BOTH,
    **{f"shared.{path}": packing for path, packing in MLP_PACKS.items()},
}
ROUTING = ("moe_route.least_sum", "moe_route.jitter", "moe_route.sum_eps")
ONE_RANK = ("one rank", lambda op: op.reduce is None)
ALL_HERE = ("every expert on this rank", lambda op: op.here is None)
NO_WINDOW = ("no window", lambda op: all(r.window is None for r in op.kv_requests()))


def _below(prefix: str, packs: dict[str, Packing]) -> dict[str, Packing]:
    return {f"{prefix}.{path}": packing for path, packing in packs.items()}


LAYER_PACKS = {
    **_below("attn", GQA_PACKS),
    **_below("attn", MLA_PACKS),
    **_below("mlp", MLP_PACKS),
    **_below("mlp", MOE_PACKS),
}

NORMS = [
    Kernel("rms_norm", "mock", rms_norm, rank=RANK, packs={"weight": PADDED}, batch_invariant=True),
    Kernel("add_rms_norm", "mock", add_rms_norm, rank=RANK, packs={"norm.weight": PADDED}, batch_invariant=True),
]
BLOCKS = [
    Kernel(
        "gqa_block", "mock", gqa_block, When(kv_layouts=(HEADS_FIRST,), needs=(ONE_RANK, NO_WINDOW)), RANK, GQA_PACKS
    ),
    Kernel("mla_block", "mock", mla_block, When(kv_layouts=(LATENT,), needs=(ONE_RANK,)), RANK, MLA_PACKS),
]
LAYER = Kernel(
    "decoder_layer",
    "mock",
    decoder_layer,
    When(kv_layouts=(HEADS_FIRST, LATENT), extensions=ROUTING),
    RANK,
    LAYER_PACKS,
)
DECODE_LAYER = replace(LAYER, when=replace(LAYER.when, step_kinds=("decode",)))
# What shares the layer's packings in mixed steps; without them the layer would keep every MLP twice.
MLPS = [
    Kernel("gated_mlp", "mock", gated_mlp, When(needs=(ONE_RANK,)), RANK, MLP_PACKS),
    Kernel("moe", "mock", mixture, When(needs=(ONE_RANK, ALL_HERE), extensions=ROUTING), RANK, MOE_PACKS),
]
