"""What each rank runs: `torchrun ... tests/e2e/sharing.py MODEL OUT`. Rank 0 writes logits, tokens and bytes.

`share` runs it without torchrun, whose process and two more would each import torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
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


def run_rank(rank: int, port: int, words: tuple[str, ...]) -> None:
    """Run `main` as one of two ranks, with the variables that torchrun sets."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    main(*words)


def share(*words: object, seconds: float) -> None:
    """Run `main` on two ranks, forked from a process that has imported torch and Inferplane once for all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "inferplane.engine"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=run_rank, args=(i, port, tuple(map(str, words)))) for i in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(seconds)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0, 0], f"exit codes of the ranks, None if one hangs: {codes}"


if __name__ == "__main__":
    main(*sys.argv[1:])
