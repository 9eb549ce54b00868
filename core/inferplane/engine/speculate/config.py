"""How to speculate, and what the runner has to load for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from inferplane.engine.request.arguments import (
    DRAFT_ALIASES,
    DRAFT_METHODS,
    MAX_CANDIDATES,
    MAX_INTEGER,
    MAX_LOOKUP_TOKENS,
    MAX_SPEC_FACTOR,
    MAX_TREE_DEPTH,
    NETWORK_METHODS,
    NO_DRAFTS,
    as_bool,
    as_integer,
    as_number,
    current_names,
)
from inferplane.engine.request.arguments import MAX_SPECULATIVE_TOKENS as MAX_SPECULATIVE_TOKENS
from inferplane.engine.runner.loading.drafters import choose_quantization
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.engine.runner.options import AS_STORED, Draft, RunnerOptions
from inferplane.engine.speculate.methods import check_method, list_methods
from inferplane.errors import UsageError
from inferplane.quant import SCHEMES
from inferplane.renamed import old_attributes, old_names

VerifyStrategy = Literal["rejection", "target_match", "greedy", "topp"]
AcceptPolicy = Literal["normal", "accept_all", "reject_all"]

OLD_NAMES = {
    "speculate_method": "method",
    "speculate_max_draft_token_num": "num_speculative_tokens",
    "speculate_max_ngram_size": "prompt_lookup_max",
    "speculate_max_candidate_len": "max_candidates",
    "speculate_verify_window": "verify_window",
    "draft_model_name_or_path": "model",
    "draft_model_dtype": "draft_dtype",
    "draft_model_kv_dtype": "draft_kv_cache_dtype",
    "draft_model_quant_type": "draft_quantization",
}
"""Names of the fields until 0.2, which are the source system's (`serving/source_names.py`); they go with 0.3."""


@old_attributes({"keys_next_token": "hash_covers_next_token"})
@old_names(OLD_NAMES)
@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafting and verifying several tokens per step.

    Args:
        method: "ngram" (drafts are copied from the prompt and the text so far), "suffix" (these, and earlier answers,
            as far as they agree and by how often), "draft_model" (a smaller model of the same vocabulary drafts), "mtp"
            (the model's own multi-token-prediction layer), "eagle" (a head that was trained on the model's hidden
            states), or a method that a plugin registered.
        num_speculative_tokens: maximum number of drafts per sequence and step, 1 to 7.
        prompt_lookup_max: longest key, in tokens, that n-gram drafting searches for.
        verify_strategy: "rejection" and "target_match" keep the model's distribution; "greedy" keeps it at temperature
            0 only; "topp" accepts any draft inside the nucleus and changes the distribution.
        accept_policy: "accept_all" and "reject_all" are for debugging.
        adaptive: draft fewer tokens after rejections and more after acceptances.
        max_candidates: maximum number of nucleus members that "topp" accepts.
        model: the draft model, the EAGLE head or the prediction layers: a folder, a name on a hub, or "demo-draft" and
            "demo-eagle", which draft for the demo model. Without it "mtp" takes the layers in the model's own files. A
            folder of prediction layers may be a whole checkpoint, or these layers alone; the embedding and the output
            head are the model's where it lacks them or has equal ones, else its own.
        draft_dtype: as `dtype`, for the draft model; an EAGLE head and prediction layers run in the model's.
        draft_kv_cache_dtype: as `kv_cache_dtype`, for the draft model.
        verify_window: under "topp", how many following drafts must be the most likely tokens to accept a second-best
            one.
        draft_quantization: as `quantization`, for what drafts; "none": as it is stored. Left out: the model's, unless
            it has files of its own that are quantized already.
        only_if_faster: draft only as far as it gives more tokens a second, by measured steps of as many sequences; not
            where a request has a seed and drafts may change what is drawn. Off where `adaptive` is.
        suffix_decoding_max_tree_depth: most last tokens that suffix drafting compares with earlier text, 1 to 256.
        suffix_decoding_max_cached_requests: most earlier answers that suffix drafting copies from, each for requests of
            the same tenant alone; 0: only the request's own text.
        suffix_decoding_max_cached_tokens: most tokens of all these answers, about 150 bytes of the host's memory each.
        suffix_decoding_max_spec_factor: most drafts for each token of the matched suffix, 0 to 64.
        suffix_decoding_min_token_prob: least probability, by the counts, with which suffix drafting adds a draft, 0 to
            1; it is the product of those of the drafts so far.
        options: of a plugin's method, by their names; in a mapping they may stand beside the other fields.

    Raises:
        UsageError: a value is unknown or out of range.
    """

    method: str
    num_speculative_tokens: int = 1
    prompt_lookup_max: int = 3
    verify_strategy: VerifyStrategy = "rejection"
    accept_policy: AcceptPolicy = "normal"
    adaptive: bool = True
    max_candidates: int = 5
    verify_window: int = 2
    model: Any = None
    draft_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    draft_quantization: str | None = None
    only_if_faster: bool = True
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 500_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", DRAFT_ALIASES.get(self.method, self.method))
        strategies, policies = get_args(VerifyStrategy), get_args(AcceptPolicy)
        defaults = {f.name: f.default for f in fields(self)}
        _check_types({name: getattr(self, name) for name in defaults}, defaults)
        if self.method not in NETWORK_METHODS:
            check_method(self.method, self.options)
        elif self.options:
            raise UsageError(
                f"options = {self.options!r:.80} with method = {self.method!r}, which has none of its own."
            )
        for name, known in (("verify_strategy", strategies), ("accept_policy", policies)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} = {getattr(self, name)!r}.", there_is=", ".join(known))
        ranges = (
            ("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", 1, MAX_LOOKUP_TOKENS),
            ("max_candidates", 1, MAX_CANDIDATES),
            ("verify_window", 0, MAX_SPECULATIVE_TOKENS),
            ("suffix_decoding_max_tree_depth", 1, MAX_TREE_DEPTH),
            ("suffix_decoding_max_cached_requests", 0, MAX_INTEGER),
            ("suffix_decoding_max_cached_tokens", 0, MAX_INTEGER),
            ("suffix_decoding_max_spec_factor", 0, MAX_SPEC_FACTOR),
            ("suffix_decoding_min_token_prob", 0, 1),
        )
        for name, low, high in ranges:
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} = {getattr(self, name)!r}.", there_is=f"{low} to {high}")
        changed = [name for name in defaults if name.startswith("suffix_") and getattr(self, name) != defaults[name]]
        if self.method != "suffix" and changed:
            what = (
                f"{changed[0]} = {getattr(self, changed[0])!r} with method = {self.method!r}, which does not read it."
            )
            raise UsageError(what, remedy="leave it out, or choose method 'suffix'")
        if self.method != "mtp" and (self.model is not None) != (self.method in ("draft_model", "eagle")):
            raise UsageError(
                f"method = {self.method!r} with model = {self.model!r}.",
                there_is="a model for 'draft_model', 'eagle' and, with files of its own, 'mtp'; none for others",
                remedy="name its folder, or 'demo-draft' or 'demo-eagle' for the demo model",
            )
        if self.draft_quantization not in (known := (None, AS_STORED, *SCHEMES)):
            raise UsageError(
                f"draft_quantization = {self.draft_quantization!r:.80}.", there_is=", ".join(map(repr, known))
            )
        if self.draft_quantization is not None and self.method not in NETWORK_METHODS:
            what = f"draft_quantization = {self.draft_quantization!r} with method = {self.method!r}"
            raise UsageError(f"{what}, which has no weights.", remedy="leave it out")

    @classmethod
    def of(cls, value: Any) -> SpeculativeConfig | None:
        """The config itself, or made from a mapping with its fields; None stays None, as does a method of none.

        Raises:
            UsageError: it is neither, or a value is unknown or out of range.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(
                f"speculative_config = {value!r}.", there_is="SpeculativeConfig, and mappings with its fields"
            )
        named = current_names(value, OLD_NAMES)
        known = {f.name: f.default for f in fields(cls)}
        odd = [name for name in named if name not in known]
        if odd and named.get("method") not in (None, *DRAFT_METHODS, *DRAFT_ALIASES, *NO_DRAFTS):
            own = {name: named.pop(name) for name in odd}
            named["options"] = {**named.get("options", {}), **own}
        elif odd:
            raise UsageError(f"speculative_config names {odd[0]!r}.", there_is=", ".join(known))
        if "method" in named and named["method"] in (None, *NO_DRAFTS):
            return None
        if not isinstance(named.get("method"), str):
            method = named.get("method")
            raise UsageError(f"speculative_config has method = {method!r}.", there_is=", ".join(list_methods()))
        if not isinstance(named.get("options", {}), Mapping):
            raise UsageError(f"options = {named['options']!r:.80}.", there_is="mappings of a plugin's own options")
        return cls(**named)

    @property
    def hash_covers_next_token(self) -> bool:
        """Whether the hash of a cached block must cover the token after the block too, because entries in the block
        depend on it, as those of draft layers do.
        """
        return self.method in ("mtp", "eagle")


