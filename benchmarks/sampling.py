"""What choosing tokens from a large vocabulary costs: the sampler with a device's kernel and with the op's body.

    python benchmarks/sampling.py                 # a table: 8 and 32 rows of 151,936 logits
    python benchmarks/sampling.py --rows 64 --json

Both draw the same tokens save where rounding decides, which is checked. "peaked" logits fall with the logarithm of a
token's rank, as those of trained models do; "flat" ones are normal, as those of random weights. Kernel and body run in
turns; the fastest run of each counts beside the median.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from statistics import median
from types import SimpleNamespace

import torch

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.sampler import Sampler
from inferplane.ops import SampleTokens
from inferplane.plugins import host
from inferplane.types import Context

ASKED = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-k 5000": {"top_k": 5000},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
}


def best_kernel(device):
    """The highest-ranked kernel of the op, as a function of its arguments."""
    backend = host().backend(device)
    offered = [k for k in host().kernels(backend) if k.op == "sample"]
    op, context = SampleTokens(), Context(torch.float32, "decode", features=backend.features())
    serving = [k for k in offered if not k.refusals(op, context, op.formats())]
    chosen = max(serving, key=lambda k: k.rank)
    function = chosen.function()
    view = SimpleNamespace(prepared=chosen.prepare(op, context) if chosen.prepare else None)
    return chosen.name, lambda *args: function(view, *args)


def logits(kind, rows, vocab):
    """float32 `[rows, vocab]`."""
    g = torch.Generator().manual_seed(0)
    if kind == "flat":
        return torch.randn(rows, vocab, generator=g)
    ranks = torch.stack([torch.randperm(vocab, generator=g) for _ in range(rows)])
    return -1.5 * torch.log(ranks + 1.0)


def measure(samplers, kind, asked, rows, vocab, repeats):
    """Milliseconds of each sampler for one step."""
    x = logits(kind, rows, vocab)
    step = samplers["kernel"].prepare([BatchRow(SamplingParams(**asked), i, 3) for i in range(rows)])
    spent = {name: [] for name in samplers}
    with torch.inference_mode():
        drawn = [s.sample(x, step) for s in samplers.values()]
        for tokens in drawn:
            assert (tokens != drawn[0]).sum() <= 1 + rows // 20, "kernel and body draw different tokens"
        for _ in range(repeats):
            for name, s in samplers.items():
                begun = time.perf_counter()
                s.sample(x, step)
                spent[name].append(1e3 * (time.perf_counter() - begun))
    return {name: {"best_ms": min(t), "median_ms": median(t)} for name, t in spent.items()}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="rows of a step")
    parser.add_argument("--vocab", type=int, default=151_936, help="columns of the logits")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each")
    parser.add_argument("--device", default="cpu", help="whose kernel; the logits are on the host")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    name, function = best_kernel(args.device)
    samplers = {kind: Sampler(f, args.vocab, "cpu") for kind, f in (("kernel", function), ("body", SampleTokens()))}
    results = [
        {"rows": rows, "logits": kind, "asked": words, **measure(samplers, kind, asked, rows, args.vocab, args.repeats)}
        for rows in args.rows
        for kind in ("peaked", "flat")
        for words, asked in ASKED.items()
    ]
    told = {"benchmark": "sampling", "kernel": name, "vocab": args.vocab, "threads": torch.get_num_threads()}
    told |= {"torch": torch.__version__, "machine": platform.machine(), "results": results}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(f"ms a step, {args.vocab} logits a row, {name}, {told['threads']} threads; best (median)")
    print(f"{'rows':>4} {'logits':<7} {'asked':<21} {'kernel':>16} {'body':>16}")
    for r in results:
        shown = "".join(f"{r[n]['best_ms']:8.2f} ({r[n]['median_ms']:6.2f})" for n in ("kernel", "body"))
        print(f"{r['rows']:>4} {r['logits']:<7} {r['asked']:<21}{shown}")


if __name__ == "__main__":
    main()
