"""Streams read piece by piece: wherever a piece begins and ends, the same events come out."""

from __future__ import annotations

import random

import pytest

from inferplane.cli.verbs.bench.serve.event_stream import (
    MAX_EVENT_BYTES,
    ChunkedBody,
    EventStream,
    LineStream,
    StreamError,
)


def in_pieces(data: bytes, source: random.Random) -> list[bytes]:
    borders = sorted(source.choices(range(len(data) + 1), k=source.randint(0, 9)))
    return [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)])]


def every_cutting(data: bytes):
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    for seed in range(60):
        yield in_pieces(data, random.Random(seed))


CHUNKED = b"5\r\nhello\r\n6;name=value\r\n\r\nwo\r\n\r\n1\n!\r\n0\r\nTrailer: x\r\n\r\n"


def test_chunks_in_whatever_pieces():
    for pieces in every_cutting(CHUNKED):
        body = ChunkedBody()
        assert b"".join(body.feed(piece) for piece in pieces) == b"hello\r\nwo\r\n!" and body.complete
    unfinished = ChunkedBody()
    assert unfinished.feed(CHUNKED[:-2]) and not unfinished.complete


@pytest.mark.parametrize("data", [b"zz\r\n", b"5\r\nhello!\r\n", b"\r\n", b"-1\r\n", b"5" * 5000, b"2\r\nabX"])
def test_chunks_that_are_none(data):
    for pieces in ([data], [data[i : i + 1] for i in range(len(data))]):
        body = ChunkedBody()
        with pytest.raises(StreamError, match="chunk of the body"):
            b"".join(map(body.feed, pieces))


EVENTS = (
    b'\xef\xbb\xbf: comment\n\ndata: {"a": 1}\n\nevent: x\nid: 3\ndata:two\ndata: lines\n\n\n\n'
    b"data\n\ndata: \n\ndata: [DONE]\n\ndata: unfinished"
)
PAYLOADS = [b'{"a": 1}', b"two\nlines", b"", b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_in_whatever_pieces_and_with_every_line_end(line_end):
    for pieces in every_cutting(EVENTS.replace(b"\n", line_end)):
        stream = EventStream()
        assert [event for piece in pieces for event in stream.feed(piece)] == PAYLOADS


def test_lines_in_whatever_pieces():
    for pieces in every_cutting(b'{"a": 1}\n\n\r\n{"b": 2}\r\ndata: {"c": 3}\nunfinished'):
        stream = LineStream()
        found = [line.strip() for piece in pieces for line in stream.feed(piece)]
        assert found == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


@pytest.mark.parametrize("kind", [EventStream, LineStream])
def test_an_event_without_an_end_is_refused(kind):
    stream = kind()
    with pytest.raises(StreamError, match="longer than 16 MiB"):
        stream.feed(b"data: " + b"x" * MAX_EVENT_BYTES)
