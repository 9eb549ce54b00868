"""Calls of kernels at the sizes of real models, by name. Tensors are small and empty: nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from inferplane.kernels.triton import Tiles
from inferplane.ops import MLADims
from inferplane.plugin import ActivationQuant, KVRequest, paged_layout
from inferplane.types.batch import Query, make_batch

BLOCK_TOKENS = 64
BLOCKS = 130
V3 = MLADims(16, 128, 64, 128, 512)

Call = Callable[[Tiles], Any]
CALLS: dict[str, Call] = {}


def specimen(name: str) -> Callable[[Call], Call]:
    def add(call: Call) -> Call:
        CALLS[name] = call
        return call

    return add


def step(new: int, before: int) -> Any:
    blocks = list(range(-(-(new + before) // BLOCK_TOKENS)))
    return make_batch([Query([0] * new, before, blocks)] * 2, block_tokens=BLOCK_TOKENS, device="cpu")


def cache(request: KVRequest, kind: str = "auto", dtype: torch.dtype = torch.bfloat16) -> Any:
    layout = paged_layout(BLOCK_TOKENS, kind, power_of_two=kind == "fp8")
    return layout.build(request, BLOCKS, dtype, torch.device("cpu"))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


@specimen("rms_norm")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import rms_norm_quantize

    rms_norm_quantize(empty(4, 4096), empty(4096), 1e-6)


@specimen("add_rms_norm")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import rms_norm_quantize

    rms_norm_quantize(empty(4, 4096), empty(4096), 1e-6, empty(4, 4096))


@specimen("add_rms_norm_fp8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import rms_norm_quantize

    rms_norm_quantize(empty(4, 4096), empty(4096), 1e-6, empty(4, 4096), "fp8", keep=True)


@specimen("add_rms_norm_fp8_offset")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import rms_norm_quantize

    rms_norm_quantize(empty(4, 4096), empty(4096), 1e-6, empty(4, 4096), "fp8", keep=True, offset=1.0)


@specimen("silu_mul")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation_mul_quantize

    activation_mul_quantize(empty(4, 2 * 4096))


@specimen("silu_mul_fp8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation_mul_quantize

    activation_mul_quantize(empty(4, 2 * 4096), "fp8")


@specimen("silu_mul_int8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation_mul_quantize

    activation_mul_quantize(empty(4, 2 * 14336), "int8", 0)


@specimen("gelu_mul")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation_mul_quantize

    activation_mul_quantize(empty(4, 2 * 4096), function="gelu")


@specimen("gelu_tanh_mul_int8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation_mul_quantize

    activation_mul_quantize(empty(4, 2 * 14336), "int8", 0, function="gelu_tanh")


@specimen("relu2")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation

    activation(SimpleNamespace(function="relu2", prepared=tiles), empty(4, 4096))


@specimen("quantize_int8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import quantize_rows

    quantize_rows(empty(4, 14336), "int8", 0)


@specimen("quantize_fp8")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import quantize_rows

    quantize_rows(empty(4, 4096), "fp8", 128)


@specimen("rope")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.kv_write import rope

    table = empty(64, 2, 64, dtype=torch.float32)
    rope(SimpleNamespace(table=table, interleaved=False), empty(4, 32, 128), torch.zeros(4, dtype=torch.int64))


@specimen("norm_rope_write")
def _(tiles: Tiles) -> None:
    _enter("auto")


@specimen("norm_rope_write_offset")
def _(tiles: Tiles) -> None:
    _enter("auto", offset=1.0)


@specimen("norm_rope_write_fp8")
def _(tiles: Tiles) -> None:
    _enter("fp8")


def _enter(kind: str, ahead: bool = False, offset: float = 0.0) -> None:
    from inferplane.kernels.triton.norm_rope_write import norm_rope_write

    rope = SimpleNamespace(table=empty(64, 2, 64, dtype=torch.float32), interleaved=False)
    norm = SimpleNamespace(weight=empty(128), eps=1e-6, offset=offset)
    q, k, v = empty(2, 48, 128).split((32, 8, 8), 1)
    op = SimpleNamespace(rope=rope, q_norm=norm, k_norm=norm, prepared=Tiles(ahead=ahead))
    norm_rope_write(op, q, k, v, step(1, 8), cache(GQA, kind))


@specimen("mla_norm_rope_write")
def _(tiles: Tiles) -> None:
    _enter_latent("auto")


@specimen("mla_norm_rope_write_fp8")
def _(tiles: Tiles) -> None:
    _enter_latent("fp8", "fp8")


def _enter_latent(kind: str, format: str = "", ahead: bool = False) -> None:
    from inferplane.kernels.triton.norm_rope_write import mla_norm_rope_write

    rope = SimpleNamespace(table=empty(64, 2, 32, dtype=torch.float32), interleaved=True)
    norms = {f"{x}_norm": SimpleNamespace(weight=empty(n), eps=1e-6) for x, n in (("q_a", 1536), ("kv_a", 512))}
    prepared = Tiles(ahead=ahead)
    quant = ActivationQuant(format, 128) if format else None
    op = SimpleNamespace(rope=rope, dims=V3, output_quant=quant, prepared=prepared, **norms)
    mla_norm_rope_write(op, empty(2, 1536), empty(2, 576), step(1, 8), cache(V3.request, kind))


@specimen("sample")
def _(tiles: Tiles) -> None:
    _sample(cut=False)


@specimen("sample_cut")
def _(tiles: Tiles) -> None:
    _sample(cut=True)


def _sample(*, cut: bool) -> None:
    from inferplane.kernels.triton.sampling import sample

    number = empty(2, dtype=torch.float32)
    cuts = (empty(2, dtype=torch.int64), number, number) if cut else (None, None, None)
    sample(SimpleNamespace(), empty(2, 4096, dtype=torch.float32), number, *cuts, number)


@specimen("causal_conv1d")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.recurrent.conv import causal_conv1d

    op = SimpleNamespace(weight=empty(8192, 4), bias=None, silu=True)
    causal_conv1d(op, empty(2, 8192), step(1, 8), empty(2, 8192, 3))


@specimen("gated_delta_rule")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.recurrent.delta_rule import gated_delta_rule

    op = SimpleNamespace(heads=(16, 32), dims=(128, 128))
    gates = empty(2, 32, dtype=torch.float32), empty(2, 32, dtype=torch.float32)
    rows = empty(2, 16, 128), empty(2, 16, 128), empty(2, 32, 128)
    gated_delta_rule(op, *rows, *gates, step(1, 8), empty(2, 32, 128, 128, dtype=torch.float32))


@specimen("selective_scan")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.recurrent.scan import selective_scan

    heads = {name: empty(64, dtype=torch.float32) for name in ("a_log", "dt_bias", "skip")}
    op = SimpleNamespace(groups=1, head_dim=64, state_size=128, dt_limits=(0.0, math.inf), **heads)
    rows = empty(2, 64, 64), empty(2, 64), empty(2, 1, 128), empty(2, 1, 128)
    selective_scan(op, *rows, step(1, 8), empty(2, 64, 64, 128, dtype=torch.float32))


@specimen("gated_rms_norm")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.recurrent.rows import gated_rms_norm

    op = SimpleNamespace(weight=empty(128), eps=1e-6, groups=1, gate_first=False)
    gated_rms_norm(op, empty(2, 32, 128), empty(2, 32, 128))


@specimen("delta_rule_gates")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.recurrent.rows import delta_rule_gates

    op = SimpleNamespace(a_log=empty(32, dtype=torch.float32), dt_bias=empty(32, dtype=torch.float32))
    delta_rule_gates(op, empty(2, 32), empty(2, 32))


def _write(kind: str) -> None:
    from inferplane.kernels.triton.kv_write import kv_write

    kv_write(SimpleNamespace(), empty(2, 8, 128), empty(2, 8, 128), step(1, 8), cache(GQA, kind))


def _write_latent(kind: str) -> None:
    from inferplane.kernels.triton.kv_write import mla_kv_write

    mla_kv_write(SimpleNamespace(), empty(2, 512), empty(2, 64), step(1, 8), cache(V3.request, kind))


GQA = KVRequest("gqa", 8, 128, 128)
WINDOW = KVRequest("gqa", 8, 128, 128, window=4096)
GPT_OSS = KVRequest("gqa", 8, 64, 64, window=128)
GEMMA_2 = KVRequest("gqa", 8, 256, 256, window=4096)


def _attention(
    tiles: Tiles, queries: str, new: int, before: int, request: KVRequest, kind: str, heads: int = 32, **fields: Any
) -> None:
    from inferplane.kernels.triton.attention import attention

    fields = {"sinks": None, "softcap": None, **fields}
    op = SimpleNamespace(heads=heads, scale=1.0, kv=request, queries=queries, prepared=tiles, **fields)
    batch = step(new, before)
    attention(op, empty(batch.tokens, heads, request.dim), batch, cache(request, kind))


def _absorbed(tiles: Tiles, heads: int, kind: str) -> None:
    from inferplane.kernels.triton.mla import mla_absorbed

    dims = MLADims(heads, 128, 64, 128, 512)
    op = SimpleNamespace(kv_b=empty(heads * 256, 512), dims=dims, scale=1.0, kv=dims.request, prepared=tiles)
    batch = step(1, 8000)
    mla_absorbed(op, empty(batch.tokens, heads, 128), empty(batch.tokens, heads, 64), batch, cache(dims.request, kind))


def _expanded(tiles: Tiles) -> None:
    from inferplane.kernels.triton.mla import mla_expanded

    op = SimpleNamespace(
        kv_b=SimpleNamespace(weight=empty(16 * 256, 512)), dims=V3, scale=1.0, kv=V3.request, prepared=tiles
    )
    batch = step(100, 28)
    mla_expanded(op, empty(batch.tokens, 16, 128), empty(batch.tokens, 16, 64), batch, cache(V3.request))


for _kind in ("auto", "fp8", "int8"):
    _name = "" if _kind == "auto" else f"_{_kind}"
    CALLS[f"kv_write{_name}"] = lambda tiles, kind=_kind: _write(kind)
    CALLS[f"mla_kv_write{_name}"] = lambda tiles, kind=_kind: _write_latent(kind)
    CALLS[f"decode{_name}"] = lambda tiles, kind=_kind: _attention(tiles, "few", 1, 8000, GQA, kind)
    CALLS[f"mla_decode{_name}"] = lambda tiles, kind=_kind: _absorbed(tiles, 16, kind)
CALLS["decode_window"] = lambda tiles: _attention(tiles, "few", 1, 8000, WINDOW, "auto")
CALLS["prefill"] = lambda tiles: _attention(tiles, "many", 300, 28, GQA, "auto")
CALLS["prefill_fp8"] = lambda tiles: _attention(tiles, "many", 300, 28, GQA, "fp8")
CALLS["prefill_window"] = lambda tiles: _attention(tiles, "many", 300, 28, WINDOW, "auto")
for _name, _few in (("decode", True), ("prefill", False)):
    _step = ("few", 1, 8000) if _few else ("many", 300, 28)
    CALLS[f"{_name}_sinks"] = lambda tiles, at=_step: _attention(tiles, *at, GPT_OSS, "auto", 64, sinks=empty(64))
    CALLS[f"{_name}_softcap"] = lambda tiles, at=_step: _attention(tiles, *at, GEMMA_2, "auto", 16, softcap=50.0)
CALLS["mla_prefill"] = _expanded


def _hopper(heads: int, new: int, kind: str = "auto") -> None:
    from inferplane_cuda.kernels.hopper.mla_launch import mla_absorbed

    dims = MLADims(heads, 128, 64, 128, 512)
    op = SimpleNamespace(kv_b=empty(heads * 256, 512), dims=dims, scale=1.0, kv=dims.request)
    batch = step(new, 8000)
    mla_absorbed(op, empty(batch.tokens, heads, 128), empty(batch.tokens, heads, 64), batch, cache(dims.request, kind))


CALLS["hopper_mla_16_heads"] = lambda tiles: _hopper(16, 4)
CALLS["hopper_mla_128_heads"] = lambda tiles: _hopper(128, 2)
CALLS["hopper_mla_fp8_16_heads"] = lambda tiles: _hopper(16, 4, "fp8")
CALLS["hopper_mla_int8_16_heads"] = lambda tiles: _hopper(16, 4, "int8")


def _hopper_prompts(latent: bool) -> None:
    from inferplane_cuda.kernels.hopper.prefill_launch import attention, mla_expanded

    batch = step(300, 28)
    if latent:
        op = SimpleNamespace(kv_b=SimpleNamespace(weight=empty(16 * 256, 512)), dims=V3, scale=1.0, kv=V3.request)
        mla_expanded(op, empty(batch.tokens, 16, 128), empty(batch.tokens, 16, 64), batch, cache(V3.request))
    else:
        op = SimpleNamespace(heads=32, scale=1.0, kv=GQA, queries="many")
        attention(op, empty(batch.tokens, 32, 128), batch, cache(GQA))


CALLS["hopper_prefill_128"] = lambda tiles: _hopper_prompts(False)
CALLS["hopper_prefill_192"] = lambda tiles: _hopper_prompts(True)


@specimen("mla_prefill_8bit")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.mla_8bit import mla_expanded

    op = SimpleNamespace(kv_b=SimpleNamespace(weight=empty(16 * 256, 512)), dims=V3, scale=1.0, prepared=tiles)
    batch = step(100, 28)
    mla_expanded(op, empty(batch.tokens, 16, 128), empty(batch.tokens, 16, 64), batch, cache(V3.request))


def _hopper_fp8(heads: int, new: int) -> None:
    from inferplane_cuda.kernels.hopper.mla_launch import mla_absorbed_fp8
    from inferplane_cuda.kvcache import token_scaled_layout

    dims = MLADims(heads, 128, 64, 128, 512)
    op = SimpleNamespace(kv_b=empty(heads * 256, 512), dims=dims, scale=1.0, kv=dims.request)
    batch, kv = step(new, 8000), token_scaled_layout().build(dims.request, BLOCKS, torch.bfloat16, torch.device("cpu"))
    mla_absorbed_fp8(op, empty(batch.tokens, heads, 128), empty(batch.tokens, heads, 64), batch, kv)


CALLS["hopper_mla_fp8_products"] = lambda tiles: _hopper_fp8(128, 2)


@specimen("add_rms_norm_fp8_ahead")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.rowwise import rms_norm_quantize

    rms_norm_quantize(empty(4, 4096), empty(4096), 1e-6, empty(4, 4096), "fp8", keep=True, ahead=True)


@specimen("silu_mul_fp8_ahead")
def _(tiles: Tiles) -> None:
    from inferplane.kernels.triton.activations import activation_mul_quantize

    activation_mul_quantize(empty(4, 2 * 4096), "fp8", ahead=True)


@specimen("norm_rope_write_ahead")
def _(tiles: Tiles) -> None:
    _enter("auto", ahead=True)


@specimen("mla_norm_rope_write_ahead")
def _(tiles: Tiles) -> None:
    _enter_latent("auto", "fp8", ahead=True)
