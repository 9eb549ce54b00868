"""Whole decode steps under graphs: how long, by kernel, how long the GPU idles between kernels, beside transformers.

Weights are random. What a step must take at least is told twice: its bytes at the rate of a copy, and op by op, the
larger of bytes and operations at the roofs of the same run, summed up.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import cases
from benchmarks.shapes import FP8, REAL
from inferplane.types.batch import Query, make_batch

Row = dict[str, Any]
CONTEXT = 1024
"""Tokens of each sequence."""
STEPS = {
    "Llama-8B": 1,
    "Qwen3-8B": 1,
    "DeepSeek-V2-Lite": 1,
    "DeepSeek-V3, 4 layers": 64,
}
"""Sequences of each model's step."""
DRAFTING = (("DeepSeek-V3, 4 layers", 64, 1), ("DeepSeek-V3, 4 layers", 1, 3))
"""Models that get an MTP layer, sequences, and drafts of each; with FP8 weights, which leave room for the layer."""
TURNS = 12
"""Steps of the engine that are timed with drafts."""
FORMS: dict[str, dict[str, Any]] = {"bf16": {}, "FP8": FP8}
AHEAD = "INFERPLANE_CUDA_AHEAD"
REPLAYS = 20
MOST_KERNELS = 12
"""Kernels that are listed of a step, those that take longest."""


def decode(roof: dict[str, float]) -> Iterator[Row]:
    """Every model in every form, with and without launches ahead; then the peer, and how much longer it takes."""
    for name, sequences in STEPS.items():
        best: dict[str, float] = {}
        for form, more in FORMS.items():
            for ahead in (False, True):
                os.environ[AHEAD] = "1" if ahead else "0"
                label = f"{name}, {form}{', ahead' if ahead else ''}"
                for row in told(label, partial(ours, {**REAL[name], **more}, sequences, roof)):
                    best[form] = min(best.get(form, float("inf")), row.get("us", float("inf")))
                    yield row
        os.environ.pop(AHEAD, None)
        for row in told(f"{name}, transformers", partial(theirs, REAL[name], sequences)):
            yield {**row, "peer": True, "times": {form: round(row.get("us", 0.0) / us, 2) for form, us in best.items()}}


def drafting() -> Iterator[Row]:
    """Steps that verify drafts and draft again: as one record, and as records of their own with the host in between."""
    for name, sequences, drafts in DRAFTING:
        config = {**REAL[name], **FP8, "num_nextn_predict_layers": 1}
        yield from told(f"{name}, {sequences} x {drafts} drafts", partial(cycles, config, sequences, drafts))


