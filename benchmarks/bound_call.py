"""What a bound op call costs beside the kernel: bound against called by hand, on kernels that do nothing and real ones.

    python benchmarks/bound_call.py            # a table
    python benchmarks/bound_call.py --json

Both ways are timed in turn, in short blocks, and the fastest block of each counts: what a busy machine adds is never
the code's own. The bar is 0.1 us a call.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import timeit
from typing import Any

import torch

from inferplane.binding import DictSource, PlanSettings, bind, link, load, view_of
from inferplane.kernels.composed import composed_kernels
from inferplane.ops import GatedMLP, Linear, SiluMul
from inferplane.types import Kernel, Weight

BAR_US = 0.1


def nothing(p, x):
    """A kernel that returns what it is given: all that is left is the call."""
    return x


def bound(op, kernels):
    """`op` bound to `kernels`, with random weights."""
    tensors = {part: torch.randn(64, 64) / 8 for _, w in op.weights() for part in w.parts}
    plan = bind(op, kernels, PlanSettings("any", torch.float32), lambda request: (), step_kinds=("decode",))
    return link(plan, load(plan, DictSource(tensors)).packed)["decode"]


def gated_mlp():
    """Three leaves below one body: 64 -> 2 x 64 -> 64."""
    return GatedMLP(Linear(Weight(("gate", "up"), (128, 64))), Linear(Weight(("down",), (64, 64))), SiluMul())


def pairs():
    """`(label, bound calls, statement bound, statement by hand, names)` of each comparison."""
    leaf = bound(Linear(Weight(("w",), (64, 64))), [Kernel("linear", "no-op", nothing)])
    names: dict[str, Any] = {"x": torch.randn(1, 64), "leaf": leaf, "view": view_of(leaf), "nothing": nothing}
    names["parent"] = type("Parent", (), {})()
    names["parent"].op = leaf
    yield "leaf, no-op kernel", 1, "leaf(x)", "nothing(view, x)", names
    yield "leaf, looked up on its parent's view", 1, "parent.op(x)", "nothing(view, x)", names

    for label, kernels in (
        ("no-op kernels", [Kernel(op, "no-op", nothing) for op in ("linear", "silu_mul")]),
        ("composed kernels, M = 1", composed_kernels()),
    ):
        mlp = bound(gated_mlp(), kernels)
        view = view_of(mlp)
        parts = {name: getattr(view, name) for name in ("gate_up", "act", "down")}
        names = {"x": torch.randn(1, 64), "mlp": mlp}
        views = {name: view_of(part) for name, part in parts.items()}
        names |= {f"{name}_v": part for name, part in views.items()}
        names |= {f"{name}_f": part.kernel.function() for name, part in views.items()}
        by_hand = "down_f(down_v, act_f(act_v, gate_up_f(gate_up_v, x)))"
        yield f"walked-down gated_mlp, {label}", 4, "mlp(x)", by_hand, names


def measure(seconds, block_s=0.004):
    """One row a comparison, times in microseconds."""
    rows = []
    for label, calls, with_plan, by_hand, names in pairs():
        timers = [timeit.Timer(statement, globals=names) for statement in (with_plan, by_hand)]
        number = max(1, int(1000 * block_s / min(timers[0].repeat(5, 1000))))
        best, end = [float("inf")] * 2, time.perf_counter() + seconds
        while time.perf_counter() < end:
            best = [min(b, t.timeit(number) / number * 1e6) for b, t in zip(best, timers, strict=True)]
        own = (best[0] - best[1]) / calls
        row = {"case": label, "bound_us": best[0], "direct_us": best[1], "bound_calls": calls, "own_us_per_call": own}
        rows.append(row)
    return rows


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each comparison")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = measure(args.seconds)
    told = {"benchmark": "bound_call", "bar_us": BAR_US, "results": rows}
    told |= {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    print(f"{'us':<48} {'bound':>9} {'direct':>9} {'own, a call':>12}   bar {BAR_US}")
    for r in rows:
        print(f"{r['case']:<48} {r['bound_us']:9.4f} {r['direct_us']:9.4f} {r['own_us_per_call']:+12.4f}")


if __name__ == "__main__":
    main()
