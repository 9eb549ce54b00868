"""Chat templates, rendered in a process of their own, with limits of time and size.

A template comes with a checkpoint and is a program. Jinja's sandbox keeps it from accessing the machine, not from
looping, so it runs in a process that can be killed (`worker.py`). Requests cannot bring templates.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inferplane.serving.errors import invalid

RENDER_S = 2.0
"""Most seconds for one conversation."""
START_S = 30.0
"""Most seconds for the start of the process."""
MAX_CHARACTERS = 16 * 2**20
"""Most characters of a rendered conversation."""
_NO_CONTENT = re.compile(r"content['\"]?\]? is (not )?none")
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A model's chat template.

    Args:
        source: the Jinja template.
        tokens: special tokens by their names in templates.
        tool_source: another template for conversations with tools; None: `source` renders them too.
        render_s: most seconds for one conversation.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], tool_source: str | None = None, render_s: float = RENDER_S
    ) -> None:
        self._plain = _Worker(source, tokens, render_s)
        self._with_tools = _Worker(tool_source, tokens, render_s) if tool_source is not None else self._plain
        self.supports_tools = tool_source is not None or "tools" in source
        self.supports_null_content = _NO_CONTENT.search(tool_source or source) is not None
        """It recognizes an assistant message with only tool calls by the content null, not by an empty text."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatTemplate | None:
        """Return the template of a tokenizer of transformers; None if it has none."""
        found = tokenizer.chat_template
        tokens = {name: str(getattr(tokenizer, name)) for name in TOKENS if getattr(tokenizer, name, None) is not None}
        if isinstance(found, Mapping):
            plain = found.get("default") or next(iter(found.values()), None)
            return cls(str(plain), tokens, found.get("tool_use")) if plain else None
        return cls(str(found), tokens) if found else None

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render a conversation, ready for the reply.

        Raises:
            ApiError: the template refuses it, takes too long, or its result is too long.
        """
        given: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": True}
        if tools:
            given["tools"] = list(tools)
        return await (self._with_tools if tools else self._plain).render(given)

    async def close(self) -> None:
        """Kill the processes."""
        await self._plain.close()
        await self._with_tools.close()


class _Worker:
    """A process that runs `worker.py`, started at first use and again after it was killed."""

    def __init__(self, source: str, tokens: Mapping[str, str], render_s: float) -> None:
        self._setup = {"path": sys.path, "template": source, "tokens": dict(tokens), "max_characters": MAX_CHARACTERS}
        self._render_s = render_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def render(self, given: Mapping[str, Any]) -> str:
        line = json.dumps(given)
        await self._lock.acquire()
        rendering = asyncio.ensure_future(self._render(line))
        rendering.add_done_callback(self._on_rendered)
        # The answer is read even if this caller is cancelled: the process is then ready for the next one.
        answer = await asyncio.shield(rendering)
        if "error" in answer:
            raise invalid(f"The chat template refuses these messages: {answer['error']}.", "messages")
        return str(answer["text"])

    async def _render(self, line: str) -> dict[str, Any]:
        try:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            return await self._exchange(line, self._render_s)
        except BaseException:  # the answer may still arrive
            self._kill()
            raise

    def _on_rendered(self, rendering: asyncio.Future[dict[str, Any]]) -> None:
        self._lock.release()
        if not rendering.cancelled():
            rendering.exception()  # mark it as retrieved: the caller, if it still waits, raises it

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(Path(__file__).with_name("worker.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=8 * MAX_CHARACTERS,
        )
        await self._exchange(json.dumps(self._setup), START_S)

    async def _exchange(self, line: str, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()
            reply = await asyncio.wait_for(process.stdout.readline(), seconds)
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        except asyncio.TimeoutError:
            raise invalid(
                f"The chat template takes longer than {seconds:g} s for these messages.", "messages", "too_slow"
            ) from None
        if not reply:
            message = "The chat template cannot be rendered: its process ended."
            raise invalid(message, "messages", "template_failed")
        return dict(json.loads(reply))

    def _kill(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
        return process

    async def close(self) -> None:
        process = self._kill()
        if process is not None:
            await process.wait()
