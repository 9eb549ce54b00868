"""Decides whether a request is accepted, in any wire format: its limits, its lengths, its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferplane.engine import SamplingParams
from inferplane.errors import UsageError
from inferplane.serving.errors import from_engine, invalid
from inferplane.serving.settings import ServerSettings

if TYPE_CHECKING:
    from inferplane.engine.clients.client import ModelInfo


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
        tenant: cached prefixes are shared within one tenant only.
        operation: the kind of request in OpenTelemetry's terms: "text_completion", "chat" or "embeddings".
        model: the requested name of the model; "" for any.
        trace: headers that name the parent of the request's span.
        words: the engine's name of a parameter -> the wire format's, for error messages.
    """

    prompts: Sequence[str | list[int]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    n: int = 1
    request_id: str | None = None
    timeout_s: float | None = None
    special: bool = True
    tenant: str = ""
    operation: str = "text_completion"
    model: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

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
    timeout_s = min(call.timeout_s or settings.request_timeout_s, settings.request_timeout_s)
    try:
        params = SamplingParams(max_tokens=max_tokens, timeout_s=timeout_s, **call.sampling)
        params.check_ids(info.vocab)
    except UsageError as error:
        raise from_engine(error, call.words) from error
    return params


def _check_prompt(call: GenerateCall, prompt: Sequence[int], settings: ServerSettings, info: ModelInfo) -> None:
    vocab, max_model_len = info.vocab, info.max_model_len
    word = call.word("prompt")
    if not prompt:
        raise invalid("The prompt is empty.", word)
    bad = next((t for t in prompt if not 0 <= t < vocab), None)
    if bad is not None:
        raise invalid(f"Token id {bad} is not in the vocabulary, which has ids 0 to {vocab - 1}.", word)
    max_prompt = settings.max_prompt_tokens
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
