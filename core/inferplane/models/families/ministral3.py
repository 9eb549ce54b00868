"""Ministral 3, text."""

from __future__ import annotations

import torch

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import decoder_model, dense_mlp, grouped_query_attention, sliding_window
from inferplane.models.reading.config import is_number
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM
from inferplane.types import Weight

ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a config that states no rotary settings."""


@architecture(
    "Ministral3ForCausalLM",
    model_type="ministral3",
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
    },
)
def ministral3(build: Build) -> CausalLM:
    """Ministral 3: Mistral with YaRN, whose queries grow with the logarithm of the position beyond the original
    context.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Mistral 3 (Mistral AI, 2025); the factors as in Llama 4 (transformers' Llama4TextConfig).
    """
    build.config.refuse(layer_types=())
    attention = grouped_query_attention(build, windows=sliding_window(build.config), q_factors=_query_factors(build))
    return decoder_model(build, attention, dense_mlp(build))


def _query_factors(build: Build) -> Weight:
    """Declare the factors on the queries: `1 + beta ln(1 + floor(position / context))`."""
    settings, positions = build.config.rope, build.positions
    beta, context = settings.get("llama_4_scaling_beta"), settings.get("original_max_position_embeddings")
    if beta is None or context is None or not is_number(beta) or not is_number(context) or context <= 0:
        raise CheckpointError(
            f"{build.config.name}: rope_parameters has llama_4_scaling_beta = {beta!r} and "
            f"original_max_position_embeddings = {context!r}, not two numbers.",
            remedy="correct the entries, or fetch the file again",
        )

    def make() -> torch.Tensor:
        return 1 + beta * torch.log(1 + torch.floor(torch.arange(positions) / context))

    return Weight((), (positions,), torch.float32, make=make)
