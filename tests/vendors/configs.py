"""Models with the head sizes that vendors' operators know, small in everything else: one or more a family."""

from __future__ import annotations

from typing import Any

from inferplane.conformance.configs import TINY
from inferplane.models import Build, Config, build
from inferplane.ops import CausalLM

POSITIONS = 512

_SMALL: dict[str, Any] = {
    **TINY["llama"],
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
_LATENT: dict[str, Any] = {
    **TINY["deepseek_v3_heads"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}

LLAMA: dict[str, Any] = {**_SMALL, "architectures": ["LlamaForCausalLM"]}
V3: dict[str, Any] = {**_LATENT, "n_group": 4, "topk_group": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_head_64": {**LLAMA, "head_dim": 64},
    "qwen2": {**_SMALL, "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {**_SMALL, "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        **_SMALL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "mistral_window": {**_SMALL, "architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "mixtral": {
        **_SMALL,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v2": {**_LATENT, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy"},
    "deepseek_v3": V3,
}
EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")


def model(config: dict[str, Any], weight_format: str = "plain") -> CausalLM:
    """The tree of ops; nothing is allocated. With a weight format, the layers' matrices are in it."""

    def format_of(name: str) -> str:
        inner = (".layers." in name and name.endswith("proj.weight")) or ".experts." in name
        return weight_format if inner and "kv_b_proj" not in name else "plain"

    return build(Build(Config(config), positions=POSITIONS, format_of=format_of))
