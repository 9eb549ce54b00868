"""Registers the backend. Imports nothing heavy: the backend's module is named, not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferplane.plugin import hookimpl

INFERPLANE_API = (1, 1)


@hookimpl
def inferplane_register_backends(register: Callable[..., Any]) -> None:
    """Announce device "cpu"."""
    register("cpu", "inferplane_cpu.backend:CpuBackend")
