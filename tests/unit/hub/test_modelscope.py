"""Names with ms:, through a package of the form of `modelscope`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from inferplane.errors import CheckpointError, DownloadError, UsageError
from inferplane.hub import fetch, locate, parse_name
from inferplane.hub.progress import SILENT, DownloadProgress

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"w" * 1000,
    "README.md": b"",
    "a.bin": b"x",
}


class Package:
    """The two functions of modelscope 1.40 that are called, over a dictionary."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.error = folder, dict(FILES), None

    def get_model_files(self, model_id, revision=None, root=None, recursive=True, **more):
        if self.error is not None:
            raise self.error
        return [{"Path": name, "Size": len(content)} for name, content in self.files.items()]

    def snapshot_download(self, model_id=None, revision=None, allow_file_pattern=None, local_files_only=False):
        assert (model_id, revision) == ("org/name", "master")
        if local_files_only:
            if not self.folder.is_dir():
                raise ValueError("Cannot find the requested files in the cached path")
            return str(self.folder)
        self.folder.mkdir(exist_ok=True)
        for name in allow_file_pattern:
            (self.folder / name).write_bytes(self.files[name])
        return str(self.folder)


@pytest.fixture
def package(tmp_path, monkeypatch):
    found = Package(tmp_path / "ms")
    modules = {name: ModuleType(name) for name in ("modelscope", "modelscope.hub")}
    modules["modelscope"].__spec__ = ModuleSpec("modelscope", None)
    modules["modelscope.hub.api"] = api = ModuleType("modelscope.hub.api")
    modules["modelscope.hub.snapshot_download"] = download = ModuleType("modelscope.hub.snapshot_download")
    api.HubApi = lambda: found
    download.snapshot_download = found.snapshot_download
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def name():
    found = parse_name("ms:org/name")
    assert found is not None
    return found


def test_a_model_is_fetched_and_found(package, settings, monkeypatch):
    said: list[str] = []
    found = locate(name(), settings=settings, progress=DownloadProgress(said.append, lambda *count: None))
    assert {path.name for path in found.folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert said == [f"fetching ms:org/name: 1 kB from ModelScope to {package.folder}"]
    package.error = AssertionError("the hub is not needed")
    assert locate(name(), settings=settings) == found


def test_faults(package, settings):
    package.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(CheckpointError, match="pickles alone"):
        fetch(name(), settings=settings, progress=SILENT)
    package.error = RuntimeError("404 no such model")
    with pytest.raises(DownloadError, match="ModelScope does not give ms:org/name: RuntimeError: 404"):
        fetch(name(), settings=settings, progress=SILENT)


def test_the_package_is_named_if_it_is_missing(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setattr("inferplane.hub.modelscope.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="need the package modelscope") as caught:
        locate(name(), settings=settings)
    assert "[modelscope]" in caught.value.remedy
