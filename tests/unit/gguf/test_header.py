"""Headers of GGUF files: what is read, and that damage is refused by name."""

from __future__ import annotations

import re
import struct
import time

import pytest

from inferplane.errors import CheckpointError, UsageError
from inferplane.gguf import read_header
from inferplane.gguf.shards import open_model
from tests.unit.gguf import mutations
from tests.unit.gguf.files import LLAMA, llama, random_blocks, write


def test_metadata_and_tensors(tmp_path):
    others = {"tokenizer.ggml.tokens": ["a", "ä", ""], "tokenizer.ggml.scores": [0.5, -1.0], "general.name": "x"}
    head = read_header(write(tmp_path / "a.gguf", llama("Q4_K"), others=others))
    assert head.metadata["llama.embedding_length"] == LLAMA["embedding_length"]
    assert head.metadata["tokenizer.ggml.tokens"] == ["a", "ä", ""]
    assert head.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0]
    entry = head.tensors["blk.0.attn_k.weight"]
    assert (entry.type.name, entry.shape, entry.nbytes) == ("Q4_K", (128, 256), 128 * 144)
    with open(entry.path, "rb") as file:
        file.seek(entry.start)
        assert file.read(entry.nbytes) == llama("Q4_K")["blk.0.attn_k.weight"][1].tobytes()


@pytest.mark.parametrize(
    ("at", "new", "words"),
    [
        (0, b"GGML", "begins with b'GGML'"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**40), "tensors and"),
        (16, struct.pack("<Q", 2**40), "keys"),
        (24, struct.pack("<Q", 2**60), "a string of"),
    ],
)
def test_a_damaged_beginning(tmp_path, at, new, words):
    data = bytearray(write(tmp_path / "a.gguf", llama()).read_bytes())
    data[at : at + len(new)] = new
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read_header(tmp_path / "a.gguf")


def change(data: bytes, name: bytes, at: int, new: bytes) -> bytes:
    """A file in which the bytes at a distance behind a tensor's name are replaced."""
    found = data.index(name) + len(name) + at
    return data[:found] + new + data[found + len(new) :]


@pytest.mark.parametrize(
    ("at", "new", "words"),
    [
        (0, struct.pack("<I", 9), "9 dimensions"),
        (4, struct.pack("<Q", 2**62), "shape"),
        (4, struct.pack("<Q", 100), "blocks have 256"),
        (20, struct.pack("<I", 16), "IQ2_XXS, which is not read"),
        (20, struct.pack("<I", 99), "type 99 does not exist"),
        (24, struct.pack("<Q", 32), "is at byte 32"),
        (24, struct.pack("<Q", 2**63), "leaves off at"),
    ],
)
def test_a_damaged_tensor(tmp_path, at, new, words):
    data = write(tmp_path / "a.gguf", llama()).read_bytes()
    (tmp_path / "a.gguf").write_bytes(change(data, b"blk.0.attn_q.weight", at, new))
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read_header(tmp_path / "a.gguf")


def test_a_truncated_file(tmp_path):
    path = write(tmp_path / "a.gguf", llama())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="ends at byte"):
        read_header(path)


def test_names_that_are_there_twice(tmp_path):
    data = write(tmp_path / "a.gguf", llama()).read_bytes()
    (tmp_path / "a.gguf").write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(CheckpointError, match="is there twice"):
        read_header(tmp_path / "a.gguf")
    twice = data.replace(b"llama.attention.head_count_kv", b"llama.attention.head_count\x00\x00\x00")
    (tmp_path / "a.gguf").write_bytes(twice)
    with pytest.raises(CheckpointError, match="for a key"):
        read_header(tmp_path / "a.gguf")


@pytest.mark.parametrize("alignment", [0, 7, 2**20])
def test_an_impossible_alignment(tmp_path, alignment):
    path = write(tmp_path / "a.gguf", llama(), others={"general.alignment": 32})
    path.write_bytes(change(path.read_bytes(), b"general.alignment", 4, struct.pack("<I", alignment)))
    with pytest.raises(CheckpointError, match="no power of 2"):
        read_header(path)


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [("adapter", "llama", "LoRA"), ("imatrix", "llama", "importance matrix"), ("mmproj", "clip", "images or sound")],
)
def test_files_without_a_language_model(tmp_path, kind, architecture, words):
    path = write(tmp_path / "a.gguf", {}, {}, architecture, {"general.type": kind})
    with pytest.raises(UsageError, match=words):
        open_model(path)


def test_shards(tmp_path):
    tensors = llama("Q8_0")
    names = sorted(tensors)
    for number, part in enumerate((names[:4], names[4:])):
        numbers = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        entries = None if number == 0 else {}
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        write(path, {name: tensors[name] for name in part}, entries, others=numbers)
    head = open_model(tmp_path / "m-00001-of-00002.gguf")
    assert head.tensors.keys() == tensors.keys()
    assert head.tensors[names[-1]].path.name == "m-00002-of-00002.gguf"
    (tmp_path / "m-00002-of-00002.gguf").rename(tmp_path / "lost")
    with pytest.raises(CheckpointError, match=r"not beside it: m-00002-of-00002\.gguf"):
        open_model(tmp_path / "m-00001-of-00002.gguf")


def test_mutated_files_are_read_or_refused():
    refused, most, grown = mutations.run(300, seed=0)
    assert refused > 150
    assert most <= mutations.MOST_SECONDS and grown <= mutations.MOST_BYTES


@pytest.mark.parametrize(("kind", "count", "one"), [(8, 2**20, bytes(8)), (4, 2**22, bytes(4)), (7, 2**20, b"\1")])
def test_large_arrays_take_bounded_time_and_memory(tmp_path, kind, count, one):
    """A million empty strings, four million numbers, or a million truth values, and a damaged header behind them."""
    data = write(tmp_path / "a.gguf", {"token_embd.weight": ("F32", random_blocks("F32", (4, 32)))}, {}).read_bytes()
    start = data.index(b"token_embd") - 8
    keys = struct.unpack("<Q", data[16:24])[0]
    path = tmp_path / "large.gguf"
    for more in (0, 2**24):
        array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, kind, count + more) + one * count
        path.write_bytes(data[:16] + struct.pack("<Q", keys + 1) + data[24:start] + array + data[start:])
        begun = time.process_time()
        with pytest.raises(CheckpointError, match=r"damaged header|ends at byte"):
            read_header(path)
        assert time.process_time() - begun <= mutations.MOST_SECONDS
