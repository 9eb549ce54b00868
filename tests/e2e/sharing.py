"""What each rank runs: `torchrun ... tests/e2e/sharing.py MODEL OUT`. Rank 0 writes logits, tokens and bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from inferplane import LLM, SamplingParams
from tests.e2e.tiny_models import prompts

LENGTHS = (70, 9, 1, 33)


def answers(llm: LLM) -> dict[str, object]:
    """Logits of whole and cut prompts, 64 greedy tokens of each, and their embeddings."""
    many = prompts(llm.engine.vocab, LENGTHS)
    logits = [*llm.logits(many), *llm.logits(many[:2], chunk_tokens=7)]
    results = llm.generate(many, SamplingParams(max_tokens=64, temperature=0))
    vectors = torch.tensor([llm.embed(many, pooling, normalize=False) for pooling in ("last", "mean")])
    return {"logits": logits, "tokens": [r.token_ids for r in results], "vectors": vectors}


def main(model: str, out: str, options: str = "{}") -> None:
    with LLM(
        model, device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48, **json.loads(options)
    ) as llm:
        assert llm.runner.ranks is not None
        found = {**answers(llm), "bytes": llm.runner.ranks.weight_bytes}
        found["again"] = answers(llm)["tokens"]
        found["accepted"] = llm.engine.metrics.counters["spec_decode_num_accepted_tokens_total"]
    torch.save(found, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
