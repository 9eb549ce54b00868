#!/usr/bin/env python3
"""Where a decoding step on the cpu backend spends its time: the parts of the native layers, and what lies around them.

    python benchmarks/cpu/phases.py --shape small                                       # a minute
    python benchmarks/cpu/phases.py --shape qwen3-0.6b --ours int8 --folder models

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
from inferplane_cpu.native import library


class Parts:
    """Microseconds of a step's parts, step by step."""

    def __init__(self, model):
        self.model, self.now, self.steps = model, {}, []
        self.names = library().ip_phases(None).decode().split()
        self.ns = (ctypes.c_int64 * len(self.names))()
        for name in ("embed", "norm", "head"):
            setattr(model, name, self.timed(name, getattr(model, name)))
        chain = getattr(model.layers, "chain", None)
        if chain is not None:
            model.layers.chain = self.timed("layers", chain)
        else:
            model.layers = tuple(self.timed("layers", layer) for layer in model.layers)

    def timed(self, name, call):
        def run(*args):
            start = time.perf_counter()
            result = call(*args)
            self.now[name] = self.now.get(name, 0.0) + (time.perf_counter() - start) * 1e6
            return result

        return run

    def step(self, engine_step):
        """One step of the engine, kept if it made one token."""
        self.now = {}
        ctypes.memset(self.ns, 0, ctypes.sizeof(self.ns))
        library().ip_phases(self.ns)
        start = time.perf_counter()
        result = engine_step()
        whole = (time.perf_counter() - start) * 1e6
        library().ip_phases(None)
        native = {f"  {name}": ns / 1e3 for name, ns in zip(self.names, self.ns, strict=True)}
        known = sum(self.now.values())
        inside = {"  around native": self.now.get("layers", 0.0) - sum(native.values())}
        self.steps.append({"step": whole, **self.now, **native, **inside, "rest": whole - known})
        return result

    def medians(self):
        return {name: statistics.median(s[name] for s in self.steps) for name in self.steps[-1]}


def measure(args, precision, folder, probe):
    """Medians of the parts of a step, and the roof's microseconds."""
    scheme = None if precision == "bf16" else f"weight_only_{precision}"
    llm = LLM(folder, device="cpu", dtype="bfloat16", max_model_len=4096, max_batch=1, quantization=scheme)
    params = SamplingParams(max_tokens=args.tokens + 1, temperature=0, ignore_eos=True)
    ids = torch.randint(3, 30000, (args.context,), generator=torch.Generator().manual_seed(0)).tolist()
    llm.generate([ids], params)
    engine = llm.engine
    engine_step = engine.step
    parts = Parts(engine.runner.steps["decode"].__self__)
    engine.step = lambda: parts.step(engine_step)
    before = probe()
    llm.generate([[*ids[1:], 5]], params)
    after = probe()
    parts.steps = parts.steps[1:]
    llm.close()
    bandwidth = (before + after) / 2
    return parts.medians(), decode_bytes(args.shape, precision) / bandwidth / 1e3, bandwidth


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "small")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--ours", nargs="*", default=list(BITS), choices=BITS)
    args = parser.parse_args()
    with checkpoint(args) as folder:
        probe = Probe()
        for precision in args.ours:
            medians, roof, bandwidth = measure(args, precision, folder, probe)
            print(f"{args.shape} {precision}, {bandwidth:.1f} GB/s, roof {roof:.0f} us, {roof / medians['step']:.2f}")
            for name, us in medians.items():
                print(f"  {name:16} {us:9.0f}")


if __name__ == "__main__":
    main()
