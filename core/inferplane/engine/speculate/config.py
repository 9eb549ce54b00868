"""How to speculate. The names are those of the system whose documents this project follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from inferplane.errors import UsageError

Method = Literal["inference_with_reference", "draft_model", "mtp", "eagle"]
VerifyStrategy = Literal["rejection", "target_match", "greedy", "topp"]
AcceptPolicy = Literal["normal", "accept_all", "reject_all"]

MOST_DRAFT_TOKENS = 7
"""A sequence with a decode token and this many drafts still counts as one with few query tokens."""

ALIASES = {"ngram": "inference_with_reference", "draft": "draft_model"}
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting and verifying several tokens a step.

    Args:
        speculate_method: "inference_with_reference" (or "ngram": drafts copied from the prompt and the text so far),
            "draft_model" (or "draft": a smaller model of the same vocabulary), "mtp" (the model's own
            multi-token-prediction layer), or "eagle" (a head that was trained on the model's hidden states).
        speculate_max_draft_token_num: most drafts a sequence and step, 1 to 7.
        speculate_max_ngram_size: longest key that n-gram drafting looks for.
        verify_strategy: "rejection" and "target_match" keep the model's distribution; "greedy" keeps it at temperature
            0 only; "topp" accepts any draft inside the nucleus and changes the distribution.
        accept_policy: "accept_all" and "reject_all" are for debugging.
        adaptive: draft fewer tokens after rejections and more after acceptances.
        speculate_max_candidate_len: most nucleus members that "topp" accepts.
        draft_model_name_or_path: the draft model or the EAGLE head: a folder, or "demo-draft" and "demo-eagle", which
            draft for the demo model.
        draft_model_dtype: as `dtype`, for the draft model; an EAGLE head runs in the model's.
        draft_model_kv_dtype: as `kv_dtype`, for the draft model.
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
    draft_model_name_or_path: Any = None
    draft_model_dtype: str = "auto"
    draft_model_kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculate_method", ALIASES.get(self.speculate_method, self.speculate_method))
        choices = (
            ("speculate_method", (*METHODS, *ALIASES)),
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
        if (self.draft_model_name_or_path is not None) != (self.speculate_method in ("draft_model", "eagle")):
            raise UsageError(
                f"speculate_method = {self.speculate_method!r} with draft_model_name_or_path = "
                f"{self.draft_model_name_or_path!r}.",
                there_is="a draft for 'draft_model' and 'eagle', none for the other methods",
                remedy="name its folder, or 'demo-draft' or 'demo-eagle' for the demo model",
            )

    @property
    def keys_next_token(self) -> bool:
        """Whether cached blocks hold entries that depend on the token behind the block, as drafting layers' do."""
        return self.speculate_method in ("mtp", "eagle")
