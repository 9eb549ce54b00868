"""What one request of a load is, and what is recorded of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferplane.cli.screen import escape_controls

REFUSED, TIMEOUT, CONNECTION, BROKEN, INTERRUPTED, OTHER = (
    *("refused", "timeout", "connection", "broken_stream", "interrupted", "other"),
)
FAILURES = {
    REFUSED: "refused (429, 503)",
    TIMEOUT: "timeout",
    CONNECTION: "connection",
    BROKEN: "broken stream",
    INTERRUPTED: "interrupted",
    OTHER: "other",
}
"""Kind of a failure -> its words."""
KIND_OF_STATUS = {429: REFUSED, 503: REFUSED, 408: TIMEOUT, 504: TIMEOUT}
"""Status of HTTP -> kind of failure; all others are `OTHER`."""
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class LoadRequest:
    """One request, before it is sent.

    Args:
        messages: the new messages of a conversation, `{"role", "content"}` each; empty where there is a prompt.
        prompt: a text or token ids, for one that is no conversation.
        output_tokens: the most to generate.
        think_s: seconds between the answer to the last request and this one.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    prompt: Prompt = ""
    output_tokens: int = 1
    think_s: float = 0.0


@dataclass(frozen=True)
class LoadConversation:
    """Requests of which each is sent after the answer to the one before it, with all messages so far."""

    requests: Sequence[LoadRequest]


@dataclass
class RequestRecord:
    """The times and counts of one request. Times are seconds after the run began.

    Args:
        requested_tokens: the most tokens that it may generate.
        due_s: when it was to be sent.
        sent_s: when it was sent.
        arrivals: when each event with text arrived.
        finished_s: when it ended or failed.
        prompt_tokens: of its prompt; 0 if they are not known.
        output_tokens: generated tokens.
        counted_by: "usage" (the server's count), "tokenizer" or "chunks" (events with text).
        finish_reason: the server's word.
        failure: its kind, one of `FAILURES`; "" for a request that ended.
        error: why it failed.
        text: the answer.
        has_wrong_usage: the server's counts could not be right, and were not used.
    """

    requested_tokens: int
    due_s: float
    sent_s: float
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    finished_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = ""
    finish_reason: str = ""
    failure: str = ""
    error: str = ""
    text: str = ""
    has_wrong_usage: bool = False

    def fail(self, kind: str, error: str) -> None:
        """Record that the request failed; the first failure counts."""
        if not self.failure:
            self.failure, self.error = kind, escape_controls(" ".join(error.split())[:300])

    @property
    def ttft_s(self) -> float | None:
        """From its sending to its first event with text; None without one."""
        return self.arrivals[0] - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float | None:
        """From its sending to its last event with text; None without one."""
        return self.arrivals[-1] - self.sent_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds for each token after the first; None without such tokens."""
        if self.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:])]
