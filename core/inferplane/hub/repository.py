"""What a repository on a hub holds, and which of its files are read.

The protocol is that of Hugging Face: `/api/models/NAME/revision/REVISION?blobs=true` lists files with sizes and hashes,
and `/NAME/resolve/COMMIT/FILE` gives one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inferplane.errors import CheckpointError, DownloadError, UsageError, first_of
from inferplane.hub.connection import HubConnection
from inferplane.hub.gguf_files import SUFFIX as GGUF
from inferplane.hub.gguf_files import choose_files
from inferplane.hub.names import ModelName, near_short_names
from inferplane.hub.paddle_files import refuse_paddle_files

CONFIG, PARAMS = "config.json", "params.json"
CONFIGS = (
    *(CONFIG, "generation_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"),
    "hf_quant_config.json",
)
TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
TOKENIZER_PATTERNS = ("*.model", "*.model.v*", "*.tiktoken")
"""Files with a tokenizer's vocabulary, by their names and by patterns."""

SINGLE, INDEX_PATTERN, SUFFIX = "model.safetensors", "*.safetensors.index*.json", ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
DEFAULT_REVISION = "main"
MAX_SMALL_BYTES = 2**29
"""Largest file beside the weights: the largest known tokenizer has 34 MB."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.+=-]*", re.ASCII)
"""Names of files in the top folder that may be read."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA1, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
ReadFile = Callable[["RemoteFile"], bytes]


def has_vocabulary(folder: Path, is_there: Callable[[Path], bool] = os.path.lexists) -> bool:
    """Whether a folder holds a file with a tokenizer's vocabulary. Without one, several classes of transformers invent
    a tokenizer of a few special tokens.

    Args:
        folder: the model's.
        is_there: whether a path counts as a file. By default a broken link does: loading it says what is broken.
    """
    named = any(is_there(folder / name) for name in VOCABULARIES)
    return named or any(any(folder.glob(pattern)) for pattern in TOKENIZER_PATTERNS)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Args:
        name: in the top folder.
        size: bytes.
        digest: SHA-256 of its content if `is_large`, else git's SHA-1 of it; the cache stores it under this name.
        is_large: it is in Git LFS.
    """

    name: str
    size: int
    digest: str
    is_large: bool


@dataclass(frozen=True)
class Repository:
    """One commit of a repository.

    Args:
        name: the model's.
        commit: 40 hexadecimal digits.
        files: in the top folder; subfolders are not read.
        license: as its card states it; empty: it states none.
        gated: access has to be granted.
    """

    name: ModelName
    commit: str
    files: tuple[RemoteFile, ...]
    license: str = ""
    gated: bool = False

    def find(self, name: str) -> RemoteFile | None:
        """The file of a name."""
        return next((file for file in self.files if file.name == name), None)

    def small_files(self) -> list[RemoteFile]:
        """Configs, tokenizer and chat template, all that is read beside weights.

        Raises:
            CheckpointError: there is no config, or one of these files is too large.
        """
        names = {*CONFIGS, *TOKENIZERS} | ({PARAMS} if self.find(CONFIG) is None else set())
        found = [f for f in self.files if f.name in names or any(fnmatchcase(f.name, p) for p in TOKENIZER_PATTERNS)]
        found = [f for f in found if not f.name.startswith(".")]
        for file in found:
            if file.size > MAX_SMALL_BYTES:
                raise CheckpointError(
                    f"{file.name} of {self.name.full} has {file.size} bytes, which is not plausible.",
                    there_is=f"at most {MAX_SMALL_BYTES} bytes for such a file",
                )
        return found

    def configs(self) -> list[RemoteFile]:
        """The files that a plan without weights reads."""
        return [file for file in self.small_files() if file.name in (*CONFIGS, PARAMS)]

    def weight_files(self, read: ReadFile) -> list[RemoteFile]:
        """The safetensors files that are read, as `SafetensorsFolder` chooses them, with their index in front.

        Args:
            read: returns the content of a small file.

        Raises:
            CheckpointError: there are none, or the index names files that are not there.
        """
        self.check_kind()
        single = self.find(SINGLE)
        if single is not None:
            return [single]
        indexes = [file for file in self.files if fnmatchcase(file.name, INDEX_PATTERN)]
        index = self.find(f"{SINGLE}.index.json") or (indexes[0] if len(indexes) == 1 else None)
        tensors = [file for file in self.files if file.name.endswith(SUFFIX)]
        if index is None:
            return [file for file in tensors if not file.name.startswith("consolidated")] or tensors
        names = _shards(read(index), f"{index.name} of {self.name.full}")
        missing = [name for name in names if self.find(name) is None]
        if missing:
            raise CheckpointError(
                f"{index.name} of {self.name.full} names {len(missing)} file(s) that are not there: "
                f"{first_of(missing, 3)}.",
                remedy="choose another revision, or tell its publisher",
            )
        return [index, *(file for file in self.files if file.name in names)]

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file: the name chooses one, or there are no other weights."""
        names = [file.name for file in self.files]
        has_files, has_tensors = (any(name.endswith(suffix) for name in names) for suffix in (GGUF, SUFFIX))
        return self.name.part is not None or (has_files and not has_tensors)

    def gguf_files(self) -> list[RemoteFile]:
        """The GGUF file that the name chooses, or all its shards.

        Raises:
            UsageError: there is none, or there are several. CheckpointError: shards are missing.
        """
        names = choose_files((file.name for file in self.files), self.name.part, self.name.full)
        return [file for name in names if (file := self.find(name)) is not None]

    def check_kind(self) -> None:
        """Refuse a repository whose files are not read, by name, before anything is fetched.

        Raises:
            UsageError: the name chooses none of its GGUF files, or several.
            CheckpointError: it holds no config, or weights in pickles alone, or none.
        """
        if self.is_gguf:
            self.gguf_files()
            return
        names = [file.name for file in self.files]
        has_tensors = any(name.endswith(SUFFIX) for name in names)
        if CONFIG not in names and PARAMS not in names:
            if (refused := refuse_paddle_files(self.name.full, names)) is not None:
                raise refused
            kind = ", but a LoRA adapter" if "adapter_config.json" in names else ""
            kind = ", but a pipeline of several models" if "model_index.json" in names else kind
            raise CheckpointError(
                f"{self.name.full} has no {CONFIG}{kind}: nothing is fetched.",
                remedy="name the repository of a language model",
            )
        if has_tensors:
            return
        if (refused := refuse_paddle_files(self.name.full, names)) is not None:
            raise refused
        if pickles := [name for name in names if name.endswith(PICKLES)]:
            raise CheckpointError(
                f"{self.name.full} has weights in pickles alone: nothing is fetched.",
                there_is=f"{first_of(pickles, 3)}, which may run code when opened and is never read",
                remedy="name a revision or a repository with safetensors (many have one at @refs/pr/N)",
            )
        raise CheckpointError(f"{self.name.full} has no weights: nothing is fetched.", remedy="name another repository")


