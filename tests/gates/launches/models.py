"""Models of the decode bars, bound as they are asked for: in bfloat16, with FP8 weights, with FP8 altogether."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.shapes import FP8, REAL
from inferplane.engine import Runner
from tests.gates.launches.steps import planned

LAYERS = 3
"""Of each model: one dense layer and two further, since layers that are alike launch alike."""
CODED = {**FP8["quantization_config"], "activation_scheme": "dynamic"}
"""As DeepSeek's checkpoints ask for it."""
ROWS = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMS: dict[str, tuple[dict[str, Any], str | None]] = {
    "bf16": ({}, None),
    "FP8": (FP8, None),
    "FP8, coded": ({"quantization_config": CODED}, None),
    "FP8 rows, coded": ({"quantization_config": ROWS}, None),
    "FP8 and INT4, coded": ({}, "a8w8_fp8_wint4"),
    "INT8": ({}, "a8w8"),
}
"""Weights as they are stored, or as they are quantized while they are read; activations coded in FP8 or int8 where the
checkpoint or the scheme asks for it."""
OF_BOTH_KINDS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": LAYERS,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
    "vocab_size": 201_088, "max_position_embeddings": 8192, "rope_theta": 150000.0, "attention_bias": True,
    "tie_word_embeddings": False, "hidden_act": "silu", **OF_BOTH_KINDS,
}  # fmt: skip
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6,
    "vocab_size": 256_000, "max_position_embeddings": 8192, "rope_theta": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh", **OF_BOTH_KINDS,
}  # fmt: skip
"""Published sizes (config.json of gpt-oss-20b and gemma-2-9b), with fewer layers and positions."""
MODELS: dict[str, Callable[[], Runner]] = {
    f"{name}, {form}": partial(planned, {**config, "num_hidden_layers": LAYERS, **more}, quantization=scheme)
    for name, config in REAL.items()
    for form, (more, scheme) in FORMS.items()
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""As gpt-oss's checkpoints ask for it."""
MODELS["gpt-oss-20b, bf16"] = partial(planned, GPT_OSS)
MODELS["gpt-oss-20b, MXFP4"] = partial(planned, {**GPT_OSS, "quantization_config": MXFP4})
CODED_MODELS = {name: make for name, make in MODELS.items() if name.endswith("coded")}
DRAFTING: dict[str, Callable[[], Runner]] = {
    f"DeepSeek-V3 with MTP, {form}": partial(
        planned,
        {**REAL["DeepSeek-V3, 4 layers"], "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, **FORMS[form][0]},
        mtp=True,
        has_draft_layer=True,
        num_drafts=3,
    )
    for form in ("bf16", "FP8, coded")
}
"""With a layer behind them that drafts."""
