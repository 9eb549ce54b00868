"""The demo model's data: the running Python's standard library, its tokenizer and its batches."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_model import EOS, UsageError
from torch import Tensor

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2
HELD_OUT_PART = 25  # one file in this many is held out (4 %)
SKIP_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Generated tables, not code: they would spend capacity on numbers and names that nothing predicts.  The
# _sysconfigdata module is also written for one machine by its build.
SKIP_FILES = ("pydoc_data/topics.py", "html/entities.py")


def stdlib_files() -> list[tuple[str, str]]:
    """(path relative to the standard library, text) of every source file used, sorted by path."""
    root = Path(os.__file__).resolve().parent
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(d for d in folders if d not in SKIP_DIRS)
        for name in names:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if not name.endswith(".py") or path in SKIP_FILES or name.startswith("_sysconfigdata"):
                continue
            try:
                text = (root / path).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue  # a handful of files declare another encoding
            if path.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
                continue  # character maps: tables again
            if text.strip():
                files.append((path, text))
    if not files:
        raise UsageError(f"no Python sources under {root}: run this tool with a Python that has its standard library")
    return sorted(files)


def is_held_out(path: str) -> bool:
    """Whether a file is kept for evaluation: by a hash of its relative path, so the split never moves."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_PART == 0


def data_hash(files: list[tuple[str, str]]) -> str:
    """sha256 over the sorted paths and contents."""
    digest = hashlib.sha256()
    for path, text in files:
        digest.update(path.encode() + b"\0" + hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


# White space stands apart from words, newlines apart from indentation, and digits come one at a time: with a
# vocabulary this small, merges are better spent on words, and a small model predicts such tokens well.
SPLIT = r"_?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+"


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (`tokenizers.Tokenizer`) of exactly `vocab_size` entries."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    if tok.get_vocab_size() != vocab_size:
        raise UsageError(f"the texts gave {tok.get_vocab_size()} tokens, {vocab_size} are needed: use more text")
    return tok


@dataclasses.dataclass
class Dataset:
    """Tokens of every file, each ended by eos."""

    files: list[tuple[str, str]]
    tokenizer: Any
    train: list[np.ndarray]
    held: list[np.ndarray]
    held_bytes: int

    @classmethod
    def build(cls, vocab_size: int, tokenizer: Any = None) -> Dataset:
        """Read the standard library; train a tokenizer on the training part unless one is given."""
        files = stdlib_files()
        train = [text for path, text in files if not is_held_out(path)]
        held = [text for path, text in files if is_held_out(path)]
        tok = train_tokenizer(train, vocab_size) if tokenizer is None else tokenizer

        def encode(texts: list[str]) -> list[np.ndarray]:
            return [np.array([*e.ids, EOS], dtype=np.int32) for e in tok.encode_batch_fast(texts)]

        return cls(files, tok, encode(train), encode(held), sum(len(t.encode()) for t in held))


def dataset_of(folder: Path) -> Dataset:
    """The text under the tokenizer of a demo model's folder."""
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Dataset.build(tok.get_vocab_size(), tok)


class Batches:
    """Windows of training tokens, spread evenly over the text: `taken` is the position, and all the state there is.

    Window k starts at the fractional part of k times the golden ratio, times the length of the stream.  Whatever the
    windows' width, that covers the text evenly at any time, and neighbours in a batch come from different files: in
    text order the model would follow the file at hand instead of learning what files have in common.
    """

    GOLDEN = (5**0.5 - 1) / 2

    def __init__(self, files: list[np.ndarray], seed: int, taken: int = 0):
        rng = np.random.default_rng(seed)
        self.stream = np.concatenate([files[i] for i in rng.permutation(len(files))]).astype(np.int64)
        self.phase = float(rng.random())
        self.taken = taken

    def take(self, rows: int, width: int) -> Tensor:
        """The next windows [rows, width], int64."""
        place = (self.phase + self.GOLDEN * np.arange(self.taken, self.taken + rows)) % 1.0
        starts = (place * (len(self.stream) - width + 1)).astype(np.int64)
        self.taken += rows
        return torch.from_numpy(self.stream[starts[:, None] + np.arange(width)])
