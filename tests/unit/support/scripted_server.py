"""A server of OpenAI's streams in a thread, which misbehaves on demand: each request's prompt says how."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

USAGE = {"prompt_tokens": 5, "completion_tokens": 4}
"""One more than there are events: an event may have several tokens."""
TEXTS = ["one ", "two ", "three"]
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: Any, line_end: str = "\n") -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}{line_end}{line_end}"


def chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def delta(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def plain(status: int, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, "", ""]).encode() + data


class ScriptedServer:
    """Listens on `port`; `bodies` and `heads` are what it was sent.

    Args:
        models: names that it lists.
        script: what to do with every request; "": what the first word of its last message says.
        listing: the answer that lists models, in place of one with `models`.
        answer: to every other request, byte by byte as it is.
    """

    def __init__(
        self, models: tuple[str, ...] = ("scripted",), script: str = "", listing: bytes = b"", answer: bytes = b""
    ) -> None:
        self.models, self.script, self.listing, self.answer = models, script, listing, answer
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.opened = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listening = threading.Event()
        self._thread.start()
        assert self._listening.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._server = self.loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._listening.set()
        self.loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self.loop.close()

    def stop(self) -> None:
        """Stop listening, and close every connection."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._server.close)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(30)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.opened += 1
        try:
            for number in itertools.count():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                if head.startswith("GET"):
                    names = {"data": [{"id": name} for name in self.models]}
                    writer.write(self.listing or plain(200, names, "Server: scripted"))
                    continue
                length = next(int(x[15:]) for x in head.lower().splitlines() if x.startswith("content-length:"))
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                if self.script == "once" and number:
                    return
                if self.answer:
                    writer.write(self.answer)
                    continue
                text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
                if await self._answer(self.script or text.split()[0], body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, what: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Answer a request; whether its connection is to be closed."""
        if what.isdigit():
            writer.write(plain(int(what), {"error": {"message": f"no, {what}"}}, "Retry-After: 1"))
            return False
        if what == "hang":
            await asyncio.sleep(3600)
        if what == "close":
            return True
        if what == "strict" and "stream_options" in body:
            writer.write(plain(400, {"error": {"message": "stream_options: unknown field"}}))
            return False
        if what == "json":
            writer.write(plain(200, {"choices": [{"message": {"content": "whole"}}]}))
            return False
        if what == "moved":
            writer.write(plain(307, {}, "Location: https://elsewhere/"))
            return False
        if what == "hostile":
            writer.write(plain(500, {"error": {"message": "a\x1b[2Jb\x07"}}))
            return False
        line_end = "\r\n" if what == "crlf" else "\n"
        events = [": a comment\n\n", event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, line_end)]
        events += [event(delta(text), line_end) for text in TEXTS]
        if what == "slow":
            for text in events:
                await asyncio.sleep(0.01)
                writer.write((STREAM.encode() if text is events[0] else b"") + chunk(text))
            events = []
        elif what not in ("old", "sized"):
            writer.write(STREAM.encode())
        if what == "stall":
            writer.write(chunk("".join(events)))
            await asyncio.sleep(3600)
        if what == "dies":
            writer.write(chunk("".join(events)))
            await writer.drain()
            return True
        if what == "garbage":
            events.append(event("{no json"))
        if what == "fails":
            events.append(event({"error": {"message": "out of memory", "code": 503}}))
        elif what != "endless":
            events.append(event(delta(None, "stop"), line_end))
            if what not in ("uncounted",):
                events.append(event({"choices": [], "usage": USAGE}, line_end))
            events.append(event("[DONE]", line_end))
        if what in ("old", "sized"):
            data = "".join(events).encode()
            head = "HTTP/1.0 200 OK" if what == "old" else f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}"
            writer.write(f"{head}\r\nContent-Type: text/event-stream\r\n\r\n".encode() + data)
            await writer.drain()
            return what == "old"
        data = b"".join(chunk(text) for text in events) + b"0\r\n\r\n"
        if what == "pieces":
            for at in range(len(data)):
                writer.write(data[at : at + 1])
                if at % 7 == 0:
                    await asyncio.sleep(0)
        else:
            writer.write(data)
        await writer.drain()
        return False


@contextlib.contextmanager
def scripted(**options: Any) -> Iterator[ScriptedServer]:
    """A server that is stopped afterwards."""
    server = ScriptedServer(**options)
    try:
        yield server
    finally:
        server.stop()
