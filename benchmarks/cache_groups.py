#!/usr/bin/env python3
"""What sequences hold of the cache in models that mix windows with full attention, by `estimate` and in a full pool.

    python benchmarks/cache_groups.py                        # 32,768 tokens; minutes
    python benchmarks/cache_groups.py --tokens 4096 --json

`estimate` reads the published sizes. The run has as many layers, with the same windows, of one tiny head: requests of
one length are prefilled and generate until the pool is full of them. A layer without a window must keep all tokens,
any other its window. Bars: a sequence holds at most 1.1 times what its layers must keep; and for each sequence that
fits where one table keeps all tokens of all layers, at least 0.95 of those fit for which there is memory then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferplane import LLM, SamplingParams
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.estimate import LENGTHS
from inferplane.plugins import host

MAX_HELD, MIN_SHARE = 1.1, 0.95
TOKENS, STEP_TOKENS = 32_768, 2048
DTYPE = "bfloat16"

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "tie_word_embeddings": False, "torch_dtype": DTYPE,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262_144, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 131_072, "tie_word_embeddings": True, "torch_dtype": DTYPE,
}  # fmt: skip
GEMMA_27B = {
    "hidden_size": 5376, "intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "query_pre_attn_scalar": 168,
}  # fmt: skip
GEMMA_12B = {
    "hidden_size": 3840, "intermediate_size": 15_360, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "query_pre_attn_scalar": 256,
}  # fmt: skip
GEMMA_1B = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "query_pre_attn_scalar": 256,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "vocab_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1, "query_pre_attn_scalar": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model's published sizes and its layers.

    Args:
        config: entries of its config but those of the layers.
        layers: number of layers.
        every: of so many layers the last attends to all tokens, the others to a window.
        window: in tokens.
        pools: size of the pool of the run, as the number of sequences that one table for all layers would have there.
            A pool holds whole sequences, so that a small one has up to one less than its memory allows.
    """

    config: dict[str, Any]
    layers: int
    every: int
    window: int
    pools: int

    def make_config(self, *, mixed: bool = True, **changes: Any) -> dict[str, Any]:
        """Make the model's config, or without `mixed` one whose layers all attend to all tokens."""
        full = [not mixed or i % self.every == self.every - 1 for i in range(self.layers)]
        kinds = ["full_attention" if whole else "sliding_attention" for whole in full]
        layers = {"num_hidden_layers": self.layers, "layer_types": kinds, "sliding_window": self.window}
        return {**self.config, **layers, **changes}

    def count_entries(self, tokens: int) -> int:
        """Count what a sequence must keep, in tokens of one layer."""
        full = self.layers // self.every
        return full * tokens + (self.layers - full) * min(self.window, tokens)

    def count_all(self, tokens: int) -> int:
        """Count what one table for all layers keeps, in tokens of one layer."""
        return self.layers * tokens

    def possible_gain(self, tokens: int) -> float:
        """For each sequence that one table has in some memory, how many could be there that keep what they must."""
        return self.count_all(tokens) / self.count_entries(tokens)


SHAPES = {
    "gpt-oss-20b": Shape(GPT_OSS, 24, 2, 128, 10),
    "gemma-3-1b": Shape({**GEMMA, **GEMMA_1B, "max_position_embeddings": 32_768}, 26, 6, 512, 4),
    "gemma-3-12b": Shape({**GEMMA, **GEMMA_12B}, 48, 6, 1024, 4),
    "gemma-3-27b": Shape({**GEMMA, **GEMMA_27B}, 62, 6, 1024, 6),
}
"""Sizes by each model's published config.json."""


