"""Threads for large bodies: one waits for the process that checks them, one parses and reads what is valid."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from inferplane.serving.admission import PromptLimits
from inferplane.serving.bodies import LARGE_BYTES, HeldMemory
from inferplane.serving.large_bodies.reader import LargeBodyReader
from inferplane.serving.wire import parse

Result = TypeVar("Result")


class BodyThreads:
    """Reads bodies without holding up the event loop.

    Args:
        max_body_bytes: the largest body.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="inferplane-read")
        self._checking = ThreadPoolExecutor(1, thread_name_prefix="inferplane-check")
        self._checks = LargeBodyReader(max_body_bytes)

    async def read(self, num_bytes: int, function: Callable[..., Result], *args: Any) -> Result:
        """As `Service.read`."""
        if num_bytes <= LARGE_BYTES:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._reading, function, *args)

    async def read_json(
        self, path: str, body: bytes, held: HeldMemory, limits: Callable[[], PromptLimits]
    ) -> dict[str, Any]:
        """As `Service.read_json`; `limits` are looked up for a large body."""
        if len(body) <= LARGE_BYTES:
            return parse(body)
        loop, most = asyncio.get_running_loop(), limits()
        checked = await loop.run_in_executor(self._checking, self._checks.check, path, body, most)
        held.add(checked.value_bytes)
        return await self.read(len(body), parse, checked.body)

    async def close(self) -> None:
        """End the process, and begin nothing that waits."""
        for threads in (self._reading, self._checking):
            threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._checks.close)
