"""The ports of gRPC: address, TLS, and what all of them refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from inferplane.errors import UsageError
from inferplane.serving.settings import ServerSettings

MAX_METADATA_BYTES = 16 * 1024
"""Most metadata of a call."""


def bind_port(server: Any, settings: ServerSettings, port: int, flag: str) -> int:
    """Let a gRPC server listen, with TLS if the settings have a certificate, and return its port.

    Args:
        server: not started yet.
        settings: address and TLS.
        port: 0 for any free port.
        flag: the setting that the port is from.

    Raises:
        UsageError: the port is taken.
    """
    address = f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"
    try:
        if settings.tls_cert:
            bound: int = server.add_secure_port(address, _credentials(settings.tls_cert, settings.tls_key))
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise UsageError(
            f"gRPC cannot listen on {address}.", remedy=f"choose another {flag}, or end what uses the port"
        )
    return bound


def _credentials(certificate: str, key: str | None) -> Any:
    return grpc.ssl_server_credentials([(Path(key or certificate).read_bytes(), Path(certificate).read_bytes())])
