"""Base and prediction layers in formats of their own, paired as in the source system's tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.ranks import launcher_ranks
from tests.e2e.checkpoints import FP8, edit_config, encode_fp8
from tests.e2e.drafters import mtp_alone, with_mtp
from tests.e2e.sharing import share
from tests.e2e.tiny_models import deepseek_config, prompts, random_model

SECONDS = 240
PAIRS: dict[str, tuple[str, str | None, str, str | None]] = {
    "int4 x int8": ("model", "weight_only_int4", "mtp", "weight_only_int8"),
    "int8 x int8": ("model", "weight_only_int8", "mtp", "weight_only_int8"),
    "fp8 x fp8": ("model-fp8", None, "mtp-fp8", None),
    "fp8_wint4 x fp8": ("model", "a8w8_fp8_wint4", "mtp-fp8", None),
}
"""Base x MTP, as the source system pairs them for DeepSeek-V3 and R1: the first three in its page on speculative
decoding, the last one in that on serving. Each is a folder and the scheme by which it is quantized while it is read."""
SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 128, "v_head_dim": 128},
}
"""Four ranks divide them in whole blocks."""
MTP = {"method": "mtp", "num_speculative_tokens": 2, "verify_strategy": "target_match"}
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 11, "top_p": 0.95})


def make_folders(at: Path) -> Path:
    """Write a checkpoint with a prediction layer that is right now and then, in bfloat16 and in FP8, and that layer
    alone in both; returns the folder of all four.
    """
    random_model(deepseek_config(**SIZES), seed=3).to(torch.bfloat16).save_pretrained(at / "model")
    with_mtp(at / "model", follows_tokens=True)
    shutil.copytree(at / "model", at / "model-fp8")
    stored, _ = encode_fp8(load_file(at / "model" / "model.safetensors"))
    save_file(stored, at / "model-fp8" / "model.safetensors")
    edit_config(at / "model-fp8", quantization_config=FP8)
    for name in ("model", "model-fp8"):
        mtp_alone(at / name, at / name.replace("model", "mtp"))
    return at


def decode(llm: LLM, config: dict[str, Any] | None) -> list[list[int]]:
    """Greedy and seeded tokens of several sequences at once, by a method."""
    llm.set_speculation(config)
    each = [[*p, *p] for p in prompts(llm.engine.vocab, (20, 9, 33))]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kind) for kind in SAMPLING]
    return [result.token_ids for one in params for result in llm.generate(each, one)]


def run_pair(at: str, pair: str, out: str) -> None:
    """What each rank runs; rank 0 writes tokens with and without drafts, and what was drafted and accepted.

    In bfloat16 by kernels whose rounding does not depend on the batch. That of a sum over four ranks does, so these run
    in float32, where rounding decides nothing.
    """
    base, scheme, mtp, own = PAIRS[pair]
    config = {**MTP, "model": f"{at}/{mtp}", "draft_quantization": own}
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 48}
    options |= {"dtype": "float32"} if launcher_ranks()[1] > 2 else {"dtype": "bfloat16", "deterministic": True}
    with LLM(f"{at}/{base}", quantization=scheme, speculative_config=config, **options) as llm:
        layers = llm.runner.base.layers, llm.runner.model.mtp[0].layer
        formats = [{w.format.partition("_")[0] for _, w in op.weights()} - {"plain"} for op in layers]
        drafted, stats = decode(llm, config), llm.engine.stats()
        plain = decode(llm, None)
        by_ngram = decode(llm, {"method": "ngram", "verify_strategy": "target_match"})
        counts = [stats[f"spec_decode_num_{x}_tokens_total"] for x in ("draft", "accepted")]
        size = 1 if llm.runner.ranks is None else llm.runner.ranks.size
    found = {"tokens": [drafted, plain, by_ngram], "counts": counts, "formats": formats, "ranks": size}
    torch.save(found, Path(out))


def check_pair(at: Path, pair: str, ranks: int, out: Path) -> str:
    """The tokens are those of plain decoding of the same base on as many ranks, and drafts are accepted. Returns how
    many, in words.
    """
    if ranks == 1:
        run_pair(str(at), pair, str(out))
    else:
        share(at, pair, out, seconds=SECONDS, ranks=ranks, run=run_pair)
    found = torch.load(out)
    drafted, plain, by_ngram = found["tokens"]
    assert drafted == plain == by_ngram
    assert found["ranks"] == ranks
    drafts, accepted = found["counts"]
    assert 0 < accepted < drafts
    base, mtp = pair.split(" x ")
    assert found["formats"] == [{"fp8", "int4"} if base == "fp8_wint4" else {base}, {mtp}]
    acceptance = f"{accepted} of {drafts} drafts accepted"
    print(f"{pair} on {ranks} rank(s): {acceptance}")
    return acceptance
