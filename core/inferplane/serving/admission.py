"""The one place where a request is accepted or refused, whatever its wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferplane.engine import SamplingParams
from inferplane.errors import UsageError
from inferplane.serving.errors import from_engine, invalid
from inferplane.serving.settings import ServerSettings


@dataclass(frozen=True)
class GenerateCall:
    """A request as every wire format states it.

    Args:
        prompts: texts or token ids, each continued by itself.
        sampling: fields of `SamplingParams`, without `max_tokens`, `n` and `timeout_s`.
        max_tokens: most tokens to generate for each; None takes what has room.
        n: sequences for each prompt.
        request_id: refused while another request with the same lives; None: nobody cares.
        timeout_s: seconds for the whole; None takes the server's. Never more than the server's.
        special: whether texts get the special tokens that the model expects around them; a rendered conversation has
            them already.
        tenant: cached prefixes are shared within one only.
        operation: what it is, in OpenTelemetry's words: "text_completion", "chat" or "embeddings".
        model: the name that it asks for; "" for whatever is served.
        trace: headers that say under which span it belongs.
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
        """The wire format's name of a parameter."""
        return self.words.get(name, name)


def check_fan_out(ask: GenerateCall, settings: ServerSettings, most: int) -> int:
    """How many sequences a request asks for; ApiError 400 when they are too many ever to be served.

    Args:
        ask: the request.
        settings: the server's limits.
        most: sequences that can run and wait.
    """
    if not ask.prompts:
        raise invalid("There is no prompt.", ask.word("prompt"))
    if len(ask.prompts) > settings.max_prompts:
        raise invalid(
            f"{len(ask.prompts)} prompts; a request may hold {settings.max_prompts}.", ask.word("prompt"), "too_many"
        )
    if ask.n > settings.max_n:
        raise invalid(f"n = {ask.n}; at most {settings.max_n}.", ask.word("n"), "too_many")
    count = ask.n * len(ask.prompts)
    if count > most:
        raise invalid(f"{count} sequences; this server takes at most {most} at a time.", ask.word("n"), "too_many")
    return count


def build_sampling_params(
    ask: GenerateCall, prompt: Sequence[int], settings: ServerSettings, max_model_len: int, vocab: int
) -> SamplingParams:
    """How to sample one prompt, with every length checked; ApiError 400 naming the field that is wrong.

    Args:
        ask: the request.
        prompt: token ids.
        settings: the server's limits.
        max_model_len: most tokens of a sequence.
        vocab: token ids are below this.
    """
    word = ask.word("prompt")
    if not prompt:
        raise invalid("The prompt is empty.", word)
    bad = next((t for t in prompt if not 0 <= t < vocab), None)
    if bad is not None:
        raise invalid(f"Token id {bad} is not in the vocabulary, which has ids 0 to {vocab - 1}.", word)
    most_prompt = settings.max_prompt_tokens
    if most_prompt is not None and len(prompt) > most_prompt:
        raise invalid(f"The prompt has {len(prompt)} tokens; at most {most_prompt}.", word, "context_length_exceeded")
    room = max_model_len - len(prompt)
    if room < 1:
        raise invalid(
            f"The prompt has {len(prompt)} tokens, and a sequence at most {max_model_len} with what is generated.",
            word,
            "context_length_exceeded",
        )
    most = min(room, settings.max_output_tokens or room)
    if ask.max_tokens is not None and ask.max_tokens > most:
        name = ask.word("max_tokens")
        if most < room:
            raise invalid(f"{name} = {ask.max_tokens} exceeds {most}, this server's limit.", name)
        why = f"what {len(prompt)} tokens of prompt leave of {max_model_len}"
        raise invalid(f"{name} = {ask.max_tokens} exceeds {most}, {why}.", name, "context_length_exceeded")
    max_tokens = ask.max_tokens or most
    if ask.sampling.get("min_tokens", 0) > max_tokens:
        name = ask.word("min_tokens")
        raise invalid(f"{name} = {ask.sampling['min_tokens']} exceeds {max_tokens}, the most tokens.", name)
    timeout_s = min(ask.timeout_s or settings.request_timeout_s, settings.request_timeout_s)
    try:
        params = SamplingParams(max_tokens=max_tokens, timeout_s=timeout_s, **ask.sampling)
        params.check_ids(vocab)
    except UsageError as error:
        raise from_engine(error, ask.words) from error
    return params
