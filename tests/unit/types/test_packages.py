"""What is told of packages that are never imported: each here ends the process that imports it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from inferplane.types.packages import is_installed, libraries_of, load_library, minor_of, version_of

NAME = "inferplane_vendor_package"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of a package with metadata."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text(f"raise SystemExit('{NAME} was imported')")
    (tmp_path / f"{NAME}-1.2.dist-info").mkdir()
    (tmp_path / f"{NAME}-1.2.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.2+a\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / NAME


def test_a_package_is_told_of_without_being_imported(package):
    (package / "_C.so").touch()
    assert is_installed(NAME) and version_of(NAME) == "1.2+a"
    assert libraries_of(NAME, "_C*.so") == [str(package / "_C.so")]
    assert NAME not in sys.modules


def test_what_is_not_there():
    assert not is_installed(NAME) and version_of(NAME) is None and libraries_of(NAME, "*") == []


def test_metadata_alone_is_no_package(package):
    (package / "__init__.py").unlink()
    package.rmdir()
    assert not is_installed(NAME) and version_of(NAME) == "1.2+a"


def test_a_module_that_was_made_by_hand_counts_as_installed(monkeypatch):
    module = ModuleType(NAME)
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, NAME, module)
    assert is_installed(NAME)


def test_libraries_come_in_order(package):
    for name in ("_C.b.so", "_C.a.so", "_C.txt", "other.so"):
        (package / name).touch()
    assert libraries_of(NAME, "_C*.so") == [str(package / "_C.a.so"), str(package / "_C.b.so")]
    assert libraries_of(NAME, "_D*") == []


def test_a_library_that_does_not_load_says_why_on_one_line(package):
    (package / "_C.so").write_bytes(b"no library")
    wrong = load_library(str(package / "_C.so"))
    assert wrong is not None and wrong.present is False
    assert wrong.reason.startswith("_C.so does not load: ") and "\n" not in wrong.reason


def test_a_library_that_loads_has_nothing_to_say(monkeypatch):
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert load_library("/there/_C.so") is None and loaded == ["/there/_C.so"]


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("2.13.0+cpu", "2.13"),
        ("2.9", "2.9"),
        ("2.10.0.post1", "2.10"),
        ("2.11.0a0+git1", "2.11"),
        ("2.13rc1", "2.13"),
        ("2.13.dev3", "2.13"),
        ("of today", "of today"),
    ],
)
def test_minor_of_a_version(version, minor):
    assert minor_of(version) == minor
