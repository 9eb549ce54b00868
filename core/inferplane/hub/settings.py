"""Where models are downloaded from and stored, by the variables of huggingface_hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from inferplane.errors import UsageError

OFFLINE_VARIABLE = "INFERPLANE_OFFLINE"
_OFFLINE = (OFFLINE_VARIABLE, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "true", "yes", "on")
MAX_WAIT_S = 120.0
"""Seconds that a download waits in all for a server that is busy."""


def _read_token() -> str | None:
    """The user's token: of HF_TOKEN, or of the hub's login; None too if HF_HUB_DISABLE_IMPLICIT_TOKEN is set."""
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


@dataclass(frozen=True)
class HubSettings:
    """A hub and its cache.

    Args:
        endpoint: address of the hub, or of a mirror.
        cache: folder of huggingface_hub's cache.
        offline: connect to nothing.
        max_wait_s: seconds to wait in all for a server that answers 429 or 503, or not at all.
        token: returns the user's token, which only `endpoint` receives.
    """

    endpoint: str
    cache: Path
    offline: bool = False
    max_wait_s: float = MAX_WAIT_S
    token: Callable[[], str | None] = _read_token

    @classmethod
    def from_environment(cls) -> HubSettings:
        """Read the variables of this moment, which huggingface_hub itself reads once, at import.

        Raises:
            UsageError: HF_ENDPOINT is no address.
        """
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        if not endpoint.startswith(("https://", "http://")):
            raise UsageError(
                f"HF_ENDPOINT = {endpoint!r} is no address.", there_is="addresses as https://huggingface.co"
            )
        return cls(endpoint.rstrip("/"), default_cache(), is_offline())


def forbid_downloads(environment: MutableMapping[str, str]) -> None:
    """Set the variable that forbids downloads, in this process and those that it starts."""
    environment[OFFLINE_VARIABLE] = "1"


def default_cache() -> Path:
    """The folder of huggingface_hub's cache."""
    environ = os.environ
    given = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    if not given:
        home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        given = os.path.join(home, "hub")
    return Path(os.path.expandvars(given)).expanduser()


def is_offline() -> bool:
    """Whether a variable forbids downloads, or did when huggingface_hub was imported."""
    if any(os.environ.get(name, "").strip().lower() in _TRUE for name in _OFFLINE):
        return True
    constants = sys.modules.get("huggingface_hub.constants")
    return bool(getattr(constants, "HF_HUB_OFFLINE", False))
