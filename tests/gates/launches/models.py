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
MODELS: dict[str, Callable[[], Runner]] = {
    f"{name}, {form}": partial(planned, {**config, "num_hidden_layers": LAYERS, **more}, quantization=scheme)
    for name, config in REAL.items()
    for form, (more, scheme) in FORMS.items()
}
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
