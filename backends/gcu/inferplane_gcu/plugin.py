"""Tells Inferplane that device "gcu" exists. The backend itself is imported only when it is probed or chosen."""

from __future__ import annotations

from collections.abc import Callable

from inferplane.plugin import hookimpl

INFERPLANE_API = (1, 1)


@hookimpl
def inferplane_register_backends(register: Callable[[str, str], None]) -> None:
    """Register Enflame GCUs."""
    register("gcu", "inferplane_gcu.backend:GcuBackend")
