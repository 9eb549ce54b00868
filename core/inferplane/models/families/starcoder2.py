"""StarCoder 2."""

from __future__ import annotations

from inferplane.models.build import Build
from inferplane.models.parts import LayerForm, decoder_model, grouped_query_attention, plain_mlp, sliding_window
from inferplane.models.registry import architecture
from inferplane.ops import CausalLM, LayerNorm


@architecture(
    "Starcoder2ForCausalLM",
    model_type="starcoder2",
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
)
def starcoder2(build: Build) -> CausalLM:
    """StarCoder 2: layer norms, and an MLP without a gate; biases everywhere.

    Args:
        build: config, placement and weight formats. Weights are named as Hugging Face names them.

    Returns:
        The tree of ops; nothing is read or allocated.

    Raises:
        CheckpointError: the config lacks an entry or contradicts itself.
        UnsupportedModelError: an entry has a value that is not implemented.

    Source: arXiv 2402.19173.
    """
    bias = build.config.flag("use_bias")
    attention = grouped_query_attention(build, bias=bias, out_bias=bias, windows=sliding_window(build.config))
    mlp = plain_mlp(build, "gelu_tanh", bias=bias, names=("c_fc", "c_proj"))
    return decoder_model(build, attention, mlp, LayerForm(norm=_norm))


def _norm(build: Build, name: str, width: int) -> LayerNorm:
    return build.layer_norm(name, width, "norm_epsilon", bias=True)
