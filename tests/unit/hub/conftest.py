"""A hub on this machine, and settings that lead to it."""

from __future__ import annotations

import pytest

from inferplane.hub import HubSettings
from tests.unit.hub.hub_server import HubServer, serving

VARIABLES = ("HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_TOKEN", "HTTP_PROXY", "http_proxy")


@pytest.fixture(autouse=True)
def online(monkeypatch, tmp_path):
    """Downloads are allowed (tests/conftest.py turns them off), and lead to this machine."""
    from huggingface_hub import constants

    for name in (*VARIABLES, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "INFERPLANE_OFFLINE", "INFERPLANE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def server():
    with serving() as found:
        yield found


@pytest.fixture
def settings(server: HubServer, tmp_path) -> HubSettings:
    return HubSettings(server.endpoint, tmp_path / "hf" / "hub", max_wait_s=2.0, token=lambda: None)
