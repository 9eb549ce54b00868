#!/usr/bin/env python3
"""Where a step on the cpu backend spends its time: the parts of the native calls, and what lies around them.

    python benchmarks/cpu/phases.py --shape small                                       # a minute
    python benchmarks/cpu/phases.py --shape qwen3-0.6b --ours int8 --prefill 512 2048 --folder models

The checkpoint is that of `turns.py`. Times are medians over single steps, in microseconds a step. `roof` is what the
weights' bytes take at the probe's bandwidth, the mean of before and after. The calling thread counts, so a part
includes waiting for the other threads.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

import torch
from models import BITS, add_arguments, checkpoint, decode_bytes
from turns import Probe

from inferplane import LLM, SamplingParams
from inferplane.binding import view_of
from inferplane_cpu.huge_pages import wait_for_huge_pages
from inferplane_cpu.native import library

PROMPTS = 6
"""Of which the first warms up."""


class Parts:
    """Microseconds of a step's parts, step by step, within its block."""

    def __init__(self, model):
        self.model, self.now, self.steps = model, {}, []
        self.names = library().ip_time_phases(None).decode().split()
        self.ns = (ctypes.c_int64 * len(self.names))()

    def __enter__(self):
        self.before = dict(vars(self.model))
        for name in ("embed", "layers", "norm", "head"):
            setattr(self.model, name, self.timed(name, getattr(self.model, name)))
        return self

    def __exit__(self, *_):
        vars(self.model).update(self.before)

    def timed(self, name, call):
        def run(*args):
            start = time.perf_counter()
            result = call(*args)
            self.now[name] = self.now.get(name, 0.0) + (time.perf_counter() - start) * 1e6
            return result

        return run

    def step(self, engine_step):
        """One step of the engine."""
        self.now = {}
        ctypes.memset(self.ns, 0, ctypes.sizeof(self.ns))
        library().ip_time_phases(self.ns)
        start = time.perf_counter()
        result = engine_step()
        whole = (time.perf_counter() - start) * 1e6
        library().ip_time_phases(None)
        native = {f"  {name}": ns / 1e3 for name, ns in zip(self.names, self.ns, strict=True) if ns}
        known = sum(self.now.values())
        calls = self.now.get("call", self.now.get("layers", 0.0))
        inside = {"  around native": calls - sum(native.values())}
        self.steps.append({"step": whole, **self.now, **native, **inside, "rest": whole - known})
        return result


def decoding(args, llm):
    """Parts of a step that makes one token."""
    params = SamplingParams(max_tokens=args.tokens + 1, temperature=0, ignore_eos=True)
    parts = watched(llm, "decode", [prompt(args.context, seed) for seed in (0, 1)], params)
    return parts[1:]  # the first reads the prompt


def prefilling(tokens, llm):
    """Parts of a step that reads a prompt."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    return watched(llm, "mixed", [prompt(tokens, seed) for seed in range(PROMPTS)], params)


def prompt(tokens, seed):
    return torch.randint(3, 30000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def watched(llm, kind, prompts, params):
    """Parts of every step that all prompts but the first take, one prompt after the other."""
    llm.generate([prompts[0]], params)
    wait_for_huge_pages()
    engine = llm.engine
    engine_step = engine.step
    steps = engine.runner.steps
    bound = steps[kind]
    view = view_of(bound)
    with Parts(view if view.kernel is None else view_of(view.body)) as parts:
        if view.kernel is not None:  # one call, which counts its parts itself
            steps[kind] = parts.timed("call", bound)
        engine.step = lambda: parts.step(engine_step)
        for ids in prompts[1:]:
            llm.generate([ids], params)
    engine.step, steps[kind] = engine_step, bound
    return parts.steps


def medians(steps):
    return {name: statistics.median(s.get(name, 0.0) for s in steps) for name in steps[-1]}


def show(title, steps):
    found = medians(steps)
    print(title.format(**found))
    for name, us in found.items():
        print(f"  {name:16} {us:9.0f}  {us / found['step']:6.1%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "small")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, nargs="*", default=[], metavar="TOKENS", help="also prompts of so many")
    parser.add_argument("--ours", nargs="*", default=["bf16", "int8", "int4"], choices=BITS)
    args = parser.parse_args()
    with checkpoint(args) as folder:
        probe = Probe()
        for precision in args.ours:
            llm = LLM(
                folder,
                device="cpu",
                dtype="bfloat16",
                max_model_len=4096,
                max_num_seqs=1,
                max_num_batched_tokens=4096,
                enable_prefix_caching=False,
                quantization=None if precision == "bf16" else f"weight_only_{precision}",
            )
            before = probe()
            steps = decoding(args, llm)
            bandwidth = (before + probe()) / 2
            roof = decode_bytes(args.shape, precision) / bandwidth / 1e3
            share = roof / medians(steps)["step"]
            show(f"{args.shape} {precision}, {bandwidth:.1f} GB/s, roof {roof:.0f} us, {share:.2f}", steps)
            for tokens in args.prefill:
                show(f"{args.shape} {precision}, a prompt of {tokens} tokens", prefilling(tokens, llm))
            llm.close()


if __name__ == "__main__":
    main()
