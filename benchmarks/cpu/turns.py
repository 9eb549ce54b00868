#!/usr/bin/env python3
"""Decoding and prefill on the cpu backend beside its peers, in turns, with a bandwidth probe around each.

    python benchmarks/cpu/turns.py --shape small                           # inferplane and transformers, a minute
    python benchmarks/cpu/turns.py --shape qwen3-0.6b --turns 7 --json qwen.json
    python benchmarks/cpu/turns.py --llama-python PYTHON --gguf bf16=a.gguf int4=b.gguf
                                       # PYTHON has llama-cpp-python; the files hold a model of the same shape
    python benchmarks/cpu/turns.py --ours --transformers --llama-python PYTHON --file q4_k_m=a.gguf
                                       # llama.cpp and inferplane read the same file
    python benchmarks/cpu/turns.py --baseline ../before --turns 15 --transformers --prefill
                                       # an older checkout of Inferplane, its native kernels built in place

Every peer reads the same random-weight checkpoint in a process of its own; one works while the others wait. A turn asks
each of them once, in the order A B C ... and the next turn in the reverse order. Compare ratios within one run: on a
machine that others use seconds mean little. `bandwidth` is tokens a second times weight bytes over the mean of the
probes before and after.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from models import BITS, add_arguments, checkpoint, decode_bytes

from inferplane_cpu.native import library, native

PROBE_BYTES, HUGE = 2**30, 2**21


class Process:
    """A peer, started and asked through its standard streams."""

    def __init__(self, python, name, model, limits, checkout=None):
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        if name == "llama.cpp":  # as its users run it: bound, and spinning while it waits
            del environment["OMP_WAIT_POLICY"]
            environment |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
        peer = Path(__file__).with_name("peer.py")
        if checkout is not None:
            environment["PYTHONPATH"] = os.pathsep.join((f"{checkout}/core", f"{checkout}/backends/cpu"))
            environment["INFERPLANE_PLUGINS"] = "only,inferplane_cpu.plugin"
            peer = Path(checkout, "benchmarks/cpu/peer.py")
        command = [python, str(peer), name, str(model), *limits]
        self.name = name
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.wait_for("ready")

    def wait_for(self, word):
        for line in self.process.stdout:
            if line.startswith(word):
                return line.split()[1:]
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def ask(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return float(self.wait_for("seconds")[0])

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


class Probe:
    """Memory to read, on huge pages where there are any, which is faster."""

    def __init__(self):
        self._room = mmap.mmap(-1, PROBE_BYTES + HUGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._room.madvise(mmap.MADV_HUGEPAGE)
        self._room[:] = os.urandom(HUGE) * (len(self._room) // HUGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._begin = -(-begin // HUGE) * HUGE

    def __call__(self, clock=time.perf_counter):
        """Read bandwidth of all threads in GB/s by this clock, the best of three."""
        best = float("inf")
        for _ in range(3):
            start = clock()
            library().ip_read_memory(self._begin, PROBE_BYTES)
            best = min(best, clock() - start)
        return PROBE_BYTES / best / 1e9


def start(args, folder):
    most = max([context + args.tokens + 1 for context, _ in args.decode] + [n + 1 for n in args.prefill])
    limits = (str(most), str(max([batch for _, batch in args.decode], default=1)), args.kv_dtype)
    names = [f"inferplane:{p}" for p in args.ours] + [f"transformers:{a}" for a in args.transformers]
    peers = [Process(sys.executable, name, folder, limits) for name in names]
    if args.baseline:
        for precision in args.ours:
            peers.append(Process(sys.executable, f"inferplane:{precision}", folder, limits, args.baseline.resolve()))
            peers[-1].name = f"baseline:{precision}"
    for name, file in args.file:
        peers.append(Process(sys.executable, "inferplane:file", file, limits))
        peers[-1].name = f"inferplane:{name}"
        peers.append(Process(args.llama_python, "llama.cpp", file, limits))
        peers[-1].name = f"llama.cpp:{name}"
    for precision, _, file in (word.partition("=") for word in args.gguf):
        peers.append(Process(args.llama_python, "llama.cpp", file, limits))
        peers[-1].name = f"llama.cpp:{precision}"
    for precision, _, model in (word.partition("=") for word in args.openvino):
        peers.append(Process(args.openvino_python, "openvino", model, limits))
        peers[-1].name = f"openvino:{precision}"
    return peers


def measure(args, peers, probe):
    """`{test: {peer: [(seconds, probe before, probe after), ...]}}`."""
    tests = [f"decode {context} {args.tokens} {batch}" for context, batch in args.decode]
    tests += [f"prefill {n}" for n in args.prefill]
    found = {test: {p.name: [] for p in peers} for test in tests}
    for turn in range(args.turns + 1):  # the first warms up
        for test in tests:
            for peer in peers if turn % 2 else peers[::-1]:
                before = probe()
                seconds = peer.ask(test)
                if turn:
                    found[test][peer.name].append((seconds, before, probe()))
        print(f"turn {turn} of {args.turns}", file=sys.stderr, flush=True)
    return found


def summary(shape, test, runs, beside):
    """Medians of one peer's turns, and of the ratios to `inferplane` of the same precision, turn by turn."""
    seconds = [s for s, _, _ in runs]
    verb, *numbers = test.split()
    tokens = int(numbers[-1])  # sequences of a step, or tokens of a prompt
    out = {
        "tokens_per_s": tokens / statistics.median(seconds),
        "spread": [tokens / max(seconds), tokens / min(seconds)],
    }
    if verb == "decode" and tokens == 1:
        nbytes = beside[2] or decode_bytes(shape, beside[1])
        out["bandwidth"] = statistics.median(nbytes / s / 1e9 / ((a + b) / 2) for s, a, b in runs)
    if beside[0]:
        ratios = [theirs / ours for (ours, _, _), (theirs, _, _) in zip(beside[0], runs, strict=True)]
        out["inferplane_is_faster_by"] = statistics.median(ratios)
        out["at_least"], out["interval_95"] = bounds(ratios)
        out["ratios"] = sorted(ratios)
    probes = [(a + b) / 2 for _, a, b in runs]
    out["probe_gb_s"] = statistics.median(probes)
    out["turns"] = [{"tokens_per_s": tokens / s, "probe_gb_s": probe} for s, probe in zip(seconds, probes, strict=True)]
    return out


