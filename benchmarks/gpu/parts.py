"""The parts of the check, each a function that returns rows: `python -m benchmarks.gpu.parts PART FILE`."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import cases, peers
from benchmarks.gpu.measure import copies_for, microseconds, roofs

Row = dict[str, Any]


def correct() -> list[Row]:
    """Fresh inputs, lengths from 1 to 20,000, scattered blocks: every kernel against the op's body in float32."""
    generator = torch.Generator().manual_seed(int(time.time()))
    rows = []
    for _ in range(3):
        lens = torch.randint(1, 20_000, (6,), generator=generator).tolist()
        few = [(1 + n % 4, n) for n in [0, 1, 62, 63, 64, *lens]]
        many = [(9 + n % 300, n % 3000) for n in lens[:4]]
        for heads in (16, 128):
            rows += _judge(cases.absorbed(heads), few, generator)
        rows += _judge(cases.expanded(16), many, generator)
        for window in (None, 1000):
            rows += _judge(cases.attention(32, 8, 128, "few", window), few, generator)
            rows += _judge(cases.attention(32, 8, 128, "many", window), many, generator)
    return rows


def _judge(op: Any, sequences: list[tuple[int, int]], generator: torch.Generator) -> list[Row]:
    rows = []
    for kv_dtype in cases.kinds(op):
        batch, blocks = cases.step(sequences, generator)
        kv = cases.filled(op.kv_requests()[0], blocks, kv_dtype)
        q, weight = _queries(op, batch.tokens)
        want = cases.reference(op, q, batch, kv, weight)
        for kernel, ctx in cases.kernels(op, kv_dtype, few=sequences[0][0] <= 8):
            with torch.inference_mode():
                got = kernel.function()(cases.view(op, kernel, ctx, weight), *q, batch, kv).float()
            error = ((got - want).norm() / want.norm()).item()
            worst = ((got - want).abs().max() / want.abs().max()).item()
            rows.append({
                "op": op.name, "kernel": kernel.name, "kv": kv_dtype, "relative_l2": error, "worst": worst,
                "passed": worst <= op.tolerance[torch.bfloat16] + kernel.extra_error,
            })  # fmt: skip
    return rows


def _queries(op: Any, tokens: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=cases.DEVICE, dtype=cases.BF16)

    if op.name == "attention":
        return (draw(tokens, op.heads, op.kv.dim),), None
    heads = op.dims.heads
    return (draw(tokens, heads, 128), draw(tokens, heads, 64)), draw(heads * 256, 512) / 512**0.5


MLA_SHAPES = {
    # label: heads, query tokens, lengths
    "a 128 heads q1 128 x 8k": (128, 1, [8192] * 128),
    "a 128 heads q2 128 x 8k": (128, 2, [8192] * 128),
    "b 16 heads q1 128 x 4k": (16, 1, [4096] * 128),
    "b 16 heads q2 128 x 4k": (16, 2, [4096] * 128),
    "b 16 heads q4 128 x 4k": (16, 4, [4096] * 128),
    "b 16 heads q1 32 x 16k": (16, 1, [16384] * 32),
    "c 16 heads q1 128 x 1k": (16, 1, [1024] * 128),
    "c 16 heads q4 uneven": (16, 4, [4641, 45118, 1730, 1696]),
    "  16 heads q1 1 x 8k": (16, 1, [8192]),
    "  64 heads q1 128 x 4k": (64, 1, [4096] * 128),
}


def mla() -> list[Row]:
    """Latent attention alone (queries folded beforehand), and the whole op, on the shapes of the bars."""
    roof, rows = roofs(), []
    for label, (heads, new, lens) in MLA_SHAPES.items():
        for kv_dtype, token_bytes in (("auto", 1152), ("fp8", 612), (cases.LATENT_KV, 644)):
            op = cases.absorbed(heads)
            keys = sum(lens)
            nbytes = keys * token_bytes
            flops = 2 * heads * new * 1088 * keys
            rate = roof.get("fp8_tflops" if kv_dtype == cases.LATENT_KV else "", roof["bf16_tflops"])
            floor = max(nbytes / roof["copy_gbps"] / 1e3, flops / rate / 1e6)
            calls = _mla_calls(op, new, lens, kv_dtype, nbytes)
            for name, made in calls.items():
                rows.append(_timed(f"mla {label}", name, kv_dtype, made, nbytes, flops, floor))
            torch.cuda.empty_cache()
    return [{"roofs": roof}, *rows]


def _mla_calls(op: Any, new: int, lens: list[int], kv_dtype: str, nbytes: float) -> dict[str, list[Any]]:
    generator = torch.Generator().manual_seed(1)
    made: dict[str, list[Any]] = {}
    for _ in range(copies_for(nbytes)):
        batch, blocks = cases.step([(new, n - new) for n in lens], generator)
        kv = cases.filled(op.kv, blocks, kv_dtype)
        q, weight = _queries(op, batch.tokens)
        for kernel, ctx in cases.kernels(op, kv_dtype, few=True):
            if kernel.provider.startswith("torch"):
                continue  # reads lengths on the host, sequence by sequence: no decode kernel to compare with
            function, view = kernel.function(), cases.view(op, kernel, ctx, weight)
            made.setdefault(f"{kernel.name} whole op", []).append(
                lambda f=function, v=view, q=q, b=batch, kv=kv: f(v, *q, b, kv)
            )
        for name, call in peers.latent(op, q, weight, batch, kv).items():
            made.setdefault(name, []).append(call)
    return made