def cycles(config: dict[str, Any], sequences: int, drafts: int) -> Iterator[Row]:
    """The engine's time of a step in both ways, drafts all taken, tokens compared; then one record by kernel."""
    from inferplane import LLM, SamplingParams

    settings = {
        "method": "mtp", "num_speculative_tokens": drafts, "accept_policy": "accept_all",
    }  # fmt: skip
    llm = LLM(
        config, device=cases.DEVICE, dtype="bfloat16", load_format="dummy", max_model_len=2 * CONTEXT,
        max_num_seqs=sequences, kv_cache_bytes=cache_bytes(config, sequences) * 2, max_num_batched_tokens=8 * CONTEXT,
        speculative_config=settings,
    )  # fmt: skip
    speculator = llm.engine.speculator
    assert speculator is not None and speculator.captured_steps is not None
    records, why = speculator.captured_steps, speculator.captured_steps.disabled_reason
    params = SamplingParams(max_tokens=2 * (TURNS + 2) * (1 + drafts), temperature=0, ignore_eos=True)
    tokens: dict[str, Any] = {}
    for way in ("apart", "one record"):
        records.disabled_reason = "asked for" if way == "apart" else why
        us: list[float] = []
        asked = [llm.engine.add([1 + i] * (CONTEXT // 2), params, frozenset()) for i in range(sequences)]
        while any(len(r.generated) <= 2 * (1 + drafts) for r in asked):  # prompts; records are made
            llm.engine.step()
        for _ in range(TURNS):
            begun = time.perf_counter()
            llm.engine.step()
            us.append((time.perf_counter() - begun) * 1e6)
        tokens[way] = [r.generated[:] for r in asked]
        for r in asked:
            llm.engine.end(r, "abort")
        yield {"mode": way, "sequences": sequences, "drafts": drafts, "step_us": round(statistics.median(us), 1)}
    yield {"what": "one record gives the tokens of two", "passed": tokens["apart"] == tokens["one record"]}
    if not records.replayed:
        yield {
            "passed": False,
            "error": f"verification and drafts were not one record: {records.disabled_reason or records.fallbacks}",
        }
        llm.close()
        return
    graph = next(iter(next(iter(records.buckets.values())).graphs.values()))
    with torch.inference_mode():
        us_alone, kernels = replay_us(graph.replay), profiled(graph.replay)
    yield {"sequences": sequences, "us": round(us_alone, 1), **summary(kernels)}
    yield from by_kernel(kernels)
    llm.close()


def told(label: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Rows under a label; what raises is a row, too."""
    try:
        for row in rows():
            yield {"step": label, **row}
    except Exception as error:
        traceback.print_exc()
        yield {"step": label, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    torch.cuda.empty_cache()


def ours(config: dict[str, Any], sequences: int, roof: dict[str, float]) -> Iterator[Row]:
    """One step, recorded and replayed: its time and floors, then its kernels."""
    from inferplane import LLM
    from inferplane.ops import Workload

    llm = LLM(
        config, device=cases.DEVICE, dtype="bfloat16", load_format="dummy", max_model_len=2 * CONTEXT,
        max_num_seqs=sequences, kv_cache_bytes=cache_bytes(config, sequences),
    )  # fmt: skip
    runner = llm.runner
    steps, cache = runner.decode, runner.cache
    assert steps is not None and cache is not None
    each = -(-CONTEXT // cache.block_tokens)
    queries = [Query([1], CONTEXT - 1, range(i * each, (i + 1) * each)) for i in range(sequences)]
    batch = make_batch(queries, block_tokens=cache.block_tokens, device=cases.DEVICE)
    with torch.inference_mode():
        runner.run(batch)
    if not steps.buckets:
        yield {"passed": False, "error": f"the step was not recorded: {steps.disabled_reason}"}
        llm.close()
        return
    graph = next(iter(steps.buckets.values())).graph
    us = replay_us(graph.replay)
    load = Workload(sequences, sequences * CONTEXT, sequences * CONTEXT, torch.bfloat16)
    whole = runner.model.cost(load)
    floor = whole.nbytes / roof["copy_gbps"] / 1e3
    parts = sum(
        max(c.nbytes / roof["copy_gbps"] / 1e3, c.flops / roof["bf16_tflops"] / 1e6)
        for c in (op.cost(load) for _, op, choice in runner.plan.sites("decode") if leaf(choice))
    )
    kernels = profiled(graph.replay)
    yield {
        "sequences": sequences, "us": round(us, 1), "floor_us": round(floor, 1), "share_of_floor": round(floor / us, 3),
        "sum_of_floors_us": round(parts, 1), **summary(kernels),
    }  # fmt: skip
    yield from by_kernel(kernels)
    llm.close()


def leaf(choice: Any) -> bool:
    """Whether a site's work is its own: a kernel, or a body without parts."""
    return choice.kernel is not None or not choice.children


def cache_bytes(config: dict[str, Any], sequences: int) -> int:
    """Room for the step's sequences, and as much again; K and V at the most."""
    heads, dim = config["num_key_value_heads"], config.get("head_dim", 128)
    entries = 576 if "kv_lora_rank" in config else 2 * heads * dim
    return 4 * CONTEXT * max(4, sequences) * config["num_hidden_layers"] * entries


def replay_us(replay: Callable[[], Any]) -> float:
    """Median time of a replay."""
    times = []
    replay()
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def profiled(replay: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """Name, begin and end in us of each kernel of one replay."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        replay()
        torch.cuda.synchronize()
    found = [(e.name, float(e.time_range.start), float(e.time_range.end)) for e in profile.events()]
    return sorted((k for k in found if k[2] > k[1]), key=lambda k: k[1])


def summary(kernels: Sequence[tuple[str, float, float]]) -> Row:
    """How many kernels, and the share of the step in which none ran."""
    if not kernels:
        return {"kernels": 0}
    busy, until = 0.0, kernels[0][1]
    for _, begin, end in kernels:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    span = until - kernels[0][1]
    return {"kernels": len(kernels), "busy_us": round(busy, 1), "idle": round(1 - busy / span, 4)}


def by_kernel(kernels: Sequence[tuple[str, float, float]]) -> Iterator[Row]:
    """Those that take longest, by name."""
    spent: dict[str, list[float]] = defaultdict(list)
    for name, begin, end in kernels:
        spent[name].append(end - begin)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))
    for name, times in longest[:MOST_KERNELS]:
        yield {"kernel": name[:80], "times": len(times), "kernel_us": round(sum(times), 1)}
    if len(longest) > MOST_KERNELS:
        rest = [t for _, times in longest[MOST_KERNELS:] for t in times]
        yield {"kernel": "all others", "times": len(rest), "kernel_us": round(sum(rest), 1)}


def theirs(config: dict[str, Any], sequences: int) -> Iterator[Row]:
    """transformers in bfloat16 over a static cache, eager and compiled with graphs."""
    import transformers

    settings = transformers.AutoConfig.for_model(**config)
    settings.dtype = torch.bfloat16
    with torch.device(cases.DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    ids = torch.ones(sequences, 1, dtype=torch.long, device=cases.DEVICE)
    cache = transformers.StaticCache(config=model.config, max_cache_len=CONTEXT + 8)
    place = torch.full((sequences, 1), CONTEXT, device=cases.DEVICE)

    def run(forward: Any) -> Any:
        return forward(input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True).logits

    for mode in ("eager", "compiled"):
        forward = model if mode == "eager" else torch.compile(model, mode="reduce-overhead", fullgraph=False)
        with torch.inference_mode():
            for _ in range(3):
                run(forward)
            yield {"mode": mode, "sequences": sequences, "us": round(eager_us(lambda f=forward: run(f)), 1)}


def eager_us(call: Callable[[], Any]) -> float:
    """Median time of a call on the host's clock, the GPU waited for."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)
