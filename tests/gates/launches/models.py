"""Models of the decode bars, bound as they are asked for: in bfloat16 and with FP8 weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.shapes import FP8, REAL
from inferplane.engine import Runner
from tests.gates.launches.steps import planned

LAYERS = 3
"""Of each model: one dense layer and two further, since layers that are alike launch alike."""
MODELS: dict[str, Callable[[], Runner]] = {
    f"{name}, {form}": partial(planned, {**config, "num_hidden_layers": LAYERS, **more})
    for name, config in REAL.items()
    for form, more in (("bf16", {}), ("FP8", FP8))
}
