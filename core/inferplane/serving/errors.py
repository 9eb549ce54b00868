"""The one error class that clients see, in every wire format."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from inferplane.errors import CapacityError, EngineError, InferplaneError, UsageError, sentence

KINDS = {
    **dict.fromkeys((400, 405, 413, 415, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    **dict.fromkeys((408, 504), "timeout_error"),
}
"""HTTP status -> `type` of OpenAI's error object; all others are "server_error"."""
MAX_MESSAGE_CHARACTERS = 1000
TOO_COMPLEX = "constraint_too_complex"
"""Code of a constraint that is valid, but exceeds a limit: when it is compiled, or while its text is written."""


class ApiError(Exception):
    """A refusal or a failure, as a client sees it.

    Args:
        status: HTTP status; other transports map it.
        message: one or two sentences, for a person.
        param: the field of the request that is wrong.
        code: for programs.
        retry_after_s: seconds after which another try may succeed; None: waiting does not help.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str, retry_after_s: int | None = None
    ) -> None:
        shown = message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}..."
        self.status, self.message, self.param, self.code = status, shown, param, code
        self.retry_after_s = retry_after_s
        super().__init__(shown)

    @property
    def kind(self) -> str:
        """`type` of OpenAI's error object."""
        return KINDS.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


_NAMED = re.compile(r"^SamplingParams: (\w+)")
_CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tags")


def constraint_field(words: Mapping[str, str], given: Collection[str]) -> str | None:
    """Return the wire format's name of the constraint among the given parameters; None for none. As `from_engine`."""
    return next((words.get(name, name) for name in _CONSTRAINTS if name in given), None)


def from_engine(error: InferplaneError, words: Mapping[str, str], given: Collection[str] = ()) -> ApiError:
    """Return an error of the engine in the client's terms.

    Args:
        error: raised before the first token.
        words: the engine's name of a parameter -> the wire format's.
        given: the engine's names of the given parameters.
    """
    if isinstance(error, CapacityError) and "waiting already" in error.what:
        return queue_full(error.what)
    if isinstance(error, EngineError):
        return ApiError(503, "The engine has ended.", code="engine_ended", retry_after_s=10)
    if isinstance(error, UsageError) and "shut down" in error.what:
        return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after_s=5)
    if isinstance(error, UsageError) and "is alive" in error.what:
        return ApiError(409, error.what, param=words.get("request_id"), code="duplicate")
    if isinstance(error, (UsageError, CapacityError)):
        found = _NAMED.match(error.what)
        # If no parameter is named, the error is about the constraint: admission has checked the rest.
        text = f"{error.what} {sentence(f'There is: {error.there_is}')}" if error.there_is else error.what
        param = words.get(found[1], found[1]) if found else constraint_field(words, given)
        code = TOO_COMPLEX if "is refused as too complex" in error.what else "invalid_value"
        return invalid(text.removeprefix("SamplingParams: "), param, code)
    return internal()


def internal() -> ApiError:
    """Return the error for a fault of the server's own; the log has its cause."""
    return ApiError(500, "The request failed inside the server.", code="internal_error")


def queue_full(what: str) -> ApiError:
    """Return the error for a request for which no slot is free."""
    return ApiError(429, f"{what.rstrip('.')}. Try again later.", code="queue_full", retry_after_s=1)
