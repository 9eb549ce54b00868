"""Mutates GGUF files and reads them: each is read, or refused by a typed error, in bounded time and memory.

python -m tests.unit.gguf.mutations --count 10000 --seed 1
"""

from __future__ import annotations

import argparse
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from inferplane.errors import InferplaneError
from inferplane.gguf.opened import GGUFModel
from inferplane.models.reading.gguf_source import GGUFSource
from inferplane.types import Shard
from tests.unit.gguf.files import llama, write

MOST_SECONDS, MOST_BYTES = 1.0, 400 * 2**20
EXTREMES = (0, 1, 2**7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
TOKENS = [f"token {i}" for i in range(40)]


def make_files(folder: Path) -> list[bytes]:
    """The files that are mutated."""
    others = {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": [0.5] * 40, "tokenizer.ggml.merges": TOKENS}
    return [write(folder / f"{kind}.gguf", llama(kind), others=others).read_bytes() for kind in ("Q4_K", "Q8_0", "F16")]


def mutate(data: bytes, random: np.random.Generator) -> bytes:
    """A file with some bytes changed, most of them in its header; or cut, or with a piece twice."""
    header = data.index(b"output_norm") + 2000
    out = bytearray(data)
    for _ in range(random.integers(1, 4)):
        end = header if random.random() < 0.9 else len(out)
        at = int(random.integers(0, max(1, min(end, len(out)))))
        match int(random.integers(0, 6)):
            case 0:
                out[at : at + 1] = bytes([random.integers(0, 256)])
            case 1:
                out[at : at + 8] = struct.pack("<Q", EXTREMES[random.integers(0, len(EXTREMES))])
            case 2:
                out[at : at + 4] = struct.pack("<I", EXTREMES[random.integers(0, len(EXTREMES))] % 2**32)
            case 3:
                del out[at:]
            case 4:
                size = int(random.integers(1, 64))
                out[at:at] = out[at : at + size]
            case _:
                del out[at : at + int(random.integers(1, 64))]
    return bytes(out)


def read_whole(path: Path) -> None:
    """Read a file as loading it would: header, config, every tensor."""
    model = GGUFModel.open(path)
    _ = model.entries
    source = GGUFSource(model.header, model.meta)
    try:
        for name in source.names():
            shape = source.shape(name)
            assert shape is not None
            source.read_into(name, torch.empty(shape), Shard())
    finally:
        source.close()


def run(count: int, seed: int) -> tuple[int, float, int]:
    """Read mutated files.

    Returns:
        How many were refused, the most seconds of the processor for one, and the bytes by which memory grew.
    """
    random = np.random.default_rng(seed)
    refused, most = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder))
        path = Path(folder) / "mutated.gguf"
        path.write_bytes(files[0])
        read_whole(path)  # imports what reading imports
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in range(count):
            path.write_bytes(mutate(files[number % len(files)], random))
            start = time.process_time()
            try:
                with np.errstate(all="ignore"):  # damaged scales may be infinite
                    read_whole(path)
            except InferplaneError:
                refused += 1
            most = max(most, time.process_time() - start)
    return refused, most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def main() -> int:
    """Run, and print what was seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    refused, most, grown = run(options.count, options.seed)
    print(f"{options.count} files, {refused} refused, at most {most:.3f} s and {grown / 2**20:.0f} MB")
    return int(most > MOST_SECONDS or grown > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
