"""Small random models of every family, made by transformers, in folders that `LLM` loads."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LLAMA: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6, "num_attention_heads": 6, "hidden_size": 96},
    "tied_llama3": {"tie_word_embeddings": True, "rope": LLAMA3},
    "linear": {"rope": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}, "rms_norm_eps": 1e-3},
    "attention_bias": {"attention_bias": True, "num_key_value_heads": 1},
    "head_dim": {"head_dim": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 72},
    "odd": {
        "vocab_size": 101,
        "hidden_size": 90,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 22,
        "intermediate_size": 123,
        "num_hidden_layers": 3,
    },
    "yarn": {"rope": YARN},
}
DEEPSEEK: dict[str, dict[str, Any]] = {
    "q_lora": {},
    "q_full": {"q_lora_rank": None, "n_shared_experts": 2},
    "yarn": {"rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-3},
    "dense": {"num_hidden_layers": 4, "first_k_dense_replace": 3, "rope_interleave": False},
    "one_group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
    "odd": {"vocab_size": 101, "v_head_dim": 20, "qk_nope_head_dim": 12, "moe_intermediate_size": 37, "num_heads": 3},
}

LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "num_hidden_layers": 2}
V2: dict[str, Any] = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "qwen2": (
        "Qwen2Config",
        {},
        {
            "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
            "window": {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
            "yarn": {"rope": YARN},
            "dynamic": {"rope": DYNAMIC},
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {"head_dim": 24},
        {
            "bias_llama3": {"attention_bias": True, "rope": LLAMA3, "rms_norm_eps": 1e-3},
            "window": {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "yarn": {"rope": YARN, "tie_word_embeddings": True},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 24, "num_experts": 8, "moe_intermediate_size": 40},
        {
            "plain": {"norm_topk_prob": True},
            "mixed": {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4, "rope": LINEAR},
            "yarn": {"rope": YARN, "num_experts": 6},
        },
    ),
    "mistral": (
        "MistralConfig",
        {},
        {
            "window": {"sliding_window": 30},
            "narrow": {"sliding_window": 3, "head_dim": 20},
            "dynamic": {"sliding_window": None, "rope": DYNAMIC},
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {**EXPERTS, "num_local_experts": 8},
        {
            "plain": {"head_dim": 16},  # transformers cannot scale without it
            "window_linear": {"sliding_window": 17, "num_local_experts": 4, "head_dim": 20, "rope": LINEAR},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        V2,
        {
            "greedy": {},
            "groups": {**GROUPS, "q_lora_rank": 40, "n_shared_experts": 1},
            "yarn": {**GROUPS, "rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
            "dynamic": {"q_lora_rank": 40, "rope": DYNAMIC},
        },
    ),
}

CASES = {"llama": LLAMA, "deepseek": DEEPSEEK, **{family: cases for family, (_, _, cases) in FAMILIES.items()}}
"""The cases of every family."""


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return make_config(LlamaConfig, {**sizes, **changes})


def deepseek_config(**changes: Any) -> Any:
    from transformers import DeepseekV3Config

    heads = changes.pop("num_heads", 4)
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 112,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "kv_lora_rank": 48,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "max_position_embeddings": 512,
    }
    return make_config(DeepseekV3Config, {**sizes, **changes})


def make_config(kind: type, entries: dict[str, Any]) -> Any:
    """A config with rotary settings in the spelling of the transformers that is installed, and no end of text."""
    from transformers import __version__

    rope = copy.deepcopy(entries.pop("rope", None))  # transformers adds entries to it
    if rope is not None and int(__version__.split(".")[0]) >= 5:
        entries["rope_parameters"] = rope
    elif rope is not None:
        entries["rope_theta"] = rope["rope_theta"]
        entries["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return kind(**entries, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def random_model(config: Any, seed: int = 0) -> Any:
    """A model whose every weight matters: no norm of ones, no bias of zeros, activations of ordinary size."""
    import transformers

    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    kind = "CausalLM" if getattr(config, "text_config", None) is None else "ConditionalGeneration"
    model = getattr(transformers, f"{name}For{kind}")(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("inv_freq", "original_inv_freq", "embed_scale", "mup_vector")):
                continue
            noise = torch.randn(t.shape, generator=draw)
            if name.endswith("tid2eid"):  # different experts for each token id
                order = torch.rand(t.shape[0], config.num_local_experts, generator=draw).argsort(-1)
                t.copy_(order[:, : t.shape[1]])
            elif "norm" in name:
                t.copy_(1 + 0.3 * noise)
            elif "correction_bias" in name:  # no choice below 0: transformers 4 takes 0 for a group that is left out
                t.copy_(0.8 + 0.2 * noise)
            elif t.ndim == 1:
                t.copy_(0.2 * noise)
            elif "embed" in name:
                t.copy_(noise)
            else:
                t.copy_(noise / math.sqrt(t.shape[-1]))
    model.tie_weights()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product refuses odd sizes
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def config_of(family: str, case: str, **changes: Any) -> Any:
    """The config of a named case."""
    if family == "llama":
        return llama_config(**{**LLAMA[case], **changes})
    if family in FAMILIES:
        import transformers

        kind, sizes, cases = FAMILIES[family]
        return make_config(getattr(transformers, kind), {**SMALL, **sizes, **cases[case], **changes})
    return deepseek_config(**{**DEEPSEEK[case], **changes})


def make(family: str, case: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Save a random model of a named case; returns transformers' model, in float32 with the saved values."""
    model = random_model(config_of(family, case)).to(dtype)
    model.save_pretrained(folder, **options)
    return model.float()


def prompts(vocab: int, lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=draw).tolist() for n in lengths]


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits after every token, float32 `[tokens, vocab]`."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def greedy_tokens(model: Any, ids: list[int], tokens: list[int]) -> list[int]:
    """transformers' choices after a prompt and each of these tokens but the last: they are its greedy text exactly if
    this returns them.
    """
    return logits_of(model, [*ids, *tokens])[len(ids) - 1 : -1].argmax(-1).tolist()
