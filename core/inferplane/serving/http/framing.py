"""h11's connection, which also refuses what RFC 9112 leaves to a server, and where two servers may read two requests.

A proxy in front of this server may have read such a message in another way, and then bytes of one client's request
become another client's (request smuggling). The connection ends after the answer, which is 400.

Source: RFC 9112, sections 2.2 (line ends), 3.2 (targets, Host), 5.2 (folded lines), 6.1 and 6.3 (length of a body);
RFC 9110, section 7.2 (Host); RFC 3986, section 3.2.2 (host).
"""

from __future__ import annotations

import re
from typing import Any

import h11

HOST = re.compile(rb"(?:\[[0-9A-Za-z:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?", re.DOTALL)
"""`uri-host [":" port]`; it may be empty."""
ABSOLUTE = re.compile(rb"https?://([^/?#]+)([^#]*)", re.IGNORECASE | re.DOTALL)
"""A target in absolute-form: authority; path and query."""


MAX_CHUNK_BYTES = 2**48
"""No body is so large; other servers hold the size in 64 bits, and may take a larger one for a small one."""
MAX_TINY_CHUNKS, TINY_CHUNK_BYTES = 1024, 64
"""A body of more chunks than this, of fewer bytes each on average, is refused: reading a chunk costs as much as
reading thousands of bytes. Clients send the pieces that they read from a file or a serializer: KiB, not bytes. One that
writes token by token stays below 1,024 chunks for any prompt of up to some hundred words.
"""
WORDS = {
    "Only Transfer-Encoding": "the only Transfer-Encoding that is read is chunked, without another before it",
    "Missing mandatory Host": "Missing mandatory Host header",
    "Found multiple Host": "several Host headers",
}
"""h11's sentences that have a header's colon in their middle, up to it -> whole sentences."""
EVENTS_PER_PASS = 64
"""Most parts of messages (heads, chunks) that are read in one turn of the event loop."""


class StrictConnection(h11.Connection):
    """A server's side of a connection. An absolute target becomes its path, and its authority the Host."""

    refusal, code = "", "malformed_http"
    """Why the last message was refused, in words and as a code."""
    events_left = EVENTS_PER_PASS
    """Parts of messages that may still be read in this turn; at 0, `next_event` says that it needs more data."""
    _chunks = _chunk_bytes = 0
    _skipped = False

    def next_event(self) -> Any:
        """Return the next event, as h11's does.

        Raises:
            h11.RemoteProtocolError: the message is malformed or ambiguous.
        """
        try:
            return self._next_event()
        except h11.RemoteProtocolError as error:
            words = str(error).partition(": ")[0]  # without the client's bytes, which follow
            self.refusal = WORDS.get(words, words)
            raise

    def _next_event(self) -> Any:
        if self.events_left <= 0:
            return h11.NEED_DATA
        received = b""
        if self.their_state is h11.IDLE:
            received = self._skip_empty_line()
            if received == b"\r":  # half of an empty line
                return h11.NEED_DATA
        event = super().next_event()
        self.events_left -= 1
        if getattr(self._reader, "_bytes_in_chunk", 0) > MAX_CHUNK_BYTES:
            raise h11.RemoteProtocolError("a chunk of more than 2^48 bytes")
        if isinstance(event, h11.Data):
            self._count_chunk(event)
        if not isinstance(event, h11.Request):
            return event
        _check_lines(received)
        names = [name for name, _ in event.headers]
        if b"transfer-encoding" in names and event.http_version < b"1.1":
            version = event.http_version.decode()
            raise h11.RemoteProtocolError(f"Transfer-Encoding in HTTP/{version}, which has none; send HTTP/1.1")
        if b"transfer-encoding" in names and b"content-length" in names:
            raise h11.RemoteProtocolError("a body of two lengths")
        host = next((value for name, value in event.headers if name == b"host"), b"")
        if not HOST.fullmatch(host):
            raise h11.RemoteProtocolError("an invalid Host")
        self._chunks = self._chunk_bytes = 0
        self._skipped = False
        if b"transfer-encoding" in names:
            self.events_left = 0  # the gate decides first whether the chunks are read at all
        return event if event.target.startswith(b"/") else _in_origin_form(event)

    def _skip_empty_line(self) -> bytes:
        """Skip one empty line before a request (RFC 9112, 2.2), and return what has been received after it."""
        received = self.trailing_data[0]
        if not received.startswith(b"\r\n") or self._skipped:
            return received
        self._receive_buffer.maybe_extract_next_line()
        self._skipped = True
        return received[2:]

    def _count_chunk(self, data: h11.Data) -> None:
        self._chunks += data.chunk_end
        self._chunk_bytes += len(data.data)
        if self._chunks > MAX_TINY_CHUNKS and self._chunk_bytes < self._chunks * TINY_CHUNK_BYTES:
            self.code = "tiny_chunks"
            raise h11.RemoteProtocolError(f"more than {MAX_TINY_CHUNKS} chunks of a few bytes each")


def _check_lines(received: bytes) -> None:
    """Refuse a head with line ends other than CRLF, with a folded line, or with two lengths."""
    head = b"\r\n" + received.partition(b"\r\n\r\n")[0].lower()
    if head.count(b"\n") != head.count(b"\r\n") or b"\n " in head or b"\n\t" in head:
        raise h11.RemoteProtocolError("a line end other than CRLF, or a folded line")
    _, *lengths = head.split(b"\ncontent-length:")
    if len(lengths) > 1 or any(b"," in rest.partition(b"\r")[0] for rest in lengths):
        raise h11.RemoteProtocolError("several lengths")


def _in_origin_form(event: h11.Request) -> h11.Request:
    """Return a request whose absolute target is a path; another form of target stays, and has no route."""
    if b"://" not in event.target:
        return event
    found = ABSOLUTE.fullmatch(event.target)
    if found is None or not HOST.fullmatch(found[1]) or found[1].startswith(b":"):
        raise h11.RemoteProtocolError("an invalid target")
    rest = found[2] if found[2].startswith(b"/") else b"/" + found[2]
    headers = [(name, value) for name, value in event.headers if name != b"host"]
    return h11.Request(
        method=event.method,
        target=rest,
        headers=[(b"host", found[1]), *headers],
        http_version=event.http_version,
    )
