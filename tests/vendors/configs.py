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
_GEMMA: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 128, "sliding_window": 20}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
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
_SPARSE = {**_LATENT, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 64}
_EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 3}

DENSE: dict[str, dict[str, Any]] = {
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": None},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "seed_oss": {"architectures": ["SeedOssForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    "glm": {"architectures": ["GlmForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"]},
    "hunyuan_v1_dense": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": None},
    "cohere": {"architectures": ["CohereForCausalLM"], "logit_scale": 1.0},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "logit_scale": 1.0, "sliding_window": None},
    "ministral": {"architectures": ["MinistralForCausalLM"], "sliding_window": None},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "arcee": {"architectures": ["ArceeForCausalLM"]},
    "helium": {"architectures": ["HeliumForCausalLM"]},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "tie_word_embeddings": False, "use_bias": False},
    "gemma": {"architectures": ["GemmaForCausalLM"]},
}
"""What the dense families add to the small sizes; windows are the matter of `mistral_window`."""

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
    "qwen2_moe": {
        **_SMALL,
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "dots1": {
        **_SMALL,
        "architectures": ["Dots1ForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "sliding_window": None,
    },
    "ernie4_5_moe": {
        **_SMALL,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 64,
    },
    "glm4_moe": {
        **_SMALL,
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "solar_open": {
        **_SMALL,
        "architectures": ["SolarOpenForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "minimax_m2": {**_SMALL, **_EIGHT, "architectures": ["MiniMaxM2ForCausalLM"]},
    "olmoe": {**_SMALL, "architectures": ["OlmoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3},
    "flex_olmo": {**_SMALL, "architectures": ["FlexOlmoForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3},
    "hunyuan_v1_moe": {**_SMALL, "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 8, "moe_topk": 3},
    "granitemoe": {**_SMALL, **_EIGHT, "architectures": ["GraniteMoeForCausalLM"], "attention_multiplier": 0.09},
    "granitemoeshared": {
        **_SMALL,
        **_EIGHT,
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "attention_multiplier": 0.09,
        "shared_intermediate_size": 64,
    },
    "glm4_moe_lite": {**_LATENT, "architectures": ["Glm4MoeLiteForCausalLM"]},
    "gpt_oss": {
        **_SMALL,
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mimo_v2_flash": {
        **_SMALL,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "head_dim": 96,
        "v_head_dim": 64,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "qwen2_vl": {**_SMALL, "architectures": ["Qwen2VLForConditionalGeneration"]},
    "qwen2_5_vl": {**_SMALL, "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
    "qwen3_vl": {**_SMALL, "architectures": ["Qwen3VLForConditionalGeneration"]},
    "qwen3_vl_moe": {
        **_SMALL,
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "glm4v": {**_SMALL, "architectures": ["Glm4vForConditionalGeneration"]},
    "glm4v_moe": {
        **_SMALL,
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "phimoe": {
        **_SMALL,
        "architectures": ["PhimoeForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 1.0,  # all logits are near the largest: a rounding moves none beyond a limit
        "lm_head_bias": True,
    },
    "llama4": {
        **_SMALL,
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size_mlp": 192,
        "num_local_experts": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 40,
    },
    "gemma2": {**_SMALL, **_GEMMA, "architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": False},
    "gemma3": {**_SMALL, **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": False},
    "lfm2": {
        **_SMALL,
        "architectures": ["Lfm2ForCausalLM"],
        "num_attention_heads": 2,
        "layer_types": ["conv", "full_attention"],
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        **_SMALL,
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_attention_heads": 2,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        **_SMALL,
        **_DELTA,
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_5": {
        **_SMALL,
        **_DELTA,
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_5_moe": {
        **_SMALL,
        **_DELTA,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "granitemoehybrid": {
        **_SMALL,
        **_EIGHT,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"],
        "attention_multiplier": 0.09,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
    },
    "nemotron_h": {
        **_SMALL,
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": ["mamba", "attention", "mlp"],
        "hidden_act": "relu2",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
    },
    "falcon_h1": {
        **_SMALL,
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "ssm_multipliers": [0.9, 0.7, 1.4, 0.6, 1.2],
    },
    "hy_v3": {
        **_SMALL,
        "architectures": ["HYV3ForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    "step3p7": {
        **_SMALL,
        "architectures": ["Step3p7ForConditionalGeneration"],
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_sliding_attention_heads": 6,
        "sliding_window": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
    },
    "longcat_flash": {
        **{key: value for key, value in _LATENT.items() if key not in ("num_hidden_layers", "n_shared_experts")},
        "architectures": ["LongcatFlashForCausalLM"],
        "num_layers": 1,
        "zero_expert_num": 2,
    },
    "kimi_linear": {
        **_LATENT,
        "architectures": ["KimiLinearForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 64,
        "q_lora_rank": None,
    },
    "deepseek_v2": {**_LATENT, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy"},
    "deepseek_v3": V3,
    "deepseek_v32": {**_SPARSE, "architectures": ["DeepseekV32ForCausalLM"], "n_group": 4, "topk_group": 2},
    "glm_moe_dsa": {**_SPARSE, "architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "shared"]},
    "deepseek_v4": {
        **_SMALL,
        "architectures": ["DeepseekV4ForCausalLM"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "head_dim": 128,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 20,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
    },
    **{family: {**_SMALL, **entries} for family, entries in DENSE.items()},
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash")
"""Families with latent attention."""
EXPERTS = (
    *("qwen3_moe", "mixtral", "qwen2_moe", "dots1", "ernie4_5_moe", "glm4_moe_lite", "glm4_moe", "solar_open"),
    *("minimax_m2", "olmoe", "flex_olmo", "hunyuan_v1_moe", "granitemoe", "granitemoeshared", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "lfm2_moe", "llama4", "phimoe"),
    *("qwen3_vl_moe", "glm4v_moe", "kimi_linear", "mimo_v2_flash", "longcat_flash", "hy_v3", "step3p7"),
    *("deepseek_v32", "glm_moe_dsa", "deepseek_v4"),
)
CHOSEN_TOKENS = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4")
"""Families whose attention reads tokens that an indexer chose."""
COMPOSED_ATTENTION = ("gpt_oss", "gemma2", "llama4", "mimo_v2_flash", "deepseek_v32", "glm_moe_dsa")
"""Families with sinks, a soft cap, chunks or chosen tokens: core composes their attention where a backend's kernels do
not compute these."""
ON_BODIES = ("deepseek_v4",)
"""Families whose attention no kernel computes: the ops' bodies run."""
RECURRENT = (
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    "kimi_linear",
)
"""Families with recurrent layers, for which no layer behind the model drafts."""
TEXT_PARTS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "step3p7")
"""Text parts of multimodal models, of which the engine says that they are no more; their layers are other families'."""
OWN_ATTENTION = tuple(f for f in FAMILIES if f not in (*COMPOSED_ATTENTION, *ON_BODIES, *RECURRENT, *TEXT_PARTS))
"""Families that the engine serves with drafts on a backend's own kernels."""


def model(config: dict[str, Any], weight_format: str = "plain") -> CausalLM:
    """The tree of ops; nothing is allocated. With a weight format, the layers' matrices are in it."""

    def format_of(name: str) -> str:
        inner = (".layers." in name and name.endswith("proj.weight")) or ".experts." in name
        return weight_format if inner and "kv_b_proj" not in name else "plain"

    return build(Build(Config(config), positions=POSITIONS, format_of=format_of))
