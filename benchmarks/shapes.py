"""Random-weight models of known shapes for benchmarks: Llama's architecture, weights tied, in bfloat16 unless said."""

from __future__ import annotations

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
QWEN3_0_6B = {**SMALL, "num_hidden_layers": 28, "vocab_size": 151_936}
"""The sizes of Qwen3-0.6B."""


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
