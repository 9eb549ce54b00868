"""Pieces on their way from the sequence to the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inferplane.serving.errors import ApiError
from inferplane.serving.generation import Piece
from inferplane.serving.http import responses
from inferplane.serving.http.chunks import ChunkWriter
from inferplane.serving.http.scope import CONTEXT, RequestContext
from inferplane.serving.service import Service
from tests.serving.test_service import LONG, check, running, served


class Reader:
    """Reads a stream, and consumes some pieces in the callback.

    Args:
        consumes: whether the callback consumes the n-th piece that it gets, from 1 on.
    """

    def __init__(self, consumes: Callable[[int], bool]) -> None:
        self._consumes = consumes
        self.tokens: list[int] = []
        self.reasons: list[str] = []
        self.calls = self.consumed = self.yielded = self.batches = 0
        self._busy = False

    def write_now(self, piece: Piece) -> bool:
        assert piece.delta.finish_reason is None and not self._busy
        self.calls += 1
        if not self._consumes(self.calls):
            return False
        self.consumed += 1
        self.tokens += piece.delta.token_ids
        return True

    async def read(self, service: Service) -> None:
        async with service.admit(LONG) as generation:
            async for several in generation.batches(self.write_now):
                self.yielded += len(several)
                for piece in several:
                    self.tokens += piece.delta.token_ids
                    self.reasons += [piece.delta.finish_reason] if piece.delta.finish_reason else []
                self.batches += 1
                if self.batches % 2:  # a reader that is always slower than the engine gets no calls
                    self._busy = True
                    await asyncio.sleep(0.002)  # pieces that arrive meanwhile wait, without a call
                    self._busy = False
            assert generation.completion_tokens == len(self.tokens)


def test_pieces_that_are_written_directly_are_not_yielded_and_none_is_reordered():
    async def work() -> None:
        async with running() as service:
            want = (await served(service, LONG))[0][0]
            for takes in (lambda i: True, lambda i: False, lambda i: i % 3 != 0, lambda i: i < 20 or i > 40):
                reader = Reader(takes)
                await reader.read(service)
                assert (reader.tokens, reader.reasons) == (want, ["length"])
                assert reader.calls > 1
                assert reader.consumed == sum(map(takes, range(1, reader.calls + 1)))
                assert reader.consumed + reader.yielded == len(want)

    check(work)


def test_a_stream_fails_when_its_reader_raises():
    def fall(offer: int) -> bool:
        raise ZeroDivisionError

    async def work() -> None:
        async with running() as service:
            with pytest.raises(ApiError) as failed:
                await Reader(fall).read(service)
            assert failed.value.status == 500

    check(work)


class Wire:
    """A connection that has taken all it was given, or not."""

    def __init__(self) -> None:
        self.unread, self.closing, self.got = 0, False, b""

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.got += data


def test_chunks_are_written_directly_only_if_the_client_keeps_up():
    async def work() -> None:
        long_way: list[Any] = []

        async def send(message: Any) -> None:
            long_way.append(message)

        writer, wire = ChunkWriter(send), Wire()
        assert not writer.ready  # the head is not sent, or the body has a length
        await writer.send(b"a")
        assert long_way.pop() == {"type": "http.response.body", "body": b"a", "more_body": True}
        writer.transport = cast("asyncio.Transport", wire)
        assert writer.ready
        writer.write(b"0123456789")
        await writer.send(b"b")
        assert (wire.got, long_way) == (b"a\r\n0123456789\r\n1\r\nb\r\n", [])
        for wire.unread, wire.closing in ((1, False), (0, True)):
            assert not writer.ready
            await writer.send(b"c")
            assert long_way.pop()["body"] == b"c"

    check(work)


def test_silence_is_filled_until_the_stream_ends(monkeypatch: pytest.MonkeyPatch):
    async def work() -> None:
        long_way: list[Any] = []

        async def send(message: Any) -> None:
            long_way.append(message["body"])

        writer, wire = ChunkWriter(send), Wire()
        writer.transport = cast("asyncio.Transport", wire)
        stream = responses._PingedStream(writer, b":")
        stream.write(b"x")
        stream._on_timer()
        assert wire.got == b"1\r\nx\r\n"  # no silence yet
        stream.stop()

        monkeypatch.setattr(responses, "PING_S", 0.1)
        stream = responses._PingedStream(writer, b":")
        await asyncio.sleep(0.3)
        assert wire.got.endswith(b"1\r\n:\r\n") and not long_way
        wire.unread = 1
        await asyncio.sleep(0.3)
        assert long_way[:1] == [b":"]
        stream.stop()
        wire.unread, wire.got, told = 0, b"", len(long_way)
        await asyncio.sleep(0.3)
        assert (wire.got, len(long_way)) == (b"", told)

    check(work)


@pytest.mark.parametrize("pieces", [["a", "b"], []])
def test_a_stream_opens_with_its_first_piece(pieces: list[str]):
    """Clients time the first chunk as the first token, and the head may have been sent long before."""

    async def work() -> None:
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"<head>"))

        class Generation:
            num_choices = 1

            async def wait_for_first_piece(self, timeout_s: float) -> None: ...

            async def batches(self, write_now: Callable[[Any], bool]) -> Any:
                assert sent == [b"<head>"] and not write_now("x")
                for piece in pieces:
                    yield [piece]

        words = {
            "opening": lambda generation: b"<role>",
            "closing": lambda generation: b"<end>",
            "media_type": "x",
            "ping": b"",
        }
        rendering = SimpleNamespace(piece=lambda generation, piece: piece.encode(), **words)
        service = SimpleNamespace(settings=SimpleNamespace(disable_streaming=False))
        made = responses.GenerateResponse(cast("Any", service), cast("Any", None), cast("Any", rendering), stream=True)
        writer = ChunkWriter(send)
        await made._stream(cast("Any", Generation()), {CONTEXT: RequestContext("r", writer)}, send)
        assert sent[1:-1] == ([b"<role>a", b"b", b"<end>"] if pieces else [b"<role><end>"])

    check(work)
