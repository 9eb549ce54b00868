"""Chooses among the GGUF files of a repository: by a file's name or a quantization's, with all shards of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from inferplane.errors import CheckpointError, UsageError, first_of

SUFFIX = ".gguf"
OTHER_PARTS = ("mmproj", "imatrix")
"""Words in names of files that hold no language model."""
SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def group_files(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among files.

    Returns:
        A model's name, without its suffix and the numbers of shards -> its files in their order.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(SUFFIX) and not any(word in name.lower() for word in OTHER_PARTS):
            shard = SHARD.fullmatch(name)
            found.setdefault(shard["name"] if shard else name.removesuffix(SUFFIX), []).append(name)
    return found


def choose_files(names: Iterable[str], part: str | None, full: str) -> list[str]:
    """The files of one model among those of a repository.

    Args:
        names: of the repository's files.
        part: a file's name, a model's name without suffix, or a quantization (`Q4_K_M`); None: the only model.
        full: the name that the user gave, for errors.

    Raises:
        UsageError: there is no such model, or several.
        CheckpointError: shards are missing.
    """
    models = group_files(names)
    chosen = sorted(models) if part is None else _match(models, part)
    if len(chosen) != 1:
        there = first_of(sorted(models), 12) if models else "no GGUF model"
        what = "holds no such GGUF file" if not chosen else f"may be {len(chosen)} GGUF models: {first_of(chosen)}"
        raise UsageError(
            f"{full} {what}.",
            there_is=there,
            remedy="name a file or a quantization behind a colon, as in hf:ORG/NAME:Q4_K_M",
        )
    files = models[chosen[0]]
    shard = SHARD.fullmatch(files[0])
    if shard is not None and [f"{n:05d}" for n in range(1, int(shard["count"]) + 1)] != _numbers(files):
        raise CheckpointError(
            f"{full} has {len(files)} of {int(shard['count'])} shards of {chosen[0]}.",
            remedy="choose another revision, or tell its publisher",
        )
    return files


def _numbers(files: Iterable[str]) -> list[str]:
    return [match["number"] for name in files if (match := SHARD.fullmatch(name))]


def _match(models: Mapping[str, list[str]], part: str) -> list[str]:
    """Names of the models that a user's word may mean."""
    for name, files in models.items():
        if part in files or part == name:
            return [name]
    expected = re.compile(rf"(?:^|[-._]){re.escape(part)}(?:$|[-.])", re.IGNORECASE)
    return sorted(name for name in models if expected.search(name))
