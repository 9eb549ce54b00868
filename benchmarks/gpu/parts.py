"""The parts of the check, each a function that returns rows: `python -m benchmarks.gpu.parts PART FILE`."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import cases, peers, products
from benchmarks.gpu import decode as steps
from benchmarks.gpu.measure import copies_for, roofs, timed
from benchmarks.shapes import SMALL, config

Row = dict[str, Any]


ROUNDS = 3


def correct(piece: str) -> Iterator[Row]:
    """Fresh inputs, lengths from 1 to 20,000, scattered blocks: every kernel that takes the ops of a piece, against the
    ops' bodies in float32.
    """
    seed = int(time.time())
    generator = torch.Generator().manual_seed(seed)
    yield {"seed": seed}
    for _ in range(ROUNDS):
        lens = torch.randint(1, 20_000, (6,), generator=generator).tolist()
        few = [(1 + n % 4, n) for n in [0, 1, 62, 63, 64, *lens]]
        many = [(9 + n % 300, n % 3000) for n in lens[:4]]
        for op in PIECES[piece]():
            yield from _judge(op, few if few_tokens(op) else many, generator)


PIECES: dict[str, Callable[[], list[Any]]] = {
    "latent_16": lambda: [cases.absorbed(16)],
    "latent_128": lambda: [cases.absorbed(128)],
    "expanded": lambda: [cases.expanded(16)],
    "dense": lambda: [cases.attention(32, 8, 128, queries) for queries in ("few", "many")],
    "window": lambda: [cases.attention(32, 8, 128, queries, 1000) for queries in ("few", "many")],
}
"""What is tried for correctness: a process each, side by side, since most of the time goes into compiling."""


def few_tokens(op: Any) -> bool:
    return op.name == "mla_absorbed" or getattr(op, "queries", "many") == "few"


def _judge(op: Any, sequences: list[tuple[int, int]], generator: torch.Generator) -> Iterator[Row]:
    for kv_dtype in cases.kinds(op):
        batch, blocks = cases.step(sequences, generator)
        kv = cases.filled(op.kv_requests()[0], blocks, kv_dtype)
        q, weight = _queries(op, batch.tokens)
        want = cases.reference(op, q, batch, kv, weight)
        for kernel, ctx in cases.kernels(op, kv_dtype, few=few_tokens(op)):
            row: Row = {"op": op.name, "kernel": kernel.name, "kv": kv_dtype}
            try:
                with torch.inference_mode():
                    got = kernel.function()(cases.view(op, kernel, ctx, weight), *q, batch, kv).float()
                error = ((got - want).norm() / want.norm()).item()
                worst = ((got - want).abs().max() / want.abs().max()).item()
            except Exception as error:
                traceback.print_exc()
                yield {**row, "passed": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
                continue
            allowed = op.tolerance[torch.bfloat16] + kernel.extra_error
            yield {**row, "relative_l2": error, "worst": worst, "passed": worst <= allowed}


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


def mla() -> Iterator[Row]:
    """Latent attention alone (queries folded beforehand), and the whole op, on the shapes of the bars."""
    roof = roofs()
    yield {"roofs": roof}
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
                yield _timed(f"mla {label}", name, kv_dtype, made, nbytes, flops, floor)
            del calls
            torch.cuda.empty_cache()


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
            made.setdefault(f"{kernel.name} whole op", []).append(_call(op, kernel, ctx, weight, q, batch, kv))
        for name, call in peers.latent(op, q, weight, batch, kv).items():
            made.setdefault(name, []).append(call)
    return made


def _call(op: Any, kernel: Any, ctx: Any, weight: Any, q: Any, batch: Any, kv: Any) -> Callable[[], Any]:
    """A kernel on its inputs; one that cannot be linked says so when it is timed."""

    def make() -> Callable[[], Any]:
        function, view = kernel.function(), cases.view(op, kernel, ctx, weight)
        return lambda: function(view, *q, batch, kv)

    return peers.offered({"": make})[""]


def gqa() -> Iterator[Row]:
    """Paged attention of few tokens, 32 query heads on 8 KV heads of 128."""
    roof = roofs()
    yield {"roofs": roof}
    for label, lens in {"e 64 x 4k": [4096] * 64, "e 16 x 16k": [16384] * 16, "  1 x 8k": [8192]}.items():
        for kv_dtype in ("auto", "fp8", "int8"):
            op = cases.attention(32, 8, 128, "few")
            size = 2 if kv_dtype == "auto" else 1
            nbytes = sum(lens) * 8 * (256 * size + (0 if kv_dtype == "auto" else 8))
            yield from _attention_rows(f"gqa decode {label}", op, [(1, n - 1) for n in lens], kv_dtype, nbytes, roof)


def prefill() -> Iterator[Row]:
    """Whole prompts: head dim 128 over a paged cache, and 192/128 of latent attention with its expansion."""
    roof = roofs()
    yield {"roofs": roof}
    for label, sequences in {"e 4 x 4k": [(4096, 0)] * 4, "e 1 x 16k": [(16384, 0)]}.items():
        op = cases.attention(32, 8, 128, "many")
        yield from _attention_rows(f"prefill 128 {label}", op, sequences, "auto", 1 << 30, roof)
        yield from _attention_rows(f"prefill 192/128 {label}", cases.expanded(16), sequences, "auto", 1 << 30, roof)


def _attention_rows(label: str, op: Any, sequences: Any, kv_dtype: str, nbytes: float, roof: Any) -> Iterator[Row]:
    few, generator = sequences[0][0] <= 8, torch.Generator().manual_seed(1)
    calls: dict[str, list[Any]] = {}
    for _ in range(copies_for(nbytes)):
        batch, blocks = cases.step(sequences, generator)
        kv = cases.filled(op.kv_requests()[0], blocks, kv_dtype)
        q, weight = _queries(op, batch.tokens)
        for kernel, ctx in cases.kernels(op, kv_dtype, few=few):
            if kernel.provider.startswith("torch"):
                continue
            calls.setdefault(kernel.name, []).append(_call(op, kernel, ctx, weight, q, batch, kv))
        for name, call in peers.dense(op, sequences, few=few).items():
            calls.setdefault(name, []).append(call)
    pairs = sum(n * before + n * (n + 1) / 2 for n, before in sequences)
    widths = 256 if op.name == "attention" else 320
    flops = 2 * pairs * widths * (op.heads if op.name == "attention" else op.dims.heads)
    moved = nbytes if few else 0
    floor = max(moved / roof["copy_gbps"] / 1e3, flops / roof["bf16_tflops"] / 1e6)
    for name, made in calls.items():
        yield _timed(label, name, kv_dtype, made, moved, flops, floor)


def _timed(shape: str, name: str, kv: str, calls: list[Any], nbytes: float, flops: float, floor: float) -> Row:
    row: Row = {"shape": shape, "kernel": name, "kv": kv, "floor_us": round(floor, 2)}
    row["peer"] = ":" not in name
    try:
        with torch.inference_mode():
            us, launched = timed(calls)
    except Exception as error:
        traceback.print_exc()
        return {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    rates = {"gbps": round(nbytes / us / 1e3, 1), "tflops": round(flops / us / 1e6, 1)}
    return {**row, "us": round(us, 2), "launched": launched, **rates, "share_of_roof": round(floor / us, 3)}


def gemm() -> Iterator[Row]:
    """Dense products of quantized weights, few rows and many."""
    roof = roofs()
    yield {"roofs": roof}
    yield from products.gemm(_timed, copies_for, roof)


def experts() -> Iterator[Row]:
    """Products over experts, few rows each and many."""
    roof = roofs()
    yield {"roofs": roof}
    yield from products.experts(_timed, copies_for, roof)


def decode() -> Iterator[Row]:
    """Whole steps of the models that decoding is judged on."""
    roof = roofs()
    yield {"roofs": roof}
    yield from steps.decode(roof)


def drafting() -> Iterator[Row]:
    """Whole steps that verify drafts and draft again."""
    yield from steps.drafting()


LLAMA = config({**SMALL, "num_hidden_layers": 2}, 512)
LATENT: dict[str, Any] = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 16,
    "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
LATENT.pop("head_dim")
MTP = {"method": "mtp", "num_speculative_tokens": 3}
GLUON = {"mla_absorbed": "gluon"}
MODELS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "demo": ("demo", {}, False),
    "dense": (LLAMA, {"load_format": "dummy"}, True),
    "latent": (LATENT, {"load_format": "dummy"}, True),
    "latent, Gluon": (LATENT, {"load_format": "dummy", "ops": GLUON}, True),
    "latent, MTP": (
        {**LATENT, "num_nextn_predict_layers": 1},
        {"load_format": "dummy", "speculative_config": MTP},
        True,
    ),
    "demo, MTP": ("demo", {"speculative_config": MTP}, False),
}
"""By name: a model, options of `LLM`, and whether its decode steps must be recorded."""


def engine() -> Iterator[Row]:
    """Models through `LLM`, their decode steps replayed and eager: the same tokens, and how fast. Of those that draft,
    verification and drafts as one record and as two: the same tokens again.
    """
    for name, (model, options, recorded) in MODELS.items():
        try:
            yield from _replayed_and_eager(name, model, options, recorded)
        except Exception as error:
            traceback.print_exc()
            yield {"model": name, "passed": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}


def _replayed_and_eager(name: str, model: Any, options: dict[str, Any], recorded: bool) -> Iterator[Row]:
    from inferplane import LLM, SamplingParams

    tokens: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 90, (n,), generator=generator).tolist() for n in (5, 17, 40, 9)]
    replayed, once, drafts = 0, 0, "speculative_config" in options
    for way in ("eager", *(["apart"] if drafts else []), "replayed"):
        llm = LLM(model, device=cases.DEVICE, dtype="bfloat16", max_num_seqs=8, capture=way != "eager", **options)
        cycles = llm.engine.speculator.captured_steps if llm.engine.speculator is not None else None
        if cycles is not None and way == "apart":
            cycles.disabled_reason = "asked for"
        wanted = ((64, 0.0), (30, 0.8), (64, 0.0), (9, 0.0))
        params = [SamplingParams(max_tokens=n, temperature=t, seed=n, ignore_eos=True) for n, t in wanted]
        tokens[way] = [r.token_ids for r in llm.generate(prompts, params)]
        begun = time.perf_counter()
        llm.generate(prompts, params)
        decode, seconds = llm.runner.decode, time.perf_counter() - begun
        assert decode is not None, "the runner takes no decode steps"
        once = cycles.replayed if cycles is not None else 0
        replayed = decode.replayed + once
        row = {
            "model": name, "way": way, "seconds": round(seconds, 3), "replayed": decode.replayed,
            "eager": decode.eager, "off": decode.disabled_reason,
        }  # fmt: skip
        yield row if cycles is None else {**row, "cycles": once, "apart": dict(cycles.fallbacks)}
        llm.close()
    same = all(found == tokens["eager"] for found in tokens.values())
    yield {"model": name, "what": "replayed and eager steps give the same tokens", "passed": same}
    if recorded:
        yield {"model": name, "what": "decode steps were recorded and replayed", "passed": replayed > 0}
    if recorded and drafts:
        yield {"model": name, "what": "verification and drafts were one record", "passed": once > 0}


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    **{f.__name__: f for f in (engine, mla, gqa, prefill, gemm, experts, decode, drafting)},
    **{f"correct.{piece}": partial(correct, piece) for piece in PIECES},
}


def main(name: str, path: str) -> None:
    """Rows go to `path` with `.part` behind it as they come, and to `path` when all are there."""
    rows, target = [], Path(path)
    unfinished = target.with_name(target.name + ".part")
    for row in PARTS[name]():
        rows.append(row)
        unfinished.write_text(json.dumps(rows, indent=1))
    unfinished.replace(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
