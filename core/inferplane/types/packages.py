"""Finds installed packages by their specs and metadata, without importing them."""

from __future__ import annotations

import os
from glob import glob
from importlib import metadata
from importlib.util import find_spec

import torch
from packaging.version import InvalidVersion, Version

from inferplane.types.device import Feature


def is_installed(module: str) -> bool:
    """True if a top-level module can be imported; it is not imported."""
    try:
        return find_spec(module) is not None
    except ValueError:  # imported by hand, without a spec
        return True


def version_of(distribution: str) -> str | None:
    """The installed version by its metadata; None if it is not installed or has no metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def minor_of(version: str) -> str:
    """Major and minor of a version: "2.13" of "2.13.0+cpu" and "2.13rc1". Other text is returned as is."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return version
    return f"{parsed.major}.{parsed.minor}"


def libraries_of(package: str, pattern: str) -> list[str]:
    """Paths of the files of an installed package that match a shell pattern, sorted; the package is not imported."""
    spec = find_spec(package) if is_installed(package) else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(path for folder in folders for path in glob(os.path.join(folder, pattern)))


def load_library(path: str) -> Feature | None:
    """Load a shared library, which registers its operators with torch. Return None, or the reason for a failure."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return Feature(False, f"{os.path.basename(path)} does not load: {' '.join(str(error).split())}")
    return None
