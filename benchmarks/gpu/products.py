"""Matrix products of the check: FP8, INT8 and INT4 beside torch's own, dense and over experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import cases, peers
from inferplane.ops.formats import FORMATS, encode
from inferplane.types import Context, QTensor

Row = dict[str, Any]
Timed = Callable[..., Row]

DENSE = ((7168, 16384), (4096, 7168), (24576, 1536), (2112, 7168))
"""Outputs and columns of DeepSeek-V3's layers, of the bars."""
ROWS = (1, 16, 64, 4096)
EXPERTS = ((16, 32, 4096, 7168), (16, 32, 7168, 2048), (4, 8192, 4096, 7168), (8, 4096, 7168, 2048))
"""Experts, rows of each, outputs and columns."""
WEIGHT_ONLY = ("int4_group", "int8_group")
CODED = {"fp8_block": "fp8", "int4_group64": "fp8", "int8_row": "int8"}
"""Formats whose activations have 8 bits, and which: products in FP8 and in int8, which have one roof."""


def quantized(outputs: int, columns: int, format: str, *experts: int) -> QTensor:
    """A random weight; slice by slice, since encoding takes float32."""
    one = lambda: encode(torch.randn(outputs, columns, device=cases.DEVICE, dtype=cases.BF16), format)  # noqa: E731
    if not experts:
        return one()
    made = [one() for _ in range(experts[0])]
    return QTensor(
        torch.stack([q.data for q in made]),
        torch.stack([q.scale for q in made]),
        block=made[0].block,
        bits=made[0].bits,
    )


def tiles() -> Any:
    """Tile sizes for the GPU that is here."""
    from inferplane_cuda.backend import CudaBackend
    from inferplane_cuda.kernels import products

    return products(None, Context(cases.BF16, "decode", {}, CudaBackend().open().features))


def gemm(timed: Timed, copies: Callable[[float], int], roof: dict[str, float]) -> Iterator[Row]:
    """Every dense shape at every number of rows."""
    for outputs, columns in DENSE:
        for rows in ROWS:
            label = f"gemm {rows} x {outputs} x {columns}"
            for format in (*CODED, *(WEIGHT_ONLY if rows <= 64 else ())):
                nbytes = outputs * columns * FORMATS[format][1] / 8 + 2 * rows * (outputs + columns)
                calls: dict[str, list[Any]] = {}
                for _ in range(copies(nbytes)):
                    for name, call in dense_calls(rows, outputs, columns, format).items():
                        calls.setdefault(name, []).append(call)
                flops = 2 * rows * outputs * columns
                rate = roof.get("fp8_tflops", roof["bf16_tflops"]) if format in CODED else roof["bf16_tflops"]
                floor = max(nbytes / roof["copy_gbps"] / 1e3, flops / rate / 1e6)
                for name, made in calls.items():
                    yield timed(label, name, format, made, nbytes, flops, floor)
                del calls


def dense_calls(rows: int, outputs: int, columns: int, format: str) -> dict[str, Any]:
    """Ours with activations coded before ("core") and while timed, and torch's of the same numbers."""
    from inferplane.kernels.triton.linear import linear_fp8, linear_int8, quantize_rows_to_fp8
    from inferplane.kernels.triton.matmul import matmul
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    how, weight = tiles(), quantized(outputs, columns, format)
    x, packed = torch.randn(rows, columns, device=cases.DEVICE, dtype=cases.BF16), pack(weight)
    makers: dict[str, Callable[[], Any]] = {}
    if format not in CODED:
        return peers.offered({f"triton:linear {format}": lambda: lambda: matmul(make_plain_input(x), packed, how)})
    if format != "fp8_block":
        linear = linear_fp8 if CODED[format] == "fp8" else linear_int8
        op = SimpleNamespace(weight=packed, prepared=how, bias=None, out_dtype=None)
        of_codes = coded_rows(x, format)
        makers[f"triton:product core {format}"] = lambda: lambda: matmul(of_codes, packed, how)
        makers[f"triton_{CODED[format]}:{linear.__name__}"] = lambda: lambda: linear(op, x)
        return peers.offered(makers)
    codes = quantize_rows_to_fp8(x, 128)
    makers["triton:product core"] = lambda: lambda: matmul(codes, packed, how)
    makers["triton_fp8:linear_fp8"] = lambda: lambda: matmul(quantize_rows_to_fp8(x, 128), packed, how)
    if torch.cuda.get_device_capability() == (9, 0):
        from inferplane_cuda.kernels.hopper.linear import matmul_fp8_blocks

        makers["gluon:blocks core"] = lambda: lambda: matmul_fp8_blocks(codes, packed, how)
        makers["gluon_fp8:linear"] = lambda: lambda: matmul_fp8_blocks(quantize_rows_to_fp8(x, 128), packed, how)
    wide = weight.dequantize(cases.BF16)
    makers["torch bf16"] = lambda: lambda: F.linear(x, wide)
    makers["torch _scaled_mm by rows"] = lambda: scaled(x, wide)
    return peers.offered(makers)


