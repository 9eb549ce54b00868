"""How long it takes to bind the largest models, tree included, before any tensor exists.

    python benchmarks/bind.py            # a table
    python benchmarks/bind.py --json

From the source tree with nothing installed, set PYTHONPATH=core:backends/cpu INFERPLANE_PLUGINS=inferplane_cpu.plugin.
The bar is 0.3 s for 61 layers of DeepSeek-V3, both step kinds. Weights are never allocated. The first figures are those
of a fresh process: the garbage collector's part of them is mostly one walk over everything that torch made at import.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time

import torch

from inferplane.binding import Options, PlanSettings, bind, explain
from inferplane.models import Build, Config, deepseek_v3, llama
from inferplane.plugins import host

BAR_S = 0.3

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def fp8(name):
    """Every projection in FP8 blocks, as DeepSeek publishes it."""
    return "fp8_block" if name.endswith(("_proj.weight", "_mqa.weight")) else "plain"


CASES = {
    "DeepSeek-V3, 61 layers": (deepseek_v3, DEEPSEEK_V3, {}, {}),
    "the same with its MTP layer, FP8 weights": (deepseek_v3, DEEPSEEK_V3, {"mtp": True, "format_of": fp8}, {}),
    "the same, every layer's MLP pinned": (deepseek_v3, DEEPSEEK_V3, {}, {"layers.*.mlp": "decomposition"}),
    "Llama 70B, 80 layers": (llama, LLAMA_70B, {}, {}),
}


def once(make, config, build, pins, backend, kernels):
    """Seconds for the tree, for binding it, and for explaining it."""
    start = time.perf_counter()
    model = make(Build(Config(config), **build))
    tree = time.perf_counter()
    settings = PlanSettings(backend.name, torch.bfloat16, features=backend.features())
    plan = bind(
        model,
        kernels,
        settings,
        lambda request: [x for x in backend.kv_layouts(request, torch.bfloat16) if x.kv_dtype == "auto"],
        options=Options(pins=pins),
    )
    done = time.perf_counter()
    explain(plan)
    return {
        "tree_s": tree - start,
        "bind_s": done - tree,
        "both_s": done - start,
        "explain_s": time.perf_counter() - done,
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="bindings of each model after the first")
    parser.add_argument("--device", default="cpu", help="whose kernels; it need not be here")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = host().backend_for_explain(args.device)
    kernels = host().kernels(backend)
    rows = []
    pauses = []
    gc.callbacks.append(lambda phase, info: pauses.append(time.perf_counter()))
    for label, case in CASES.items():
        pauses.clear()
        first = once(*case, backend, kernels)
        collecting = sum(stop - start for start, stop in zip(pauses[::2], pauses[1::2], strict=True))
        runs = [once(*case, backend, kernels) for _ in range(args.repeats)]
        row = {"case": label, "first_s": first["both_s"], "first_gc_s": collecting}
        rows.append(row | {name: statistics.median(r[name] for r in runs) for name in first})
    told = {"benchmark": "bind", "bar_s": BAR_S, "device": args.device, "kernels": len(kernels), "results": rows}
    told |= {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if args.json:
        print(json.dumps(told, indent=1))
        return
    columns = ("first_s", "first_gc_s", "tree_s", "bind_s", "both_s", "explain_s")
    print(f"{'seconds':<44}" + "".join(f"{c[:-2]:>10}" for c in columns) + f"   bar {BAR_S} for both")
    for r in rows:
        print(f"{r['case']:<44}" + "".join(f"{r[c]:10.4f}" for c in columns))


if __name__ == "__main__":
    main()
