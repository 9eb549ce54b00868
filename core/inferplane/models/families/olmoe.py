"""OLMoE."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import (
    PRE_NORM,
    HeadNorms,
    LayerForm,
    decoder_model,
    experts_per_token,
    grouped_query_attention,
    mixture_of_experts,
)
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, MoE, MoERoute


@architecture(
    "OlmoeForCausalLM",
    model_type="olmoe",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
)
def olmoe(build: Build) -> CausalLM:
    """OLMoE: norms over the width of all heads of q and of k; softmax routing over all experts in every layer.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2409.02060.
    """
    build.config.refuse(clip_qkv=())
    return olmo_mixture(build, PRE_NORM)


def olmo_mixture(build: Build, form: LayerForm) -> CausalLM:
    """Build a model of OLMoE's blocks, put together in a form of layers."""
    config, count = build.config, "num_experts"
    route = MoERoute(None, experts_per_token(config, count), "softmax", renormalize=config.flag("norm_topk_prob"))

    def mlp(i: int, name: str) -> MoE:
        return mixture_of_experts(build, name, route, count=count, inner="intermediate_size")

    bias = config.flag("attention_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, norms=HeadNorms("width"))
    return decoder_model(build, attention, mlp, form)
