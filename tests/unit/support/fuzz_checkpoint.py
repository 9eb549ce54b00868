"""Checkpoint folders mutated at random: each is read in full or refused with a CheckpointError, and nothing else.

What is accepted is also given to the official library, which must accept it and read the same bytes.

python -m tests.unit.support.fuzz_checkpoint 100000      # that many, more than CI runs
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as official

from tests.unit.support.hostile import GOOD, TWO, attempt, entry, read_all, safetensors

INDEX, ONE, OTHER = "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"
SHARDED = {
    ONE: safetensors({"a": entry()}, bytes(range(8))),
    OTHER: safetensors({"b": entry(), "c": entry("BF16", (3, 2), (8, 20))}, bytes(range(20))),
    INDEX: json.dumps({"metadata": {"total_size": 28}, "weight_map": {"a": ONE, "b": OTHER, "c": OTHER}}).encode(),
}
TOKENS = [
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b"\\",
        b"\\u0000",
        b"\xff",
        b"\x00",
        b"null",
        b"true",
        b"NaN",
        b"1e999",
    ),
    *(b"-1", b"0", b"2", b"8", b"16", b"4294967296", b"18446744073709551616", b"dtype", b"shape", b"data_offsets"),
    *(b"__metadata__", b"F64", b"I8", b"BOOL", b"C64", b"weight_map", b"../", b".safetensors", b'"a":', b" " * 40),
]
SECONDS = 5.0


def mutated(draw: random.Random, content: bytes) -> bytes:
    """Bytes with a few of: a bit turned, bytes cut, doubled, moved, a token put in, the length changed, the end cut."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        at = draw.randrange(len(data) + 1)
        n = draw.choice((1, 1, 2, 4, 8, 30))
        kind = draw.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at : at + n]
        elif kind == 2:
            data[at:at] = data[at : at + n]
        elif kind == 3:
            piece = bytes(data[at : at + n])
            del data[at : at + n]
            to = draw.randrange(len(data) + 1)
            data[to:to] = piece
        elif kind == 4:
            data[at : at + draw.choice((0, 1, n))] = draw.choice(TOKENS)
        elif kind == 5 and len(data) >= 8:
            length = int.from_bytes(data[:8], "little") + draw.choice((-8, -1, 1, 2, 8))
            data[:8] = (length % 2**64).to_bytes(8, "little")
        elif kind == 6:
            del data[draw.randrange(len(data) + 1) :]
        else:
            data[at : at + n] = draw.randbytes(n)
    return bytes(data)


def restructured(draw: random.Random) -> bytes:
    """A well-formed header whose values are wrong, or just right."""
    header = {name: dict(e) for name, e in TWO.items()}
    size = 16
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice(("a", "b", "c"))
        e = header.setdefault(name, entry(shape=(0,), offsets=(size, size)))
        numbers = (0, 1, 2, 3, 4, 8, 12, 16, 24, -1, 2**32, 2**63, 2**64, 1.0, True, None, "8")
        kind = draw.randrange(4)
        if kind == 0:
            e["dtype"] = draw.choice(("F64", "F32", "BF16", "F8_E4M3", "I64", "U16", "BOOL", "C64", "F4", "", None, 3))
        elif kind == 1:
            e["shape"] = [draw.choice(numbers[: draw.choice((5, 17))]) for _ in range(draw.randrange(4))]
        elif kind == 2:
            e["data_offsets"] = [
                draw.choice(numbers[: draw.choice((8, 17))]) for _ in range(draw.choice((2, 2, 2, 1, 3)))
            ]
        else:
            header["__metadata__"] = draw.choice(({}, {"format": "pt"}, {"format": 1}, [], None))
    return safetensors(header, bytes(range(draw.choice((16, 16, 16, 8, 24)))))


def files(draw: random.Random) -> dict[str, bytes]:
    """One damaged folder."""
    kind = draw.randrange(4)
    if kind < 2:
        return {"model.safetensors": restructured(draw) if kind else mutated(draw, GOOD)}
    name = draw.choice((ONE, OTHER, INDEX) if kind == 2 else (INDEX,))
    return {**SHARDED, name: mutated(draw, SHARDED[name])}


def try_one(seed: int, folder: Path) -> bool:
    """Whether the folder made from this seed was accepted; raises when it was neither that nor refused as it should."""
    made = files(random.Random(seed))
    for name, content in made.items():
        (folder / name).write_bytes(content)
    began = time.process_time()
    found, error = attempt(lambda: read_all(folder))
    taken = time.process_time() - began
    assert taken < SECONDS, f"seed {seed} took {taken:.1f} s"
    for name in made:
        (folder / name).unlink()
    if error is not None:
        assert error.what.endswith(".") and (str(folder) in str(error) or "is in model-" in error.what), error
        return False
    want: dict[str, torch.Tensor] = {}
    for name, content in made.items():
        if name != INDEX:
            try:
                want |= official(content)
            except (SafetensorError, KeyError) as error:
                raise AssertionError(f"seed {seed}: the official library refuses it: {error}") from error
    assert found.keys() == want.keys(), seed
    for name, tensor in want.items():
        same = found[name].contiguous().view(-1).view(torch.uint8)
        assert tensor.shape == found[name].shape and tensor.dtype == found[name].dtype, (seed, name)
        assert torch.equal(same, tensor.contiguous().view(-1).view(torch.uint8)), (seed, name)
    return True


def main(runs: int, first: int) -> None:
    accepted = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + runs):
            accepted += try_one(seed, Path(folder))
    print(f"{runs} folders from seed {first}: {accepted} read, {runs - accepted} refused, nothing else")
    assert 0 < accepted < runs


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
