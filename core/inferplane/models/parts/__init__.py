"""Building blocks that several families share: attention, recurrent mixers, experts, the model around the layers."""

from inferplane.models.parts.attention import (
    LATENT_EPS,
    HeadNorms,
    Window,
    attention_with_gates,
    grouped_query_attention,
    latent_attention,
    layer_windows,
    sliding_window,
)
from inferplane.models.parts.experts import (
    SharedExperts,
    experts_per_token,
    fine_grained_experts,
    mixture_of_experts,
    softmax_experts,
)
from inferplane.models.parts.layers import (
    LAYERS,
    PRE_NORM,
    LayerForm,
    decoder_layer,
    decoder_model,
    dense_mlp,
    input_weights,
    layer_kinds,
    needs_stored_parts,
    norm_output_quant,
    plain_mlp,
)
from inferplane.models.parts.recurrent import gated_delta_net, mamba2, short_convolution
from inferplane.models.parts.rotation import Rotation, head_size, rotate_all, rotate_some, rotation

__all__ = [
    "LATENT_EPS",
    "LAYERS",
    "PRE_NORM",
    "HeadNorms",
    "LayerForm",
    "Rotation",
    "SharedExperts",
    "Window",
    "attention_with_gates",
    "decoder_layer",
    "decoder_model",
    "dense_mlp",
    "experts_per_token",
    "fine_grained_experts",
    "gated_delta_net",
    "grouped_query_attention",
    "head_size",
    "input_weights",
    "latent_attention",
    "layer_kinds",
    "layer_windows",
    "mamba2",
    "mixture_of_experts",
    "needs_stored_parts",
    "norm_output_quant",
    "plain_mlp",
    "rotate_all",
    "rotate_some",
    "rotation",
    "short_convolution",
    "sliding_window",
    "softmax_experts",
]
