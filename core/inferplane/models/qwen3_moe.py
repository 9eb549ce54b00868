"""Qwen 3 with mixtures of experts."""

from __future__ import annotations

from inferplane.errors import CheckpointError
from inferplane.models.build import Build
from inferplane.models.parts import decoder, dense, experts, grouped_query, routing
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GatedMLP, MoE, MoERoute


@architecture("Qwen3MoeForCausalLM")
def qwen3_moe(b: Build) -> CausalLM:
    """Qwen 3 MoE: norms on each head's q and k; softmax routing over all experts in the sparse layers.

    Args:
        b: config, placement, formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2505.09388.
    """
    c = b.config
    c.refuse(hidden_act=("silu",))
    bias, step = c.flag("attention_bias"), c.size("decoder_sparse_step", 1)
    window = c.size("sliding_window") if c.flag("use_sliding_window") and c.get("sliding_window") else None
    entry = "num_local_experts" if c.get("num_experts") is None else "num_experts"
    total, chosen = routing(c, entry)
    plain = c.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise CheckpointError(f"{c.name}: mlp_only_layers is {plain!r}, not a list.", remedy="fetch the file again")
    route = MoERoute(None, chosen, "softmax", renormalize=c.flag("norm_topk_prob"))
    attention, mlp = grouped_query(b, bias=bias, out_bias=bias, norms=True), dense(b)
    inner = ("moe_intermediate_size", c.size("moe_intermediate_size"))

    def feed_forward(i: int, name: str) -> GatedMLP | MoE:
        sparse = i not in plain and (i + 1) % step == 0
        return experts(b, name, route, count=(entry, total), inner=inner) if sparse else mlp(i, name)

    return decoder(b, lambda i, name: attention(name, window), feed_forward)
