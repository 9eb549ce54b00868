"""Hunyuan with mixtures of experts (Hunyuan-A13B)."""

from __future__ import annotations

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.families.hunyuan_v1_dense import hunyuan_attention
from inferplane.models.parts import SharedExperts, decoder_model, experts_per_token, mixture_of_experts
from inferplane.models.reading.config import Config
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute


@architecture(
    "HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)
def hunyuan_v1_moe(build: Build) -> CausalLM:
    """Hunyuan MoE: Hunyuan's attention; softmax routing, renormalized over the chosen experts, and a shared expert in
    every layer. Layers may choose different numbers of experts.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: Hunyuan-A13B technical report (Tencent, 2025).
    """
    config, count, inner = build.config, "num_experts", "intermediate_size"
    config.refuse(use_cla=(False,), use_mla=(False,), use_qk_norm=(True,), use_mixed_mlp_moe=(True,))
    layers, size = config.size("num_hidden_layers"), config.size(inner)
    numbers = config.get("moe_topk")
    numbers = numbers if isinstance(numbers, list) else [numbers] * layers
    if len(numbers) != layers:
        raise CheckpointError(
            f"{config.name}: moe_topk is not one number, or a list of {layers}, one a layer.",
            remedy="correct the entry, or fetch the file again",
        )
    configs = {n: Config({**config, "moe_topk": n}, config.name) for n in numbers if isinstance(n, int)}
    chosen = [experts_per_token(configs.get(n, config), count, entry_of_chosen="moe_topk") for n in numbers]

    def mlp(i: int, name: str) -> MoE:
        route = MoERoute(None, chosen[i], "softmax")
        return mixture_of_experts(
            build, name, route, count=count, inner=inner, router="gate.wg", shared=SharedExperts(size, "shared_mlp")
        )

    return decoder_model(build, hunyuan_attention(build), mlp)
