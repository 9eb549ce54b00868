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
LLAMA_1B = {
    **WIDE,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
"""The sizes of Llama 3.2 1B."""

DEEPSEEK = {
    "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
REAL = {
    "Llama-8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite": {
        **DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102_400, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    "DeepSeek-V3, 4 layers": {
        **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "vocab_size": 129_280, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip
"""Published sizes by name (config.json of each model's repository); of DeepSeek-V3 a dense layer and three others."""
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

SHAPES = {"small": SMALL, "wide": WIDE, "qwen3-0.6b": QWEN3_0_6B, "llama-3.2-1b": LLAMA_1B}


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