def bounds(ratios):
    """The lower 95 % bound of the mean ratio and its two-sided interval, from 10,000 draws of turns (bootstrap)."""
    draw = random.Random(0)
    logs = [math.log(r) for r in ratios]
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(10_000))
    return math.exp(means[500]), [math.exp(means[250]), math.exp(means[9749])]


def named_file(text):
    """`NAME=FILE`."""
    name, _, file = text.partition("=")
    return name, Path(file)


def context_and_batch(text):
    """`128x8`: 128 tokens of context, 8 sequences."""
    context, _, batch = text.partition("x")
    return int(context), int(batch or 1)


def processor():
    """As Linux tells it: vendor, family, model. A virtual machine often hides the name."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    first = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in first.items()}
    names = ("vendor_id", "cpu family", "model")
    return " ".join(f"{name.removeprefix('cpu ').removesuffix('_id')} {found.get(name, '?')}" for name in names)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "small", turns=7)
    parser.add_argument("--tokens", type=int, default=16, help="tokens decoded a turn")
    parser.add_argument(
        "--decode", type=context_and_batch, nargs="*", default=[(128, 1)], metavar="CONTEXT[xSEQUENCES]"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--transformers", nargs="*", default=["sdpa"], choices=("eager", "sdpa", "compiled"))
    parser.add_argument("--llama-python", default=sys.executable, help="a Python with llama-cpp-python")
    parser.add_argument(
        "--gguf", nargs="*", default=[], metavar="PRECISION=FILE", help="bf16, int8 or int4, and a model"
    )
    parser.add_argument(
        "--file", type=named_file, nargs="*", default=[], metavar="NAME=FILE", help="a .gguf that both sides read"
    )
    parser.add_argument("--openvino-python", default=sys.executable, help="a Python with openvino")
    parser.add_argument("--openvino", nargs="*", default=[], metavar="PRECISION=FOLDER", help="exported models")
    parser.add_argument("--kv-dtype", default="auto", help="of ours; OpenVINO's is uint8 beside coded weights")
    parser.add_argument("--baseline", type=Path, metavar="FOLDER", help="an older checkout of Inferplane")
    parser.add_argument("--ours", nargs="*", default=["bf16", "int8", "int4"], choices=BITS, help="precisions of ours")
    args = parser.parse_args()
    with checkpoint(args) as folder:
        probe = Probe()
        peers = start(args, folder)
        load = os.getloadavg()
        found = measure(args, peers, probe)
        for peer in peers:
            peer.close()
    sizes = {name: file.stat().st_size for name, file in args.file}  # weights, all but a few hundredths
    results = {
        test: {
            name: summary(args.shape, test, runs, (by_peer.get(f"inferplane:{form}"), form, sizes.get(form)))
            for name, runs in by_peer.items()
            if (form := of if (of := name.partition(":")[2]) in BITS or of in sizes else "bf16")
        }
        for test, by_peer in found.items()
    }
    report = {
        "shape": args.file[0][1].stem if args.file else args.shape,
        "machine": platform.processor() or platform.machine(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "native": native().reason,
        "load_before_and_after": [load, os.getloadavg()],
        "turns": args.turns,
        "kv_dtype": args.kv_dtype,
        "results": results,
    }
    for test, by_peer in results.items():
        for name, r in by_peer.items():
            share = f"{r['bandwidth']:.2f} of bandwidth" if "bandwidth" in r else ""
            low, high = r["spread"]
            print(
                f"{test:16} {name:20} {r['tokens_per_s']:8.1f} tokens/s ({low:.1f} to {high:.1f})  {share:20} "
                f"inferplane faster by {r.get('inferplane_is_faster_by', float('nan')):.2f}"
                f" (at least {r.get('at_least', float('nan')):.2f}"
                f", 95 % {' to '.join(f'{x:.3f}' for x in r.get('interval_95', []))})"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
