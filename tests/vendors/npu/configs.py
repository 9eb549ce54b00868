"""Models with the head sizes that the vendor's operators know, small in everything else: one of each family."""

from __future__ import annotations

from typing import Any

from inferplane.conformance.configs import TINY
from inferplane.models import Build, Config, build
from inferplane.ops import CausalLM

POSITIONS = 512

LLAMA: dict[str, Any] = {**TINY["llama"], "hidden_size": 128, "intermediate_size": 192, "head_dim": 128}
V3: dict[str, Any] = {
    **TINY["deepseek_v3_heads"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}


def model(config: dict[str, Any], format_of: Any = None) -> CausalLM:
    """The tree of ops; nothing is allocated."""
    more = {} if format_of is None else {"format_of": format_of}
    return build(Build(Config(config), positions=POSITIONS, **more))
