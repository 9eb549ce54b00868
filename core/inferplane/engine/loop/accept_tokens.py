"""New tokens become part of their sequence: its text, its constraint, its times, and whether it has an end."""

from __future__ import annotations

import time

from inferplane.engine.loop.choose_tokens import ChosenTokens
from inferplane.engine.loop.metrics import Metrics
from inferplane.engine.request.results import FinishReason
from inferplane.engine.request.state import Request


def accept_tokens(request: Request, chosen: ChosenTokens, metrics: Metrics) -> FinishReason | None:
    """Append a sequence's new tokens up to its end; returns why it ends, None while it goes on."""
    now = time.monotonic()
    if request.pending and chosen.tokens:
        request.pending -= 1
    for i, token in enumerate(chosen.tokens):
        request.generated.append(token)
        metrics.counters["generation_tokens_total"] += 1
        if request.logprobs is not None:
            request.logprobs.append(chosen.logprobs[i])
        if request.history is not None:
            request.history.extend([token])
        if request.constraint is not None:
            request.constraint.accept([token])
        _measure_token(request, now, metrics)
        if request.push_text(token):
            return "stop"
        if len(request.generated) >= request.params.max_tokens:
            return "length"
    return None


def _measure_token(request: Request, now: float, metrics: Metrics) -> None:
    """Record the times of a sequence's new token: to the first token, or between two tokens."""
    if request.first_token is None:
        request.first_token = now
        metrics.observe("time_to_first_token_seconds", now - request.arrived)
    elif request.last_token is not None:
        metrics.observe("inter_token_latency_seconds", now - request.last_token)
    request.last_token = now