def _check_types(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise UsageError for a value of another type than its default, where that is a number or a switch."""
    for name, value in values.items():
        if type(defaults[name]) is int:
            as_integer(name, value, 0)
        elif type(defaults[name]) is bool:
            as_bool(name, value)
        elif type(defaults[name]) is float:
            as_number(name, value)


def with_draft(options: RunnerOptions, config: SpeculativeConfig | None, *, configs: bool = False) -> RunnerOptions:
    """The runner's options with what the method needs: prediction layers, an EAGLE head, a draft model.

    A draft model is bound and loaded by itself: its own dtype, KV dtype and weight formats, no pins and no lock file,
    which name the model's sites, and on rank 0 alone where several ranks share the model. An EAGLE head and prediction
    layers run in the model's dtype, on its hidden states, with weight formats of their own.

    Args:
        options: the runner's.
        config: the method; None: none.
        configs: of a draft model's name on a hub only the config is downloaded, for a plan.

    Raises:
        UsageError: no such folder. CheckpointError: it lacks a readable config.
    """
    if config is None:
        return options
    options = replace(options, num_drafts=config.num_speculative_tokens)
    if config.method not in NETWORK_METHODS:
        return options
    quantization = config.draft_quantization
    if config.method == "mtp" and config.model is None:
        return replace(options, mtp=True, has_draft_layer=True, draft_quantization=quantization)
    files = ModelFiles(config.model, configs=configs)
    if config.method == "mtp":
        return replace(options, mtp=True, has_draft_layer=True, mtp_files=files, draft_quantization=quantization)
    if config.method == "eagle":
        return replace(options, eagle=files, has_draft_layer=True, draft_quantization=quantization)
    own = replace(
        options,
        dtype=config.draft_dtype,
        kv_cache_dtype=config.draft_kv_cache_dtype,
        quantization=choose_quantization(quantization, options.quantization, files, own_files=True),
        ops={},
        lock=None,
        mtp=False,
        num_drafts=1,  # it runs on the newest token, and on an accepted draft of which it has no entry yet
        ranks=1,
    )
    return replace(options, draft=Draft(files, own))