def no_gguf(name: ModelName) -> UsageError:
    """The error for GGUF files of a hub from which they are not fetched."""
    return UsageError(
        f"{name.full} names GGUF files, which are fetched from Hugging Face only.",
        there_is="names as hf:ORG/NAME:Q4_K_M; files on this machine",
        remedy="fetch the file by other means, and pass its path",
    )


def read_repository(connection: HubConnection, name: ModelName) -> Repository:
    """Read what a repository holds.

    Raises:
        UsageError: there is no such repository or revision.
        DownloadError: access is not granted, or the hub does not answer in its protocol.
    """
    endpoint, revision = connection.settings.endpoint, name.revision or DEFAULT_REVISION
    url = f"{endpoint}/api/models/{name.repository}/revision/{quote(revision, safe='')}?blobs=true"
    data = connection.get_json(url, lambda response: refusal(response, name, connection))
    commit = data.get("sha") if isinstance(data, dict) else None
    entries = data.get("siblings") if isinstance(data, dict) else None
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None or not isinstance(entries, list):
        raise connection.wrong_answer("no list of files")
    card = data.get("cardData")
    stated = card.get("license") if isinstance(card, dict) else None
    files = tuple(file for entry in entries if (file := _remote_file(entry, connection)) is not None)
    return Repository(name, commit, files, stated if isinstance(stated, str) else "", bool(data.get("gated")))


def _remote_file(entry: Any, connection: HubConnection) -> RemoteFile | None:
    """A file of a list; None if it is in a subfolder, or its name is none that is read."""
    name = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(name, str) or FILE_NAME.fullmatch(name) is None:
        return None
    large = entry.get("lfs")
    size, digest = entry.get("size"), entry.get("blobId")
    if isinstance(large, dict):
        size, digest = large.get("size", size), large.get("sha256") or large.get("oid")
    pattern = _SHA256 if isinstance(large, dict) else _SHA1
    if type(size) is not int or size < 0 or not isinstance(digest, str) or pattern.fullmatch(digest) is None:
        raise connection.wrong_answer(f"a list in which {name} has no size or hash")
    return RemoteFile(name, size, digest, isinstance(large, dict))


def refusal(response: Any, name: ModelName, connection: HubConnection) -> UsageError | DownloadError:
    """The error for a response that is no success."""
    code, status = response.headers.get("x-error-code", ""), response.status_code
    words = response.headers.get("x-error-message", "")
    page = f"{connection.settings.endpoint}/{name.repository}"
    login = "`hf auth login`, or HF_TOKEN"
    if status == 401 and "nvalid credentials" in words:
        return DownloadError("The hub refuses the token.", remedy=f"renew it ({login})")
    if code == "GatedRepo":
        what = f"{name.full} is gated: its publisher grants access."
        remedy = f"accept the terms at {page}, then try again"
        return DownloadError(what, remedy=remedy if connection.has_token else f"{remedy} with a token ({login})")
    if code == "RevisionNotFound":
        what = f"{name.repository} has no revision {name.revision or DEFAULT_REVISION!r}."
        return UsageError(what, remedy=f"see {page}")
    if code == "RepoNotFound" or status in (401, 404):
        near = near_short_names(name.text)
        known = f" There are the short names {', '.join(near)}." if near else ""
        return UsageError(
            f"Model {name.text!r} is no folder, and {connection.settings.endpoint} has no {name.repository}.{known}",
            remedy="check the name" + ("" if connection.has_token else f"; a private one needs a token ({login})"),
        )
    if status == 403:
        return DownloadError(f"Access to {name.full} is refused.", remedy=f"check what your token may read ({login})")
    return DownloadError(f"The hub answers {name.full} with status {status}.", remedy="try again later")


def _shards(content: bytes, where: str) -> list[str]:
    """The files that an index names."""
    try:
        names = json.loads(content)["weight_map"].values()
        return sorted({str(name) for name in names})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no index of weights.", remedy="choose another revision") from error


def weight_bytes(files: Sequence[RemoteFile]) -> int:
    """Bytes of the files with weights among these."""
    return sum(file.size for file in files if file.name.endswith((SUFFIX, GGUF)))
