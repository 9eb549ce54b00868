"""The engine on an emulated device: its options, and the requests that it is sent."""

from __future__ import annotations

from typing import Any

import torch

from inferplane import LLM, SamplingParams
from tests.vendors.configs import FAMILIES

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "kv_cache_bytes": 1 << 23,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
}
IN_GROUPS = {"intermediate_size": 256, "moe_intermediate_size": 128}
PROMPTS = [[(7 * i + 3) % 199 for i in range(n)] for n in (130, 3, 61)]


def serve(device: str, dtype: torch.dtype, family: str, tokens: int = 12, **options: Any) -> Any:
    """Let a model answer all prompts at once, in so many tokens, and return the plan that it was served by. Quantized
    ones have whole groups of 128 columns."""
    dtype_name = str(dtype).removeprefix("torch.")
    config = {**FAMILIES[family], **(IN_GROUPS if "quantization" in options else {})}
    with LLM(config, device=device, dtype=dtype_name, **OPTIONS, **options) as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=tokens, temperature=0.0))
        plan = llm.explain()
    assert [len(result.token_ids) for result in results] == [tokens] * len(PROMPTS)
    return plan
