"""What a caller asks of generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferplane.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. The names are those users know from other engines.

    Args:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 takes the likeliest token each time; larger is more random.
        top_p: keep the likeliest tokens that together reach this probability, in (0, 1].
        top_k: keep this many likeliest tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the likeliest one's probability, in [0, 1].
        seed: equal seeds give equal tokens whatever else is in the batch; None draws a fresh seed.
        stop: a string or strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the text, beside the model's own.
        ignore_eos: do not end at the model's end-of-text tokens.
        min_tokens: end-of-text tokens cannot be chosen before this many tokens.

    Raises:
        UsageError: a value lies outside its range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.top_k == -1:  # another common spelling of "all"
            object.__setattr__(self, "top_k", 0)
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            ("stop", all(self.stop), "non-empty strings"),
        )
        for name, ok, rule in checks:
            if not ok:
                raise UsageError(f"SamplingParams: {name} = {getattr(self, name)!r}.", there_is=f"values {rule}")


GREEDY = SamplingParams(temperature=0.0)
