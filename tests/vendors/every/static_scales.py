"""A checkpoint with static scales in FP8 on an emulated device: its results beside the cpu's, and `explain`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, SamplingParams
from inferplane.engine import InferplaneWarning
from tests.vendors.every.checkpoints import write_checkpoint

PROMPT = list(range(3, 83))
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def run(folder: Path, device: str, kv_cache_dtype: str) -> tuple[Any, ...]:
    """Logits of a prompt, each layer's scales, and what `explain` says of them and of the layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferplaneWarning)
        with LLM(folder, device=device, dtype="bfloat16", max_model_len=256, kv_cache_dtype=kv_cache_dtype) as llm:
            assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 8
            said, logits = llm.explain(), llm.logits(PROMPT)[0].float()
            scales = [getattr(kv, "scale_values", None) for kv in llm.engine.runner.cache.layers]
    return logits, scales, said.get("kv_scales"), {layout["layout"] for layout in said["kv_layouts"]}


def check_fp8(folder: Path, device: str, config: dict[str, Any], layout: str, scales: tuple[float, ...]) -> None:
    """The device takes the checkpoint's scales, and computes what the cpu does with them; without any they are 1."""
    made = write_checkpoint(folder / "fp8", config, "fp8", (*scales, scales[0])[:2])
    logits, found, said, layouts = run(made, device, "fp8")
    assert layouts == {layout} and said["used"]
    assert found == [pytest.approx([scale * n for scale in scales]) for n in range(1, len(found) + 1)]
    by_torch, same, _, _ = run(made, "cpu", "fp8_static")
    assert same == found and (logits - by_torch).norm() < 0.05 * by_torch.norm()
    _, found, said, layouts = run(write_checkpoint(folder / "plain", config), device, "fp8")
    assert layouts == {layout} and not said["used"] and {scale for pair in found for scale in pair} == {1.0}
