"""Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from inferplane.models.build import Build
from inferplane.models.parts import LayerForm, decoder_model, dense_mlp, grouped_query_attention, layer_windows
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, GQABlock

FOUR_NORMS = LayerForm(
    before=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    norm=Build.offset_rms_norm,
)
"""Norms on both sides of each block, whose weights are stored without their 1; Gemma 3 has the same."""

DEFAULTS = {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Of entries that a config leaves out; Gemma 3 has the same."""


@architecture(
    "Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    aliases={"hidden_activation": "hidden_act"},
)
def gemma2(build: Build) -> CausalLM:
    """Gemma 2: Gemma with norms on both sides of each block, a window in every second layer, and soft caps of scores
    and logits.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2408.00118.
    """
    config = build.config
    config.refuse(use_bidirectional_attention=(False,))
    bias, windows = config.flag("attention_bias"), layer_windows(config, lambda i: i % 2 == 0)
    score_cap, logit_cap = (
        None if config.get(entry) is None else config.number(entry)
        for entry in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    scale = config.number("query_pre_attn_scalar") ** -0.5
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=windows, scale=scale)

    def attend(i: int, name: str) -> GQABlock:
        block = attention(i, name)
        few, many = (replace(op, softcap=score_cap) for op in (block.few, block.many))
        return replace(block, few=few, many=many)

    root = config.size("hidden_size") ** 0.5
    mlp = dense_mlp(build, act="gelu_tanh")
    return decoder_model(build, attend, mlp, FOUR_NORMS, embed_factor=root, logit_cap=logit_cap)
