"""Makes the jobs of a benchmark: prompts, output lengths and arrival times."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inferplane.cli.verbs.bench.length_distribution import Lengths
from inferplane.errors import UsageError

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class BenchJob:
    """One request of a benchmark.

    Args:
        prompt: token ids.
        output_tokens: exact number of tokens to generate.
        due_s: when it arrives, in seconds after the first.
    """

    prompt: list[int]
    output_tokens: int
    due_s: float = 0.0


def random_jobs(count: int, prompts: Lengths, outputs: Lengths, ids: Sequence[int], seed: int) -> list[BenchJob]:
    """Make jobs with random lengths and token ids from `ids`. Equal arguments give equal jobs."""
    source = random.Random(seed)
    return [BenchJob(source.choices(ids, k=prompts.draw(source)), outputs.draw(source)) for _ in range(count)]


def read_jobs(path: Path, count: int | None, outputs: Lengths, encode: Encode, seed: int) -> list[BenchJob]:
    """Read jobs from a file: lines of text, or JSON lines with `prompt` (text or token ids) and maybe `output_len`.

    Args:
        path: the file; JSON lines when its name ends in .jsonl or .json.
        count: number of lines to take; None takes all.
        outputs: output lengths of lines without `output_len`.
        encode: text to token ids.
        seed: seed of the drawn lengths.

    Raises:
        UsageError: the file cannot be read or is empty, or a line has the wrong form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Dataset {path} cannot be read: {error}.", remedy="pass a file of UTF-8 text") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()][:count]
    if not lines:
        raise UsageError(f"Dataset {path} holds no line.", remedy="one prompt a line")
    source = random.Random(seed)
    jobs = []
    for number, line in lines:
        drawn = outputs.draw(source)
        entry: dict[str, Any] = {"prompt": line}
        if path.suffix in (".jsonl", ".json"):
            entry = _entry(path, number, line)
        prompt = entry["prompt"]
        ids = encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise UsageError(f"{path}:{number}: the prompt is empty.", remedy="remove the line, or write a prompt")
        jobs.append(BenchJob(ids, entry.get("output_len", drawn)))
    return jobs


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    remedy = '{"prompt": "text or token ids", "output_len": 64}, one a line'
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}:{number} is not JSON: {error}.", remedy=remedy) from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    listed = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or listed):
        raise UsageError(f"{path}:{number} has no prompt that is text or a list of token ids.", remedy=remedy)
    length = entry.get("output_len", 1)
    if type(length) is not int or length < 1:
        raise UsageError(f"{path}:{number}: output_len = {length!r}.", there_is="whole numbers from 1")
    return dict(entry)


def with_arrivals(jobs: Iterable[BenchJob], rate: float | None, seed: int) -> list[BenchJob]:
    """Set arrival times by a Poisson process of `rate` requests per second; None lets all arrive at once."""
    if rate is None:
        return [replace(job, due_s=0.0) for job in jobs]
    source, now, out = random.Random(seed), 0.0, []
    for i, job in enumerate(jobs):
        now += source.expovariate(rate) if i else 0.0
        out.append(replace(job, due_s=now))
    return out
