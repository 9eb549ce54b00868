"""Granite's mixtures of experts with a shared MLP."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.families.granite import DEFAULTS
from inferplane.models.families.granitemoe import BLOCK, granite_moe
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM


@architecture(
    "GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    defaults={**DEFAULTS, "shared_intermediate_size": 0},
    expert_names=(BLOCK, "gate_proj", "up_proj", "down_proj"),
    is_fused=True,
)
def granite_moe_shared(build: Build) -> CausalLM:
    """Granite MoE with a shared MLP of `shared_intermediate_size`; 0: without one.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Granite 3.0 technical report (IBM, 2024).
    """
    return granite_moe(build)
