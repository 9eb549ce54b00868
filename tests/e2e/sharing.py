"""What each rank runs: `torchrun ... tests/e2e/sharing.py MODEL OUT`. Rank 0 writes logits, tokens and bytes.

`share` runs it without torchrun, whose process and two more would each import torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
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
        found["overlapped"] = llm.engine.metrics.counters["overlapped_steps_total"]
        found["waits"] = dict(llm.engine.metrics.waits)
    torch.save(found, Path(out))


def run_rank(run: Callable[..., None], rank: int, size: int, port: int, words: tuple[str, ...]) -> None:
    """Call `run` as one of several ranks, with the variables that torchrun sets."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    run(*words)


def share(*words: object, seconds: float, ranks: int = 2, run: Callable[..., None] = main) -> None:
    """Call `run` on all ranks, forked from a process that has imported torch and Inferplane once for all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "inferplane.engine"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    texts = tuple(map(str, words))
    processes = [context.Process(target=run_rank, args=(run, i, ranks, port, texts)) for i in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks, f"exit codes of the ranks, None if one hangs: {codes}"


if __name__ == "__main__":
    main(*sys.argv[1:])
