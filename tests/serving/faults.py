"""Injects faults: the N-th call of a function raises, and a small server around it is checked.

The product has no code for this: a test replaces the function that is to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import inferplane
from inferplane.engine import AsyncLLM
from inferplane.engine.clients import inputs
from inferplane.engine.clients.process import messages, remote
from inferplane.engine.clients.process import server as process
from inferplane.engine.sampling.grammars import Grammars
from inferplane.errors import EngineError
from inferplane.serving import logs, model, service
from inferplane.serving.chat_template.template import ChatTemplate
from inferplane.serving.http.app import add_gate, full_app
from inferplane.serving.http.scope import App
from inferplane.serving.keys import Keys
from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings
from tests.serving.soak import CHAT, COMPLETIONS, SCHEMA, terminals

DEMO = Path(inferplane.__file__).parent / "models" / "demo"
CONFIG = """{"architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
"rms_norm_eps": 1e-6, "eos_token_id": 1}"""
TOOLS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
GREEDY = {"temperature": 0, "ignore_eos": True}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "def main():", "n": 2, "max_tokens": 3, "stream": True, "stop": ["###"], **GREEDY}),
    (COMPLETIONS, {"prompt": [5, 6, 7] * 20, "logprobs": 2, "max_tokens": 3, "stream": False, **GREEDY}),
    (COMPLETIONS, {"text": "x = ", "max_dec_len": 3, "min_dec_len": 3, "temperature": 0, "stream": True}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "max_tokens": 3,
            "stream": True,
            "temperature": 0,
        },
    ),
)


class Fault(Exception):
    """What is raised."""


class Nth:
    """Makes the N-th call of a method raise.

    Args:
        owner: a class or a module.
        name: of its attribute.
        n: which call, from 1; 0 for none.
        error: what is raised.
        after: raise after the method has done its work, not instead of it.
    """

    def __init__(self, owner: Any, name: str, n: int, error: Exception, *, after: bool = False) -> None:
        self.calls = 0
        self._inner = getattr(owner, name)
        self._n, self._error, self._after = n, error, after
        self.replacement = self._awaited if asyncio.iscoroutinefunction(self._inner) else self._called

    def _hit(self) -> bool:
        self.calls += 1
        return self.calls == self._n

    def _called(self, *args: Any, **more: Any) -> Any:
        hit = self._hit()
        if hit and not self._after:
            raise self._error
        found = self._inner(*args, **more)
        if hit:
            raise self._error
        return found

    async def _awaited(self, *args: Any, **more: Any) -> Any:
        if self._hit():
            raise self._error
        return await self._inner(*args, **more)


@contextlib.contextmanager
def failing(owner: Any, name: str, n: int, error: Exception | None = None, *, after: bool = False) -> Any:
    """Replace `owner.name` for a while; see `Nth`."""
    fault = Nth(owner, name, n, error or Fault("on purpose"), after=after)

    def method(*args: Any, **more: Any) -> Any:
        return fault.replacement(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        yield fault


def over_a_socket(model: str, options: dict[str, Any], folder: Path) -> AsyncLLM:
    """Return an engine that is reached by messages, in a thread of this process, so that its side can fail too."""
    ours, theirs = socket.socketpair()
    served = threading.Thread(target=lambda: asyncio.run(process._run(theirs)), daemon=True)
    served.start()
    client = remote.RemoteEngine(ours, f"{tempfile.mkdtemp(dir=folder)}/engine")
    ours.sendall(messages.frame(messages.LoadModel(model, options, client.address)))
    client._await_ready()
    engine = AsyncLLM.__new__(AsyncLLM)
    engine._begin(client)
    return engine


class _Grammars(Grammars):
    """Reused by the next engine, with the process in which it compiles constraints: its start takes longest."""

    def close(self) -> None: ...


class _Template(ChatTemplate):
    """Reused by the next server, with its process; `end` ends it."""

    end = ChatTemplate.close

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def kept_helpers() -> AsyncIterator[None]:
    """Let all servers that are started inside share their helper processes."""
    grammars: list[_Grammars] = []
    template: list[_Template] = []

    def one_grammars(*args: Any) -> _Grammars:
        grammars[:] = grammars or [_Grammars(*args)]
        return grammars[0]

    def one_template(tokenizer: Any) -> _Template:
        template[:] = template or [from_tokenizer(tokenizer)]
        return template[0]

    from_tokenizer: Any = _Template.from_tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "Grammars", one_grammars)
        patch.setattr(model, "ChatTemplate", SimpleNamespace(from_tokenizer=one_template))
        try:
            yield
        finally:
            for found in grammars:
                Grammars.close(found)
            for kept in template:
                await kept.end()


class Small:
    """A whole server in this process, over a random model with the demo model's tokenizer.

    Args:
        folder: for the model's files.
        by_messages: the engine is reached by messages, as in a process of its own.
    """

    def __init__(self, folder: Path, *, by_messages: bool = False) -> None:
        self.folder, self.by_messages = folder, by_messages
        (folder / "config.json").write_text(CONFIG)
        for name in TOOLS:
            if (DEMO / name).exists():
                shutil.copy(DEMO / name, folder / name)
        self.service: Service | None = None
        self.app: App | None = None
        self.gate: Any = None
        self.answers: list[tuple[int, str]] = []
        self.lines = logging.StreamHandler(open("/dev/null", "w"))  # noqa: SIM115  ends with the process
        self.lines.setFormatter(logs.JsonLines())

    def _engine(self) -> AsyncLLM:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 4}
        options.update(max_num_batched_tokens=32, kv_cache_bytes=2**18)
        if self.by_messages:
            return over_a_socket(str(self.folder), options, self.folder)
        return AsyncLLM(str(self.folder), **options)

    async def start(self) -> None:
        """Start a new server, unless one works."""
        if self.service is not None and self.service.condition().ready:
            return
        if self.service is not None:
            await self.service.drain(0)
        self.service = Service(ServerSettings(max_num_seqs=4, max_waiting=4))
        await self.service.load(self._engine)
        self.app, self.gate = add_gate(full_app(self.service), self.service, Keys(()))
        if not self.answers:
            self.answers = [self.whole(*found) for found in zip(ASKED, await self.ask())]

    async def stop(self) -> None:
        """End it."""
        assert self.service is not None
        await self.service.drain(0)

    async def send(self, path: str, body: dict[str, Any]) -> tuple[int, str, bool]:
        """Send one request; return status, text, and whether the answer was marked complete."""
        assert self.app is not None
        message = {"type": "http.request", "body": httpx.Request("POST", "http://localhost", json=body).content}
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope["headers"] = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        given, said, state = asyncio.Queue[Any](), bytearray(), {"status": 0, "complete": False}
        given.put_nowait(message)

        async def send(part: Any) -> None:
            self.written()
            if part["type"] == "http.response.start":
                assert not state["status"], "two answers to one request"
                state["status"] = part["status"]
            else:
                assert not state["complete"], "something behind the end of an answer"
                said.extend(part.get("body", b""))
                state["complete"] = not part.get("more_body", False)

        with contextlib.suppress(Fault, OSError):
            await self.app(scope, given.get, send)
        return state["status"], said.decode(), state["complete"]

    def written(self) -> None:
        """Called before each part of an answer is written, so that a fault can be injected."""

    async def ask(self) -> list[tuple[int, str, bool]]:
        """All of `ASKED` at once."""
        return await asyncio.wait_for(asyncio.gather(*(self.send(*a) for a in ASKED)), 60)

    def whole(self, asked: tuple[str, dict[str, Any]], found: tuple[int, str, bool]) -> tuple[int, str]:
        """Check a correct answer; return its number of ends, and its text without what differs between requests."""
        status, text, complete = found
        assert status == 200 and complete, found
        ends, wanted = terminals(asked[1], text)
        assert ends == wanted, (asked, text)
        return ends, "".join(spoken(text))

    def outcomes(self, found: list[tuple[int, str, bool]]) -> list[str]:
        """Return what became of each of `ASKED`; fail if one of them did not end exactly once."""
        fates = []
        for asked, right, (status, text, complete) in zip(ASKED, self.answers, found):
            if status == 200 and complete and terminals(asked[1], text)[0] == right[0]:
                assert "".join(spoken(text)) == right[1], (
                    "another text than without the fault",
                    spoken(text),
                    right[1],
                )
                fates.append("whole")
            elif status >= 400:
                assert complete and text.count('"code"') + text.count('"error_code"') == 1, (status, text)
                fates.append("refused")
            elif status == 200 and complete:  # a stream that failed on its way says so, once, at its end
                assert asked[1]["stream"], text
                last = text.strip().splitlines()[-1]
                assert '"error' in last and "[DONE]" not in text, text
                fates.append("failed")
            else:
                fates.append("cut off")
        return fates

    async def at_rest(self) -> bool:
        """Return whether the server still works; check that it then holds nothing, and else reports its failure."""
        assert self.service is not None
        service = self.service
        limit = asyncio.get_running_loop().time() + 20
        while service.slots.in_use or service._generations or service.body_memory.held_bytes:
            assert asyncio.get_running_loop().time() < limit, "slots, generations or bytes were kept"
            await asyncio.sleep(0.005)
        engine = service.engine
        assert engine is not None
        stats = await self._stats(engine)
        if stats is None or service.failed.is_set():
            await asyncio.wait_for(service.failed.wait(), 20)
            condition = service.condition()
            assert not condition.live and not condition.ready and condition.detail
            assert (await self.send(*ASKED[1]))[0] == 503
            return False
        assert not stats["num_requests_waiting"]
        assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"], "blocks were lost"
        assert stats["requests_accepted_total"] == sum(stats["request_success_total"].values())
        client: Any = engine._client
        assert not client._streams and not engine._streams._live and not engine._streams._mailboxes
        if self.by_messages:
            assert not client._number_of
        else:
            assert not client._by_request and not client._compiling
            engine.llm.engine.pools.check()
        again = await self.ask()
        assert self.outcomes(again) == ["whole"] * len(ASKED), again
        return True

    async def _stats(self, engine: AsyncLLM) -> dict[str, Any] | None:
        """Return the engine's numbers once it runs nothing; None if it has ended."""
        limit = asyncio.get_running_loop().time() + 20
        while (await engine.health()).alive:
            try:
                stats = await engine.stats()
            except EngineError:
                break
            if not stats["num_requests_running"]:
                return stats
            assert asyncio.get_running_loop().time() < limit
            await asyncio.sleep(0.005)
        return None


def spoken(text: str) -> list[str]:
    """Return the texts of an answer, in the order of its choices."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        event = json.loads(data)
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + piece
        if "token" in event:
            found[0] = found.get(0, "") + event["token"]
    return [found[i] for i in sorted(found)]


@contextlib.asynccontextmanager
async def small(folder: Path, *, by_messages: bool = False) -> AsyncIterator[Small]:
    """A `Small` that is stopped at the end, with its log formatted and its engine's health checked often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "HEALTH_EVERY_S", 0.1 if by_messages else 0.01)  # each is a message that may fail
        server = Small(folder, by_messages=by_messages)
        logger = logging.getLogger("inferplane")
        patch.setattr(logger, "handlers", [server.lines])
        patch.setattr(logger, "propagate", False)
        patch.setattr(logger, "level", logging.INFO)
        async with kept_helpers():
            await server.start()
            try:
                yield server
            finally:
                await server.stop()


Work = Callable[[Small], Any]


def run(folder: Path, work: Work, *, by_messages: bool = False) -> None:
    """Run `work` on a small server."""

    async def inside() -> None:
        async with small(folder, by_messages=by_messages) as server:
            await work(server)

    asyncio.run(inside())
