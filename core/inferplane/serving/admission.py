"""Decides whether a request is accepted, in any wire format: its limits, its lengths, its sampling parameters.

Its time limit is kept here, by the process that serves: an engine that is stopped cannot keep limits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inferplane.engine import SamplingParams
from inferplane.errors import UsageError
from inferplane.serving.errors import ApiError, from_engine, invalid
from inferplane.serving.keys import AccessKey
from inferplane.serving.settings import ServerSettings

if TYPE_CHECKING:
    from inferplane.engine.clients.client import ModelInfo

T = TypeVar("T")
GRACE_S = 0.5
"""Seconds beyond its limit in which the engine itself may end a request, with its own timings."""
MIN_S = 0.001


class Deadline:
    """When a request has to end, on a clock that cannot be set.

    Args:
        limit_s: seconds from now that the server allows.
        own_s: see `shorten`.
    """

    def __init__(self, limit_s: float, own_s: object = None) -> None:
        self._started, self._limit_s, self._is_own = time.monotonic(), limit_s, False
        self.shorten(own_s)

    def shorten(self, own_s: object) -> None:
        """Take the client's own limit, in seconds, if it is not longer. What is no positive number is ignored, as None
        is; it is refused elsewhere.
        """
        if isinstance(own_s, (int, float)) and 0 < own_s <= self._limit_s:
            self._limit_s, self._is_own = own_s, True

    @property
    def left_s(self) -> float:
        """Seconds that are left, above 0."""
        return max(self._started + self._limit_s - time.monotonic(), MIN_S)

    def error(self) -> ApiError:
        """Return the error for a request that did not end in time: 408 if the limit is the client's own, else 504."""
        if self._is_own:
            return ApiError(408, f"The request ran into its own time limit, {self._limit_s:g} s.", code="timeout")
        return ApiError(504, "The request ran into this server's time limit.", code="timeout")

    async def enforce(self, work: Awaitable[T]) -> T:
        """Return the result of work, which is cancelled if it is not done in time.

        Raises:
            ApiError: 408 or 504, it was not.
        """
        task, is_late = asyncio.current_task(), False
        assert task is not None

        def on_late() -> None:
            nonlocal is_late
            is_late = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self.left_s, on_late)
        try:
            return await work
        except asyncio.CancelledError:
            # `uncancel` exists since Python 3.11; it shows whether the task was cancelled from elsewhere, too.
            if not is_late or getattr(task, "uncancel", int)() > 0:
                raise
            raise self.error() from None
        finally:
            timer.cancel()


