"""How to speculate. The names are those of the system whose documents this project follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inferplane.errors import UsageError

Method = Literal["inference_with_reference", "mtp"]
VerifyStrategy = Literal["rejection", "target_match", "greedy", "topp"]
AcceptPolicy = Literal["normal", "accept_all", "reject_all"]

MOST_DRAFT_TOKENS = 7
"""A sequence with a decode token and this many drafts still counts as one with few query tokens."""

ALIASES = {"ngram": "inference_with_reference"}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting and verifying several tokens a step.

    Args:
        speculate_method: "inference_with_reference" (or "ngram": drafts copied from the prompt and the text so far) or
            "mtp" (the model's own multi-token-prediction layer).
        speculate_max_draft_token_num: most drafts a sequence and step, 1 to 7.
        speculate_max_ngram_size: longest key that n-gram drafting looks for.
        verify_strategy: "rejection" and "target_match" keep the model's distribution; "greedy" keeps it at temperature
            0 only; "topp" accepts any draft inside the nucleus and changes the distribution.
        accept_policy: "accept_all" and "reject_all" are for debugging.
        adaptive: draft fewer tokens after rejections and more after acceptances.
        speculate_max_candidate_len: most nucleus members that "topp" accepts.
        speculate_verify_window: under "topp", how many following drafts must be the likeliest for a second-best one.

    Raises:
        UsageError: a value is unknown or out of range.
    """

    speculate_method: str
    speculate_max_draft_token_num: int = 1
    speculate_max_ngram_size: int = 3
    verify_strategy: VerifyStrategy = "rejection"
    accept_policy: AcceptPolicy = "normal"
    adaptive: bool = True
    speculate_max_candidate_len: int = 5
    speculate_verify_window: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculate_method", ALIASES.get(self.speculate_method, self.speculate_method))
        choices = (
            ("speculate_method", ("inference_with_reference", "mtp")),
            ("verify_strategy", ("rejection", "target_match", "greedy", "topp")),
            ("accept_policy", ("normal", "accept_all", "reject_all")),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise UsageError(f"{name} = {getattr(self, name)!r}.", there_is=", ".join(known))
        ranges = (
            ("speculate_max_draft_token_num", 1, MOST_DRAFT_TOKENS),
            ("speculate_max_ngram_size", 1, 16),
            ("speculate_max_candidate_len", 1, 64),
            ("speculate_verify_window", 0, MOST_DRAFT_TOKENS),
        )
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} = {getattr(self, name)!r}.", there_is=f"{low} to {high}")