def coded_rows(x: torch.Tensor, format: str) -> Any:
    """Activations as beside weights of this format: in FP8 by 128 columns, in int8 by rows."""
    from inferplane.kernels.triton.linear import make_int8_input, quantize_rows_to_fp8

    return quantize_rows_to_fp8(x, 128) if CODED[format] == "fp8" else make_int8_input(x, tiles())


def scaled(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    """torch's FP8 product with a scale a row on either side."""
    a, b = encode(x, "fp8_row"), encode(weight, "fp8_row")
    return lambda: torch._scaled_mm(
        a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale.t().contiguous(), out_dtype=cases.BF16
    )


def experts(timed: Timed, copies: Callable[[float], int], roof: dict[str, float]) -> Iterator[Row]:
    """Equal groups: the contiguous form with many rows, the masked one with few."""
    for count, each, outputs, columns in EXPERTS:
        for format in ("plain", *CODED, "int4_group"):
            bits = 16 if format == "plain" else FORMATS[format][1]
            nbytes = count * (outputs * columns * bits / 8 + 2 * each * (outputs + columns))
            calls: dict[str, list[Any]] = {}
            for _ in range(copies(nbytes)):
                for name, call in expert_calls(count, each, outputs, columns, format).items():
                    calls.setdefault(name, []).append(call)
            flops = 2 * count * each * outputs * columns
            rate = roof.get("fp8_tflops", roof["bf16_tflops"]) if format in CODED else roof["bf16_tflops"]
            floor = max(nbytes / roof["copy_gbps"] / 1e3, flops / rate / 1e6)
            for name, made in calls.items():
                yield timed(
                    f"experts {count} x {each} x {outputs} x {columns}", name, format, made, nbytes, flops, floor
                )
            del calls


def expert_calls(count: int, each: int, outputs: int, columns: int, format: str) -> dict[str, Any]:
    """Ours, with activations of 8 bits where the format has them, and torch's grouped product in bfloat16."""
    from inferplane.kernels.triton.experts.blocks import assign_masked_blocks
    from inferplane.kernels.triton.experts.moe import multiply_grouped
    from inferplane.kernels.triton.matmul_input import make_plain_input
    from inferplane.kernels.triton.weight_packing import pack

    how = tiles()
    tile = how.choose_for_experts(each)
    capacity = -(-each // tile.rows) * tile.rows
    x = torch.randn(count * capacity, columns, device=cases.DEVICE, dtype=cases.BF16)
    wide = torch.randn(count, outputs, columns, device=cases.DEVICE, dtype=cases.BF16) if format == "plain" else None
    packed = pack(wide if wide is not None else quantized(outputs, columns, format, count))
    rows = coded_rows(x, format) if format in CODED else make_plain_input(x)
    counts = torch.full((count,), each, device=cases.DEVICE, dtype=torch.int32)
    given = SimpleNamespace(pairs=count * capacity, fp8=how.fp8)

    def ours() -> Callable[[], Any]:
        dealing = assign_masked_blocks(counts, capacity, tile.rows)
        return lambda: multiply_grouped(rows, packed, dealing, tile, **vars(given))

    makers: dict[str, Callable[[], Any]] = {f"triton:grouped {format}": ours}
    if wide is not None:
        ends = counts.cumsum(0, dtype=torch.int32)
        side_by_side = x[: count * each]
        makers["torch _grouped_mm"] = lambda: lambda: torch._grouped_mm(side_by_side, wide.transpose(1, 2), offs=ends)
    return peers.offered(makers)
