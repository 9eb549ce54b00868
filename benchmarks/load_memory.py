#!/usr/bin/env python3
"""Peak memory of loading a 1B-parameter bf16 model, file pages included (bar: 1.1 x weights + cache + 350 MB).

    python benchmarks/load_memory.py            # Llama-3.2-1B's dims, random weights, tied and untied: 3 GB of disk
    python benchmarks/load_memory.py --json

Each model is written to a temporary folder in shards and loaded by a process of its own; what counts is VmHWM, the most
that was resident at once, of the process's own memory and of files it mapped. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BAR_SHARE, BAR_BYTES = 1.1, 350 * 10**6
CACHE_BYTES = 32 * 2**20
SHARD_BYTES = 512 * 2**20

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}

LOADER = """
import json, re, sys
from inferplane import LLM, SamplingParams

def status():
    lines = open("/proc/self/status").read()
    return {k: int(re.search(rf"^{k}:\\s+(\\d+) kB", lines, re.M)[1]) * 1024 for k in ("VmHWM", "VmRSS")}

llm = LLM(sys.argv[1], device=sys.argv[2], dtype="bfloat16", kv_cache_bytes=int(sys.argv[3]))
loaded = status()
tokens = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))[0].token_ids
print(json.dumps({
    "peak_bytes": loaded["VmHWM"], "resident_bytes": loaded["VmRSS"], "peak_after_generate_bytes": status()["VmHWM"],
    "tokens": len(tokens),
}))
"""


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a llama checkpoint."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (vocab, width)
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,),
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, q),
            "post_attention_layernorm": (width,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, width)


def write(folder: Path, config: dict[str, Any], shard_bytes: int = SHARD_BYTES) -> int:
    """Write a checkpoint of random bf16 weights in shards with an index; returns the bytes of its weights."""
    draw = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / name)
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in tensors(config):
        shard[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(
            1.0 if len(shape) == 1 else 0, 0.02, generator=draw
        )
        total += shard[name].nbytes
        if sum(t.nbytes for t in shard.values()) >= shard_bytes:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def measure(config: dict[str, Any], *, device: str = "cpu", shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Write, load in a process of its own, delete.

    Returns:
        Weights, peak and bar in bytes, and whether the bar is met.
    """
    with tempfile.TemporaryDirectory(prefix="inferplane-load-") as folder:
        weights = write(Path(folder), config, shard_bytes)
        done = subprocess.run(
            [sys.executable, "-c", LOADER, folder, device, str(CACHE_BYTES)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the process that loads failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    bar = int(BAR_SHARE * weights + CACHE_BYTES + BAR_BYTES)
    return {"weights_bytes": weights, "bar_bytes": bar, "met": found["peak_bytes"] <= bar, **found}


def main() -> int:
    """Measure both variants; exit code 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    asked = parser.parse_args()
    results = {
        label: measure({**LLAMA_1B, "tie_word_embeddings": tied}, device=asked.device)
        for label, tied in (("tied", True), ("untied", False))
    }
    if asked.json:
        print(json.dumps({"schema": 1, "torch": torch.__version__, "results": results}))
    else:
        print(f"{'':8}{'weights':>10}{'peak':>10}{'bar':>10}   MB")
        for label, r in results.items():
            mb = [f"{r[k] / 1e6:10.0f}" for k in ("weights_bytes", "peak_bytes", "bar_bytes")]
            print(f"{label:8}{''.join(mb)}   {'met' if r['met'] else 'MISSED'}")
    return 0 if all(r["met"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
