"""Granite 3 with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from inferplane.models.build import Build
from inferplane.models.families.granite import DEFAULTS, granite_model
from inferplane.models.parts import SharedExperts, experts_per_token, mixture_of_experts
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute

BLOCK = "block_sparse_moe"


@architecture(
    "GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults=DEFAULTS,
    expert_names=(BLOCK, "gate_proj", "up_proj", "down_proj"),
)
def granite_moe(build: Build) -> CausalLM:
    """Granite MoE: Granite's factors; softmax routing over the chosen experts in every layer; a shared MLP where the
    config gives `shared_intermediate_size`.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Granite 3.0 technical report (IBM, 2024).
    """
    return granite_model(build, granite_experts(build))


def granite_experts(build: Build) -> Callable[[int, str], MoE]:
    """Return a function that builds a layer's experts, from the layer's number and the MLP's name."""
    config, count = build.config, "num_local_experts"
    route = MoERoute(None, experts_per_token(config, count), "softmax")
    build.ignore(f"model.layers.*.{BLOCK}.shared_mlp.gate_up_proj.weight")  # its parts are read
    shared = SharedExperts(config.count("shared_intermediate_size"), "shared_mlp")

    def mlp(i: int, name: str) -> MoE:
        name = name.removesuffix("mlp") + BLOCK
        return mixture_of_experts(
            build, name, route, count=count, inner="intermediate_size", router="router.layer", shared=shared
        )

    return mlp