def run_estimate(config: dict[str, Any], device: str, memory: int) -> dict[str, Any]:
    """Run `inferplane estimate` on a config, with so many bytes of memory; returns its JSON."""
    with tempfile.TemporaryDirectory(prefix="inferplane-estimate-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "inferplane", "estimate", str(path), "--device", device, "--json"]
        done = subprocess.run([*command, "--memory", str(memory)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"estimate failed:\n{done.stderr}")
    return json.loads(done.stdout)


def compare_estimates(
    shape: Shape, tokens: int, device: str, run: Callable[[dict[str, Any], str, int], dict[str, Any]] = run_estimate
) -> dict[str, Any]:
    """Compare what `estimate` says of a shape with what it says of the same sizes without windows, in memory for the
    weights and a hundred sequences of one table.
    """
    configs = [shape.make_config(mixed=mixed) for mixed in (True, False)]
    plain = run(configs[1], device, 2**46)
    token_bytes = plain["kv_token_bytes"] / shape.layers
    memory = 2**46 - plain["caches"][1]["kv_cache_bytes"] + int(100 * shape.count_all(tokens) * token_bytes)
    cache, full = (run(config, device, memory)["caches"][1] for config in configs)
    fit, of_one_table = (found["sequences"][str(tokens)] for found in (cache, full))
    held = cache["kv_cache_bytes"] / fit / (shape.count_entries(tokens) * token_bytes)
    return {"sequences": fit, "held": held, "gain": fit / of_one_table}


def fill_pool(shape: Shape, tokens: int, step_tokens: int, device: str, pools: int | None = None) -> dict[str, Any]:
    """Fill a pool with sequences of at least `tokens` tokens each, and count them and the blocks that they hold.

    Args:
        shape: the layers; their sizes are tiny.
        tokens: of each prompt. While others are read, a sequence generates.
        step_tokens: maximum number of tokens in a step.
        device: where it runs.
        pools: see `Shape`; None: the shape's.

    Returns:
        At the step with most sequences: how many there were (`sequences`), what they held over what they must keep
        (`held`), and how many there were for each of one table (`gain`).
    """
    pools = shape.pools if pools is None else pools
    sequences = int(pools * shape.possible_gain(tokens)) + 1
    more = sequences * (tokens // step_tokens + 2) + 16
    config = shape.make_config(**TINY, max_position_embeddings=tokens + more)
    options = RunnerOptions(dtype=DTYPE, max_num_seqs=sequences, load_format="dummy")
    planned = Runner.plan_only(ModelFiles(config), host(), device, options)
    block, width = planned.block_tokens, len(planned.tables.storages)
    pool = pools * shape.count_all(tokens) // (width * block)
    begun = time.perf_counter()
    with LLM(
        config, device=device, dtype=DTYPE, load_format="dummy", max_num_seqs=sequences,
        max_num_batched_tokens=step_tokens, kv_cache_bytes=pool * planned.block_bytes(), enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        assert llm.runner.cache.blocks == pool
        params = SamplingParams(max_tokens=more, temperature=0, ignore_eos=True)
        requests = [llm.engine.add([i % 50] * tokens, params, frozenset()) for i in range(sequences)]
        found: dict[str, Any] = {"sequences": 0}
        scheduler, stalled = llm.engine.scheduler, 0
        while stalled < 2 and not scheduler.preemptions:
            llm.engine.step()
            whole = [r for r in requests if r.computed >= tokens]
            stalled = stalled + 1 if len(whole) == len(scheduler.running) else 0
            if len(whole) > found["sequences"]:
                held = sum(len(table.held) for r in whole for table in r.tables) * width * block
                kept = sum(shape.count_entries(r.computed) for r in whole)
                found = {"sequences": len(whole), "held": held / kept, "gain": len(whole) / pools}
        assert all(r.finish_reason is None for r in requests), "none has ended before the pool was full"
    return {**found, "blocks": pool, "seconds": time.perf_counter() - begun}


def measure(name: str, tokens: int, step_tokens: int, device: str) -> list[dict[str, Any]]:
    """Measure a shape both ways; each row says whether it meets the bars."""
    shape = SHAPES[name]
    possible = shape.possible_gain(tokens)
    rows = {
        "estimate": compare_estimates(shape, tokens, device),
        "run": fill_pool(shape, tokens, step_tokens, device),
    }
    return [
        {"model": name, "by": by, "possible": possible, **row}
        | {"met": row["held"] <= MAX_HELD and row["gain"] >= MIN_SHARE * possible}
        for by, row in rows.items()
    ]


def main() -> int:
    """Command line; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, choices=LENGTHS[:5], default=TOKENS)
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS, help="maximum number of tokens in a step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    rows = []
    if not args.json:
        print(f"sequences of {args.tokens} tokens; held: over what must be kept; gain: over one table for all layers")
        print(f"{'':<12} {'by':<9} {'sequences':>9} {'held':>7} {'gain':>7} {'possible':>9} {'seconds':>8}")
    for name in args.models:
        for row in measure(name, args.tokens, args.step_tokens, args.device):
            rows.append(row)
            if not args.json:
                figures = f"{row['sequences']:>9} {row['held']:7.3f} {row['gain']:7.2f} {row['possible']:9.2f}"
                figures += f" {row.get('seconds', 0):8.0f}"
                print(f"{name:<12} {row['by']:<9} {figures}  {'met' if row['met'] else 'MISSED'}", flush=True)
    if args.json:
        bars = {"max_held": MAX_HELD, "min_share": MIN_SHARE}
        print(json.dumps({"benchmark": "cache_groups", "bars": bars, "tokens": args.tokens, "results": rows}, indent=1))
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
