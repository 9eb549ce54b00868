"""Keeps what is derived from a GGUF file, its config and tokenizer, in a folder of the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferplane.errors import UsageError
from inferplane.gguf.tokenizer import write_tokenizer

FORMAT = 1
"""Raised when another content is derived from the same file."""
VOCABULARY = "tokenizer.ggml.model"
WITHOUT_VOCABULARY = (None, "none", "no_vocab")
"""The kinds of vocabulary of files without one: their models run on token ids."""


def cache_folder() -> Path:
    """Where derived files lie; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "inferplane" / "gguf"


def derive(path: Path, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    """Return a folder with a GGUF file's config.json and its tokenizer's files. Made at the first call for the file as
    it is; two processes may make it at once.

    Args:
        path: the model's file, or the first of its shards.
        metadata: the file's.
        config: entries of config.json.

    Raises:
        UsageError: nothing can be written.
        InferplaneError: as the tokenizer's writer, of metadata that are damaged or not understood.
    """
    found = path.resolve().stat()
    identity = f"{FORMAT}\0{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
    folder = cache_folder() / hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    try:
        _write(partial, metadata, config)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(folder: Path, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write the files of a folder."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if metadata.get(VOCABULARY) not in WITHOUT_VOCABULARY:
        write_tokenizer(metadata, folder)


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"The config and tokenizer of a GGUF file cannot be written to {folder}: {error.strerror or error}.",
        remedy="set XDG_CACHE_HOME to a folder of yours",
    )
