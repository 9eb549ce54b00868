"""The memory table of PaddleNLP's deployment page: 8 rows of DeepSeek-R1 on cards of 80 GB, as `estimate` has them.

The page states tokens (BLOCK_BS x 8K) and no bytes. Its recommendations are half to two thirds of what fits here; what
takes the rest there, it does not say. Here prompts are computed in steps, and nothing is reserved.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.shapes import FP8, REAL
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.runner.estimate import Estimate, estimate
from inferplane.engine.runner.sizes.sizing import count_cache_tokens
from inferplane.plugins import host

GIB = 2**30
MAX_SEQ_LEN = 8192
R1 = {**REAL["DeepSeek-V3, 4 layers"], "num_hidden_layers": 61, "first_k_dense_replace": 3}
R1 |= {"num_nextn_predict_layers": 1, "max_position_embeddings": MAX_SEQ_LEN}
PARAMETERS = 671e9
ROWS = [
    ("a8w8_fp8_wint4", None, 8, 40),
    ("a8w8_fp8_wint4", "a8w8_fp8", 8, 36),
    ("weight_only_int4", None, 8, 40),
    ("weight_only_int4", "weight_only_int8", 8, 36),
    ("a8w8_fp8", None, 16, 50),
    ("a8w8_fp8", "a8w8_fp8", 16, 36),
    ("weight_only_int8", None, 16, 40),
    ("weight_only_int8", "weight_only_int8", 16, 36),
]
"""Quantization, that of MTP or None without it, cards, and the BLOCK_BS that the page recommends."""


@cache
def of(scheme: str, draft: str | None, cards: int) -> Estimate:
    stored = scheme == "a8w8_fp8" and draft in (None, scheme)  # the checkpoint is published so
    options = RunnerOptions(
        dtype="bfloat16",
        quantization=None if stored else scheme,
        draft_quantization=None if stored else draft,
        mtp=draft is not None,
        ranks=cards,
        load_format="dummy",
    )
    runner = Runner.plan_only(ModelFiles({**R1, **(FP8 if stored else {})}), host(), "cuda", options)
    return estimate(runner, 80 * GIB, MAX_SEQ_LEN)


@pytest.mark.parametrize(("scheme", "draft", "cards", "block_bs"), ROWS)
def test_a_row_of_the_table(scheme, draft, cards, block_bs):
    found = of(scheme, draft, cards)
    tokens = count_cache_tokens(block_bs, MAX_SEQ_LEN)
    assert tokens == pytest.approx(block_bs * 8 * 1024, rel=0.05), "as the page counts: 8K x 40 = 320K"
    cache_bytes = tokens // found.block_tokens * found.block
    assert found.left is not None
    assert found.weights + found.workspace + cache_bytes <= 80 * GIB, "what the page recommends fits"
    fits = found.size(found.left)
    assert block_bs <= fits.block_bs < 2 * block_bs
    assert found.kv_token == 576 * 2 * (61 + (draft is not None)), "latents and rotary part, in bfloat16, of each layer"
    assert (found.draft_weights > 0) == (draft is not None)
    base = found.weights - found.draft_weights
    bits = 8 * base * cards / PARAMETERS
    assert 3.9 < bits < 5.2 if "int4" in scheme else 7.9 < bits < 9.0, "parameters x bits, and what is on every card"
    figures = (base, found.draft_weights, found.workspace, cache_bytes, found.left)
    words = ("weights", "MTP", "activations at 8K", "cache", "left for the cache")
    print(f"{scheme} x {cards}:", ", ".join(f"{w} {n / GIB:.2f} GiB" for w, n in zip(words, figures)), fits.block_bs)
