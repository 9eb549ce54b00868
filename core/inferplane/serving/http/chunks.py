"""Writes a streamed answer straight to the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class ChunkWriter:
    """Writes the body of an answer whose head was sent, piece by piece.

    Each piece goes to the client's connection as one chunk of HTTP/1.1. The framework and the parser in between would
    add nothing to it and would take longer than generating it did. If the client reads slowly, the piece takes their
    way instead, because they know how to wait.

    Args:
        send: ASGI's `send`, the slow way.
    """

    def __init__(self, send: Callable[[Any], Awaitable[None]]) -> None:
        self._send = send
        self.transport: asyncio.Transport | None = None
        """Where chunks may be written directly; None before the head was sent, or if the body is not chunked."""

    @property
    def ready(self) -> bool:
        """Whether `write` may be called: the connection has taken everything sent so far."""
        transport = self.transport
        return transport is not None and not transport.get_write_buffer_size() and not transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write a piece that is not the last; only while `ready`."""
        assert self.transport is not None
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        """Write a piece that is not the last; wait for a client that reads slowly."""
        if self.ready:
            self.write(data)
        else:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
