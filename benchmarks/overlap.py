"""How much of the host's time a step of the device hides (`async_scheduling`), on the mock device of the tests.

    python benchmarks/overlap.py                          # steps of 5, 20 and 50 ms
    python benchmarks/overlap.py --step-ms 10 --batch 1 64 --json

A step of the mock returns at once, and its results are there after the given time. What a device would compute is a
table: the model, and the op `sample`, whose kernels the mock would otherwise run on the host, for 2 to 60 ms. The given
time stands for both. All the rest is the host's and is measured: to schedule, to build the batch, to prepare and launch
sampling, to accept. Every operator costs the host more on the mock than a launch on a device does. Rounds with and
without asynchronous scheduling follow each other; the median step of all rounds counts, so that a host which others
use now and then changes little. Hidden is what the loop saves, as a share of the host's time or, if that is shorter,
of the step. The bar is 90 %.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from itertools import chain, product
from pathlib import Path
from statistics import median

import torch
from shapes import QWEN3_0_6B, config

sys.path.insert(0, str(Path(__file__).parents[1]))  # the mock device is the tests'

from inferplane import LLM, SamplingParams, plugins
from inferplane.engine.clients import llm as llm_module
from tests.mock_device import hidden

BAR = 0.9
ROUNDS = 5
CASES = {
    "greedy": {"temperature": 0},
    "top-p 0.95": {"top_p": 0.95, "seed": 1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}
SMALL = {**QWEN3_0_6B, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 2048}


class TableModel:
    """A model whose logits are a row of a table, and whose steps take time on the mock's timeline.

    Args:
        runner: what it stands in for. step_s: seconds of a step.
    """

    def __init__(self, runner, step_s):
        self.step_s, vocab = step_s, runner.model.vocab
        self.table = torch.randn(256, vocab, generator=torch.Generator().manual_seed(0)).to(hidden.DEVICE)
        self.hidden, self.tokens = torch.zeros(256, 8).to(hidden.DEVICE), torch.arange(256).to(hidden.DEVICE)

    def run(self, batch):
        """In place of `Runner.run`."""
        rows = batch.ids if batch.logit_rows is None else batch.ids.index_select(0, batch.logit_rows)
        found = self.table.index_select(0, rows % 256), self.hidden.index_select(0, batch.ids % 256)
        hidden.TIMELINE.launch(self.step_s)
        return found

    def sample(self, logits, *unused):
        """In place of the op `sample`: any tokens will do."""
        return self.tokens[: logits.shape[0]]


def time_steps(llm, batch, params, steps):
    """Seconds of each of `steps` steps of `batch` sequences that decode, and the host's CPU seconds, on average."""
    engine = llm.engine
    requests = [engine.add([1 + i] * 16, params, frozenset()) for i in range(batch)]
    for _ in range(4):
        engine.step()
    spent, cpu = [], time.process_time()
    for _ in range(steps):
        begun = time.perf_counter()
        engine.step()
        spent.append(time.perf_counter() - begun)
    cpu = (time.process_time() - cpu) / steps
    for request in requests:
        engine.end(request, "abort")
    engine.settle()
    return spent, cpu


def measure(llms, batch, name, step_s, steps):
    """Milliseconds of the median step, waited for and overlapped, and what is hidden of the host's time."""
    params = SamplingParams(max_tokens=steps + 16, ignore_eos=True, **CASES[name])
    for llm in llms.values():
        table = TableModel(llm.runner, step_s)
        llm.engine.runner.run, llm.engine.sampler._sample = table.run, table.sample
    times = {setting: [] for setting in llms}
    for _ in range(ROUNDS):
        for setting, llm in llms.items():
            times[setting].append(time_steps(llm, batch, params, steps))
    (off, off_cpu), (on, on_cpu) = (
        (median(chain.from_iterable(spent for spent, _ in rounds)), median(cpu for _, cpu in rounds))
        for rounds in (times["off"], times["on"])
    )
    return {
        "batch": batch,
        "sampling": name,
        "device_ms": 1e3 * step_s,
        "off_ms": 1e3 * off,
        "on_ms": 1e3 * on,
        "host_ms": 1e3 * (off - step_s),
        "off_cpu_ms": 1e3 * off_cpu,
        "on_cpu_ms": 1e3 * on_cpu,
        "hidden": (off - on) / min(off - step_s, step_s),
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences in a step")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 20.0, 50.0], help="time of a device's step")
    parser.add_argument("--sampling", nargs="+", choices=list(CASES), default=list(CASES), help="how tokens are chosen")
    parser.add_argument("--steps", type=int, default=30, help="steps of a round")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    hidden.start()
    host = plugins.discover("only,inferplane_cpu.plugin,tests.mock_device.mock_device")
    llm_module.host = lambda: host
    options = {"device": "mock:later", "dtype": "float32", "load_format": "dummy", "max_num_seqs": max(args.batch)}
    llms = {each: LLM(config(SMALL, 512), async_scheduling=each, **options) for each in ("off", "on")}
    if not args.json:
        heads = f"{'device ms':>9} {'host ms':>8} {'off ms':>7} {'on ms':>7} {'off cpu':>7} {'on cpu':>7} {'hidden':>7}"
        print(f"{'batch':>5} {'sampling':<12} {heads}")
    results = []
    for batch, name, step_ms in product(args.batch, args.sampling, args.step_ms):
        results.append(r := measure(llms, batch, name, step_ms / 1e3, args.steps))
        if not args.json:
            times = f"{r['device_ms']:9.1f} {r['host_ms']:8.2f} {r['off_ms']:7.2f} {r['on_ms']:7.2f}"
            more = f"{r['off_cpu_ms']:7.2f} {r['on_cpu_ms']:7.2f} {r['hidden']:7.1%}"
            print(f"{r['batch']:>5} {r['sampling']:<12} {times} {more}", flush=True)
    if args.json:
        facts = {"benchmark": "overlap", "bar": BAR, "torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({**facts, "results": results}, indent=1))
        return
    print(f"bar: {BAR:.0%}")


if __name__ == "__main__":
    main()
