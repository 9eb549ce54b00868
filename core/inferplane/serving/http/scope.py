"""ASGI's types, and the record that travels with each request from the gate to its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from inferplane.serving.admission import Deadline
from inferplane.serving.bodies import HeldMemory
from inferplane.serving.http.chunks import ChunkWriter
from inferplane.serving.keys import AccessKey
from inferplane.serving.shared_state.slots import SlotReservation

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTEXT = "inferplane.context"
"""The key of the `RequestContext` in a scope."""


@dataclass
class RequestContext:
    """What the gate and the routes tell each other about one request.

    Args:
        request_id: the client's X-Request-Id, or a new one.
        writer: writes the chunks of a streamed answer.
        key: the key that the client sent; None without keys.
        facts: what the log line of the request will contain.
        reservation: the slot acquired for a request that generates.
        is_traced: a span of OpenTelemetry covers the request, if there are spans.
        deadline: of a request that generates, once its time limit is known.
        held: the memory that the request takes, of the gate.
    """

    request_id: str
    writer: ChunkWriter
    key: AccessKey | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    reservation: SlotReservation | None = None
    is_traced: bool = False
    deadline: Deadline | None = None
    held: HeldMemory | None = None


def context_of(scope: Scope) -> RequestContext:
    """Return the record of a request."""
    context: RequestContext = scope[CONTEXT]
    return context


def find_held(scope: Scope) -> HeldMemory:
    """Return the memory that a request takes."""
    held = context_of(scope).held
    assert held is not None
    return held
