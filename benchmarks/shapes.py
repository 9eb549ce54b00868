"""What several benchmarks share: random-weight models of known shapes, and which clock is looked at."""

from __future__ import annotations

import argparse
import time

SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
}
"""About 95 million parameters: a step is spent on weights, and a run takes seconds."""
WIDE = {
    **SMALL,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "head_dim": 64,
    "vocab_size": 8_000,
}
"""Two layers as wide as those of Llama 3.2 1B: work on weights and on the context stand as in real models."""
QWEN3_0_6B = {**SMALL, "num_hidden_layers": 28, "vocab_size": 151_936}
"""The sizes of Qwen3-0.6B."""

SHAPES = {"small": SMALL, "wide": WIDE, "qwen3-0.6b": QWEN3_0_6B}


def config(sizes, positions):
    """A config that `LLM` takes with load_format="dummy"."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": positions,
        **sizes,
    }


def add_clock(parser: argparse.ArgumentParser) -> None:
    """`--cpu-clock`: `args.clock` is then the processor time of this process."""
    parser.add_argument(
        "--cpu-clock",
        dest="clock",
        action="store_const",
        const=time.process_time,
        default=time.perf_counter,
        help="count processor time, for one thread on a machine that others use; left out: wall time",
    )


def clock_name(clock) -> str:
    """For the reports."""
    return "processor time" if clock is time.process_time else "wall time"