@dataclass(frozen=True)
class GenerateCall:
    """A validated request, in the form that every wire format states.

    Args:
        prompts: texts or token ids, each continued by itself.
        sampling: fields of `SamplingParams`, without `max_tokens`, `n` and `timeout_s`.
        max_tokens: most tokens to generate per sequence; None: as many as fit.
        n: sequences per prompt.
        request_id: the request is refused while another with this id runs; None: no such check.
        timeout_s: seconds for the whole request; None: the server's limit. Never more than the server's.
        special: add the special tokens that the model expects around a text. A rendered conversation has them already.
        key: the key that the client sent; None without keys. Cached prefixes are shared among requests of one key only.
        operation: the kind of request in OpenTelemetry's terms: "text_completion", "chat" or "embeddings".
        model: the requested name of the model; "" for any.
        trace: headers that name the parent of the request's span.
        words: the engine's name of a parameter -> the wire format's, for error messages.
        ignored: what of the request has no effect, beside unknown fields.
        has_optional_tags: if the engine refuses `structural_tags`, the request runs without them.
        deadline: of the request if it has begun already; None: it begins with the admission.
    """

    prompts: Sequence[str | list[int]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    n: int = 1
    request_id: str | None = None
    timeout_s: float | None = None
    special: bool = True
    key: AccessKey | None = None
    operation: str = "text_completion"
    model: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    has_optional_tags: bool = False
    deadline: Deadline | None = field(default=None, compare=False)

    def word(self, name: str) -> str:
        """Return the wire format's name of a parameter."""
        return self.words.get(name, name)


def check_num_sequences(call: GenerateCall, settings: ServerSettings, max_sequences: int) -> int:
    """Return how many sequences a request needs.

    Args:
        call: the request.
        settings: the server's limits.
        max_sequences: how many sequences can run and wait.

    Raises:
        ApiError: 400, the server could never run that many.
    """
    if not call.prompts:
        raise invalid("There is no prompt.", call.word("prompt"))
    if len(call.prompts) > settings.max_prompts:
        message = f"{len(call.prompts)} prompts; a request may hold {settings.max_prompts}."
        raise invalid(message, call.word("prompt"), "too_many")
    if call.n > settings.max_n:
        raise invalid(f"n = {call.n}; at most {settings.max_n}.", call.word("n"), "too_many")
    count = call.n * len(call.prompts)
    if count > max_sequences:
        message = f"{count} sequences; this server takes at most {max_sequences} at a time."
        raise invalid(message, call.word("n"), "too_many")
    return count


class PromptLimits(NamedTuple):
    """What the server and its model allow of prompts.

    Args:
        max_prompts: most prompts of a request.
        max_prompt_tokens: most tokens of a prompt; None: as many as the model allows.
        max_model_len: a sequence has at most so many tokens.
    """

    max_prompts: int
    max_prompt_tokens: int | None
    max_model_len: int

    @classmethod
    def of(cls, settings: ServerSettings, info: ModelInfo) -> PromptLimits:
        """Return the limits of a server that serves a model."""
        return cls(settings.max_prompts, settings.max_prompt_tokens, info.max_model_len)


def check_prompt_lengths(given: Any, word: str, limits: PromptLimits) -> None:
    """Refuse lists that are longer than the model can use, before anything looks at their items.

    Args:
        given: what a body has as its prompt, in any form, valid or not.
        word: the wire format's name of the field.
        limits: of prompts.

    Raises:
        ApiError: 400, there are too many prompts, or one has too many tokens.
    """
    if not isinstance(given, list) or not given:
        return
    several = isinstance(given[0], (str, list))
    if several and len(given) > limits.max_prompts:
        raise invalid(f"{len(given)} prompts; a request may hold {limits.max_prompts}.", word, "too_many")
    for prompt in given if several else [given]:
        if isinstance(prompt, list):
            _check_length(prompt, word, limits)


def build_sampling_params(
    call: GenerateCall, prompt: Sequence[int], settings: ServerSettings, info: ModelInfo
) -> SamplingParams:
    """Return the sampling parameters of one prompt, with every length checked.

    Args:
        call: the request.
        prompt: token ids.
        settings: the server's limits.
        info: the engine's model.

    Raises:
        ApiError: 400, naming the field that is wrong.
    """
    _check_prompt(call, prompt, settings, info)
    max_tokens = _max_tokens(call, len(prompt), settings, info.max_model_len)
    if call.sampling.get("min_tokens", 0) > max_tokens:
        name = call.word("min_tokens")
        raise invalid(f"{name} = {call.sampling['min_tokens']} exceeds {max_tokens}, the most tokens.", name)
    deadline = call.deadline or Deadline(settings.request_timeout_s, call.timeout_s)
    try:
        params = SamplingParams(max_tokens=max_tokens, timeout_s=deadline.left_s, **call.sampling)
        params.check_ids(info.vocab)
    except UsageError as error:
        raise from_engine(error, call.words) from error
    return params


def _check_prompt(call: GenerateCall, prompt: Sequence[int], settings: ServerSettings, info: ModelInfo) -> None:
    word = call.word("prompt")
    if not prompt:
        raise invalid("The prompt is empty.", word)
    _check_length(prompt, word, PromptLimits.of(settings, info))
    bad = next((t for t in prompt if not 0 <= t < info.vocab), None)
    if bad is not None:
        raise invalid(f"Token id {bad} is not in the vocabulary, which has ids 0 to {info.vocab - 1}.", word)


def _check_length(prompt: Sequence[Any], word: str, limits: PromptLimits) -> None:
    max_prompt, max_model_len = limits.max_prompt_tokens, limits.max_model_len
    if max_prompt is not None and len(prompt) > max_prompt:
        raise invalid(f"The prompt has {len(prompt)} tokens; at most {max_prompt}.", word, "context_length_exceeded")
    if len(prompt) >= max_model_len:
        message = f"The prompt has {len(prompt)} tokens, and a sequence at most {max_model_len} with what is generated."
        raise invalid(message, word, "context_length_exceeded")


def _max_tokens(call: GenerateCall, prompt_tokens: int, settings: ServerSettings, max_model_len: int) -> int:
    """Return the most tokens to generate for a prompt; raise ApiError 400 if the request asks for more."""
    space = max_model_len - prompt_tokens
    limit = min(space, settings.max_output_tokens or space)
    if call.max_tokens is not None and call.max_tokens > limit:
        name = call.word("max_tokens")
        if limit < space:
            raise invalid(f"{name} = {call.max_tokens} exceeds {limit}, this server's limit.", name)
        why = f"what {prompt_tokens} tokens of prompt leave of {max_model_len}"
        raise invalid(f"{name} = {call.max_tokens} exceeds {limit}, {why}.", name, "context_length_exceeded")
    return call.max_tokens or limit
