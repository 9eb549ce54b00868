"""Opens the files of a GGUF model: one, or shards named `NAME-00001-of-00003.gguf`."""

from __future__ import annotations

from pathlib import Path

from inferplane.errors import CheckpointError, UsageError, first_of
from inferplane.files import AGAIN
from inferplane.gguf.header import MAX_TENSORS, GGUFHeader, read_header
from inferplane.gguf.metadata import ARCHITECTURE, TYPE
from inferplane.hub.gguf_files import SHARD, SUFFIX

MAX_SHARDS = 1024
KINDS = {
    "adapter": ("a LoRA adapter", "merge it into its base model with llama.cpp's llama-export-lora, and load that"),
    "imatrix": ("an importance matrix, which llama.cpp quantizes with", "name the model's own file"),
    "mmproj": ("the part of a multimodal model that reads images or sound", "name the file of its language model"),
    "vocab": ("a vocabulary without a model", "name the model's own file"),
}
"""`general.type` of files that hold no language model: words for the error, and what to do."""


def find_shards(path: Path) -> list[Path]:
    """The files of the model whose file, or one of whose shards, this is; those of shards in their order.

    Raises:
        CheckpointError: shards are missing; they are named.
    """
    found = SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise CheckpointError(f"{path} is one of {count} shards, which is not plausible.", remedy=AGAIN)
    names = [f"{found['name']}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} is one of {count} shards, of which {len(missing)} are not beside it: {first_of(missing)}.",
            remedy="fetch the missing files into the same folder",
        )
    return [path.parent / name for name in names]


def open_model(path: Path) -> GGUFHeader:
    """Read the headers of a model's files: the metadata of the first, and all tensors. No tensor is read.

    Raises:
        CheckpointError: a file is damaged, shards are missing, or do not belong together.
        UsageError: the file holds something else than a language model.
    """
    first, *others = find_shards(path)
    head = read_header(first)
    check_kind(first, head)
    tensors = dict(head.tensors)
    stated = head.metadata.get("split.count", 1)
    if type(stated) is int and stated not in (0, 1 + len(others)):
        raise CheckpointError(
            f"{first} is one of {stated} shards, but its name says otherwise.",
            remedy="give the files the names that they were published with (NAME-00001-of-00003.gguf)",
        )
    for number, other in enumerate(others, 1):
        part = read_header(other)
        if part.metadata.get("split.no", number) != number or part.metadata.get("split.count", stated) != stated:
            raise CheckpointError(f"{other} is another shard than its name says.", remedy=AGAIN)
        if twice := part.tensors.keys() & tensors.keys():
            raise CheckpointError(
                f"{other} holds tensors of an earlier shard: {first_of(sorted(twice))}.", remedy=AGAIN
            )
        tensors |= part.tensors
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"{first} and its shards have more than {MAX_TENSORS} tensors.", remedy=AGAIN)
    expected = head.metadata.get("split.tensors.count")
    if type(expected) is int and expected != len(tensors):
        raise CheckpointError(
            f"{first} says that there are {expected} tensors, but there are {len(tensors)}.", remedy=AGAIN
        )
    return GGUFHeader(head.metadata, tensors)


def check_kind(path: Path, head: GGUFHeader) -> None:
    """Refuse a file that holds no language model.

    Raises:
        UsageError: it holds an adapter, an importance matrix, a part for images, or a vocabulary.
    """
    kind = head.metadata.get(TYPE, "model")
    if head.metadata.get(ARCHITECTURE) == "clip":
        kind = "mmproj"
    if not isinstance(kind, str) or kind == "model":
        return
    what, remedy = KINDS.get(kind, (f"{kind[:64]!r}, which is not read", "name a model's file"))
    raise UsageError(f"{path} holds no language model, but {what}.", remedy=remedy)
