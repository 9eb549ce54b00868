"""The cache of huggingface_hub: its folders of repositories, snapshots of commits, and blobs under their hashes.

models--ORG--NAME/refs/main                 the commit of a branch
models--ORG--NAME/snapshots/COMMIT/FILE  -> ../../blobs/DIGEST
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from inferplane.errors import InferplaneError
from inferplane.hub.gguf_files import choose_files, group_files
from inferplane.hub.names import ModelName
from inferplane.hub.repository import (
    CONFIG,
    DEFAULT_REVISION,
    INDEX_PATTERN,
    PARAMS,
    SINGLE,
    SUFFIX,
    has_vocabulary,
)

COMMIT = re.compile(r"[0-9a-f]{40}")
INCOMPLETE = ".incomplete"
_PREFIX = "models--"


@dataclass(frozen=True)
class CachedSnapshot:
    """A commit of a repository in the cache.

    Args:
        folder: holds its files.
        commit: 40 hexadecimal digits.
    """

    folder: Path
    commit: str

    @property
    def has_config(self) -> bool:
        """Whether a config is there."""
        return any((self.folder / name).is_file() for name in (CONFIG, PARAMS))

    @property
    def has_weights(self) -> bool:
        """Whether all weights are there: one file, or all that the index names, or a file without an index."""
        if (self.folder / SINGLE).is_file():
            return True
        names = sorted(path.name for path in self.folder.glob(f"*{SUFFIX}*"))
        indexes = [name for name in names if fnmatchcase(name, INDEX_PATTERN)]
        if not indexes:
            return any(name.endswith(SUFFIX) and (self.folder / name).is_file() for name in names)
        try:
            shards = set(json.loads((self.folder / indexes[0]).read_bytes())["weight_map"].values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        return bool(shards) and all((self.folder / str(name)).is_file() for name in shards)

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer's vocabulary is there."""
        return has_vocabulary(self.folder, Path.is_file)

    @property
    def is_whole(self) -> bool:
        """Whether all is there that running the model reads."""
        return (self.has_config and self.has_weights and self.has_tokenizer) or (
            not self.has_config and bool(group_files(path.name for path in self.folder.iterdir() if path.is_file()))
        )

    def find_gguf(self, name: ModelName) -> str | None:
        """The GGUF file that a name chooses, or its first shard; None if it is not there, or shards are missing."""
        try:
            return choose_files((p.name for p in self.folder.iterdir() if p.is_file()), name.part, name.full)[0]
        except InferplaneError:
            return None

    def files(self) -> dict[str, int]:
        """File name -> bytes."""
        return {path.name: path.stat().st_size for path in sorted(self.folder.iterdir()) if path.is_file()}


class RepositoryCache:
    """The folder of one repository in the cache; it need not exist.

    Args:
        cache: the cache's folder.
        repository: organization and name.
    """

    def __init__(self, cache: Path, repository: str) -> None:
        name = f"{_PREFIX}{repository.replace('/', '--')}"
        self.folder = cache / name
        self.blobs = self.folder / "blobs"
        self.snapshots = self.folder / "snapshots"
        self.locks = cache / ".locks" / name

    def find(self, revision: str | None) -> CachedSnapshot | None:
        """The snapshot of a branch, tag or commit; None: the cache has none."""
        commit = revision or DEFAULT_REVISION
        if COMMIT.fullmatch(commit) is None:
            try:
                commit = (self.folder / "refs" / commit).read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError):
                return None
        folder = self.snapshots / commit
        return CachedSnapshot(folder, commit) if COMMIT.fullmatch(commit) and folder.is_dir() else None

    def list_snapshots(self) -> list[CachedSnapshot]:
        """All snapshots, by commit."""
        if not self.snapshots.is_dir():
            return []
        found = sorted(path for path in self.snapshots.iterdir() if COMMIT.fullmatch(path.name) and path.is_dir())
        return [CachedSnapshot(path, path.name) for path in found]

    def list_references(self) -> dict[str, str]:
        """Branch or tag -> its commit."""
        refs = self.folder / "refs"
        out = {}
        for path in sorted(refs.rglob("*")) if refs.is_dir() else []:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if path.is_file():
                    out[str(path.relative_to(refs))] = path.read_text(encoding="ascii").strip()
        return out

    def link(self, commit: str, name: str, digest: str) -> None:
        """Give a blob its name in a snapshot."""
        folder = self.snapshots / commit
        folder.mkdir(parents=True, exist_ok=True)
        path, blob = folder / name, self.blobs / digest
        if path.exists() and path.samefile(blob):
            return
        partial = folder / f".{name}.{secrets.token_hex(4)}"
        try:
            try:
                partial.symlink_to(os.path.relpath(blob, folder))
            except OSError:  # a file system without links
                shutil.copyfile(blob, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def write_reference(self, revision: str | None, commit: str) -> None:
        """Note which commit a branch or tag has; a commit needs no note."""
        revision = revision or DEFAULT_REVISION
        if COMMIT.fullmatch(revision):
            return
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_text(commit, encoding="ascii")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def size(self) -> int:
        """Bytes on disk, of half a download too."""
        if not self.blobs.is_dir():
            return 0
        return sum(path.lstat().st_size for path in self.blobs.iterdir() if path.is_file())

    def remove(self) -> int:
        """Remove the repository; returns the bytes that become free."""
        freed = self.size()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.locks, ignore_errors=True)
        return freed

    def remove_snapshot(self, commit: str) -> int:
        """Remove one snapshot, its references, and the blobs that no other one has; returns the bytes freed."""
        others = [s for s in self.list_snapshots() if s.commit != commit]
        used = {path.resolve().name for s in others for path in s.folder.rglob("*")}
        mine = {path.resolve() for path in (self.snapshots / commit).rglob("*") if path.is_symlink()}
        for name, value in self.list_references().items():
            if value == commit:
                (self.folder / "refs" / name).unlink(missing_ok=True)
        shutil.rmtree(self.snapshots / commit)
        freed = 0
        for blob in mine:
            if blob.name not in used and blob.parent == self.blobs.resolve() and blob.is_file():
                freed += blob.stat().st_size
                blob.unlink()
        return freed


def list_repositories(cache: Path) -> Iterator[tuple[str, RepositoryCache]]:
    """Yield the repositories of models in the cache: the name of each, and its folder."""
    if not cache.is_dir():
        return
    for path in sorted(cache.glob(f"{_PREFIX}*")):
        repository = path.name.removeprefix(_PREFIX).replace("--", "/")
        if path.is_dir():
            yield repository, RepositoryCache(cache, repository)
