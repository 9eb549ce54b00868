"""The server under attack as a misbehaving client sees it: bare connections, and requests that are wrong on purpose."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CLOSED, SILENT = 0, -1
"""Instead of a status: the server closed the connection without an answer; nothing came within `ANSWER_S`."""
ANSWER_S = 60.0
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@dataclass(frozen=True)
class Target:
    """Where to send requests, and the key to send.

    Args:
        host: address of the server.
        port: of HTTP.
        grpc_port: of gRPC.
        key: the attackers' key.
        hold_s: seconds for which slow clients hold what they hold.
    """

    host: str
    port: int
    grpc_port: int
    key: str
    hold_s: float

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        """A connection; with `receive_bytes`, its client takes no more than about that much before it reads."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(ANSWER_S)
        sock.connect((self.host, self.port))
        return sock

    @property
    def authorization(self) -> bytes:
        return b"Authorization: Bearer " + self.key.encode() + b"\r\n"

    def head(self, method: str, path: str, more: bytes = b"", *, has_key: bool = True) -> bytes:
        """The head of a request, after which the server closes the connection."""
        key = self.authorization if has_key else b""
        return f"{method} {path} HTTP/1.1\r\n".encode() + HOST + key + b"Connection: close\r\n" + more + b"\r\n"

    def post(self, path: str, body: bytes | dict[str, Any], more: bytes = b"") -> bytes:
        """A whole request with a body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head("POST", path, JSON + more + b"Content-Length: %d\r\n" % len(data)) + data

    def with_key(self, data: bytes) -> bytes:
        """A request as the tests of malformed HTTP have it, with the key and a name of this server."""
        data = data.replace(b"Host: x\r\n", HOST, 1)
        return data.replace(HOST, HOST + self.authorization, 1)

    def exchange(self, data: bytes, *, half_close: bool = False) -> int:
        """Send on a new connection, and read the whole answer; its status."""
        with self.connect() as sock:
            write(sock, data)
            if half_close:
                end_writing(sock)
            return read_status(sock)

    def ask(self, path: str, body: bytes | dict[str, Any]) -> int:
        """Post a body; the status of the answer, which is read whole."""
        return self.exchange(self.post(path, body))

    def ask_at_once(self, requests: Iterable[bytes], *, half_close: bool = False) -> list[int]:
        """Send each on a connection of its own before any answer is read; their statuses."""
        socks = []
        try:
            for data in requests:
                socks.append(self.connect())
                write(socks[-1], data)
                if half_close:
                    end_writing(socks[-1])
            return [read_status(sock) for sock in socks]
        finally:
            for sock in socks:
                sock.close()


def write(sock: socket.socket, data: bytes) -> bool:
    """Send all of it; False if the server closed the connection meanwhile, or reads nothing more."""
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


def end_writing(sock: socket.socket) -> None:
    """Close one direction."""
    with contextlib.suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_WR)


def read_status(sock: socket.socket) -> int:
    """The status of the answer, which is read up to the end of the connection; or `CLOSED`, `SILENT`."""
    first = b""
    limit = time.monotonic() + ANSWER_S
    try:
        while piece := sock.recv(1 << 16):
            if len(first) < 12:
                first += piece[:12]
            if time.monotonic() > limit:
                return SILENT
    except TimeoutError:
        return SILENT
    except OSError:
        pass  # the server has closed it while something was on its way
    return int(first[9:12]) if len(first) >= 12 else CLOSED


def reset(sock: socket.socket) -> None:
    """Close a connection as a process that is killed does: the server gets a reset, not an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