def gqa() -> list[Row]:
    """Paged attention of few tokens, 32 query heads on 8 KV heads of 128."""
    roof, rows = roofs(), []
    for label, lens in {"e 64 x 4k": [4096] * 64, "e 16 x 16k": [16384] * 16, "  1 x 8k": [8192]}.items():
        for kv_dtype in ("auto", "fp8", "int8"):
            op = cases.attention(32, 8, 128, "few")
            size = 2 if kv_dtype == "auto" else 1
            nbytes = sum(lens) * 8 * (256 * size + (0 if kv_dtype == "auto" else 8))
            rows += _attention_rows(f"gqa decode {label}", op, [(1, n - 1) for n in lens], kv_dtype, nbytes, roof)
    return [{"roofs": roof}, *rows]


def prefill() -> list[Row]:
    """Whole prompts: head dim 128 over a paged cache, and 192/128 of latent attention with its expansion."""
    roof, rows = roofs(), []
    for label, sequences in {"e 4 x 4k": [(4096, 0)] * 4, "e 1 x 16k": [(16384, 0)]}.items():
        op = cases.attention(32, 8, 128, "many")
        rows += _attention_rows(f"prefill 128 {label}", op, sequences, "auto", 1 << 30, roof)
        rows += _attention_rows(f"prefill 192/128 {label}", cases.expanded(16), sequences, "auto", 1 << 30, roof)
    return [{"roofs": roof}, *rows]


def _attention_rows(label: str, op: Any, sequences: Any, kv_dtype: str, nbytes: float, roof: Any) -> list[Row]:
    few, generator = sequences[0][0] <= 8, torch.Generator().manual_seed(1)
    calls: dict[str, list[Any]] = {}
    for _ in range(copies_for(nbytes)):
        batch, blocks = cases.step(sequences, generator)
        kv = cases.filled(op.kv_requests()[0], blocks, kv_dtype)
        q, weight = _queries(op, batch.tokens)
        for kernel, ctx in cases.kernels(op, kv_dtype, few=few):
            if kernel.provider.startswith("torch"):
                continue
            function, view = kernel.function(), cases.view(op, kernel, ctx, weight)
            calls.setdefault(kernel.name, []).append(lambda f=function, v=view, q=q, b=batch, kv=kv: f(v, *q, b, kv))
        for name, call in peers.dense(op, sequences, few=few).items():
            calls.setdefault(name, []).append(call)
    pairs = sum(n * before + n * (n + 1) / 2 for n, before in sequences)
    widths = 256 if op.name == "attention" else 320
    flops = 2 * pairs * widths * (op.heads if op.name == "attention" else op.dims.heads)
    moved = nbytes if few else 0
    floor = max(moved / roof["copy_gbps"] / 1e3, flops / roof["bf16_tflops"] / 1e6)
    return [_timed(label, name, kv_dtype, made, moved, flops, floor) for name, made in calls.items()]


def _timed(shape: str, name: str, kv: str, calls: list[Any], nbytes: float, flops: float, floor: float) -> Row:
    row: Row = {"shape": shape, "kernel": name, "kv": kv, "floor_us": round(floor, 2)}
    try:
        with torch.inference_mode():
            us = microseconds(calls)
    except Exception as error:
        traceback.print_exc()
        return {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    rates = {"gbps": round(nbytes / us / 1e3, 1), "tflops": round(flops / us / 1e6, 1)}
    return {**row, "us": round(us, 2), **rates, "share_of_roof": round(floor / us, 3)}


def engine() -> list[Row]:
    """The demo model through `LLM`, its decode steps replayed and eager: the same tokens, and how fast."""
    from inferplane import LLM, SamplingParams

    texts, rows = {}, []
    prompts = ["def f(", "class Stack:", "import ", "for i in range("]
    for capture in (False, True):
        llm = LLM("demo", device="cuda", dtype="bfloat16", max_batch=8, capture=capture)
        params = [
            SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((64, 0.0), (30, 0.8), (64, 0), (9, 0))
        ]
        texts[capture] = [r.token_ids for r in llm.generate(prompts, params)]
        begun = time.perf_counter()
        llm.generate(prompts, params)
        decode = llm.runner.decode
        rows.append({
            "capture": capture, "seconds": round(time.perf_counter() - begun, 3), "replayed": decode.replayed,
            "eager": decode.eager, "off": decode.off,
        })  # fmt: skip
        llm.close()
    rows.append({"passed": texts[True] == texts[False], "what": "replayed and eager steps give the same tokens"})
    return rows


PARTS = {f.__name__: f for f in (correct, engine, mla, gqa, prefill)}

if __name__ == "__main__":
    name, path = sys.argv[1:]
    Path(path).write_text(json.dumps(PARTS[name](), indent=1))
