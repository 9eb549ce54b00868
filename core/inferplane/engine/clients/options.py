"""`EngineOptions`: the one record of options, from which `LLM`, the command line and the server's settings are made.

Without torch: a process whose engine lives in another one reads it, too.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from inferplane.engine.request.arguments import (
    ASYNC_SCHEDULING,
    DRAFT_ALIASES,
    DRAFT_METHODS,
    HEAD_FORMATS,
    INDEX_KEY_DTYPES,
    MAX_CANDIDATES,
    MAX_INTEGER,
    MAX_LOOKUP_TOKENS,
    MAX_SPEC_FACTOR,
    MAX_SPECULATIVE_TOKENS,
    MAX_TREE_DEPTH,
    NO_DRAFTS,
    VERIFY_STRATEGIES,
    as_bool,
    as_integer,
    check_quantization,
    current_names,
    resolve_kv_cache_dtype,
)
from inferplane.engine.request.other_engines import advice
from inferplane.engine.request.params import unknown_keyword
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine.runner.options import RunnerOptions
    from inferplane.engine.schedule.insertion import Insertion

OLD_NAMES = {
    "max_batch": "max_num_seqs",
    "max_step_tokens": "max_num_batched_tokens",
    "kv_dtype": "kv_cache_dtype",
    "prefix_cache": "enable_prefix_caching",
    "speculative": "speculative_config",
}
"""Names of the options until 0.2. In Python they go with 0.3; as flags and settings they remain as aliases."""
ALIASES = {
    **OLD_NAMES,
    "speculate": "speculative_method",
    "speculate_method": "speculative_method",
    "drafts": "num_speculative_tokens",
    "speculate_max_draft_token_num": "num_speculative_tokens",
    "draft_model": "speculative_model",
    "draft_model_name_or_path": "speculative_model",
    "draft_model_quant_type": "speculative_quantization",
    "draft_quantization": "speculative_quantization",
    "speculate_max_ngram_size": "prompt_lookup_max",
    "speculate_max_candidate_len": "max_candidates",
    "speculate_verify_window": "verify_window",
}
"""Other name of a flag or of a setting -> its name. They work everywhere; help does not show them."""
MAX_BYTES = 2**63 - 1
"""Largest number of bytes; sizes have 64 bits."""


def _option(default: Any, metavar: str | None = None, **checks: Any) -> Any:
    """A dataclass field with its default, the placeholder of its value in help (None: argparse's own), and its checks:
    `minimum` and `maximum` (left out: `MAX_INTEGER`), `choices`, or `types` and `form` (in words).
    """
    return field(default=default, metadata={"metavar": metavar, **checks})


def _name(default: str, metavar: str, form: str = "a name") -> Any:
    return _option(default, metavar, types=str, form=form)


@dataclass(frozen=True)
class EngineOptions:
    """The options of `LLM`, checked and with their current names.

    Args:
        device: a backend's name; "auto" takes the best one available, and says which. Never another device than
            requested.
        index: which of several devices of that kind, from 0.
        dtype: float32, bfloat16, float16 (in Python also a torch dtype); auto: the checkpoint's.
        max_model_len: maximum tokens of a sequence; left out: what the model allows and the cache can hold.
        strict: refuse to run when a hot op is left on its slow reference.
        ops: pins of ops, or of sites such as 'layers.*.mlp', to a provider, a variant of the op, reference or
            decomposition.
        kv_cache_dtype: how the KV cache stores entries: auto (as dtype), fp8, int8, int4, k8v4 (keys in int8, values
            in int4) where the backend has them; fp8_static, int8_static: with the checkpoint's scales, one a layer, on
            any backend; c8 in the name of a quantization decides it.
        index_key_dtype: how layers with sparse attention store the keys by which they choose tokens: auto (as
            kv_cache_dtype, in at least 8 bits), fp8, int8, none (as dtype).
        quantization: quantize linear weights while they are read: weight_only_int8, weight_only_int4,
            weight_only_mxfp4, weight_only_nvfp4, a8w8 (int8, and activations in int8 where a kernel quantizes them),
            a8w8c8 (that, and a KV cache in int8), a8w8_fp8 (FP8 in blocks of 128 x 128, activations in FP8 where a
            kernel quantizes them; an FP8 checkpoint as it is), a8w8c8_fp8 (that, and a KV cache in fp8),
            a8w8_fp8_wint4 (as a8w8_fp8, but experts in int4), a8w4 and a4w4 (int4, and activations in int8 or int4
            where a kernel quantizes them), a4w4_mxfp4 (both in MXFP4). Each op gets the groups of columns that the
            device's kernels read; left out: the checkpoint's format.
        head_format: what quantization makes of the output head, and of an embedding that is tied to it: int8, int4,
            none (it stays); auto: int8, but in FP8 it stays.
        kv_cache_bytes: memory for the KV cache; left out: at most 30 % of what is free, and no more than the sequences
            of a step can use. A warning says if it shortens sequences.
        max_num_seqs: maximum sequences per step.
        max_num_batched_tokens: maximum tokens per step; longer prompts are split into chunks.
        max_new_requests_per_step: most requests that join in one step; None: unlimited.
        max_prompt_tokens_per_step: most tokens of prompts in a step in which others decode; None: unlimited.
        max_inter_token_ms: milliseconds between two tokens of running streams: prompts get as many tokens of a step
            as measured times of steps allow; None: all that the step has.
        deterministic: use only kernels whose results do not depend on the batch.
        load_format: auto, or dummy for random weights of the config's shapes.
        mtp: also load the multi-token-prediction layers.
        lock: a lock file with kernel choices that were measured on this machine.
        progress: called with `(bytes done, bytes in all)` while weights are loaded.
        enable_prefix_caching: reuse the cache's blocks for equal beginnings of prompts.
        max_waiting: maximum number of waiting requests; None: unlimited.
        speculative_config: draft and verify several tokens per step (`SpeculativeConfig`, or a mapping with its
            fields).
        tensor_parallel_size: number of processes that share the model; None takes all that torchrun started. Rank 0
            goes on and schedules; in the others this call runs its steps, and ends the process when rank 0 closes the
            model.
        capture: capture decode steps and replay them, on devices that can; False runs every step eagerly.
        kv_cache_tokens: as kv_cache_bytes, in tokens: the cache holds so many, of all sequences together.
        async_scheduling: schedule and launch the next step while one runs: on, off; auto: on devices that run
            asynchronously.

    Raises:
        UsageError: a value has the wrong type, or is out of range.
    """

    device: str = _name("auto", "X", "a backend's name, or 'auto'")
    index: int = _option(0, "I")
    dtype: Any = _option("auto", "D", form="a dtype's name, or a torch dtype")
    max_model_len: int | None = _option(None, "N", minimum=1)
    strict: bool = False
    ops: Mapping[str, str] | None = _option(
        None, "WHAT=PROVIDER", types=(Mapping, type(None)), form="a mapping of site or op name -> provider"
    )
    kv_cache_dtype: str = _name("auto", "D")
    index_key_dtype: str = _option("auto", "D", choices=INDEX_KEY_DTYPES)
    quantization: str | None = _option(None, "Q")
    head_format: str = _option("auto", "F", choices=HEAD_FORMATS)
    kv_cache_bytes: int | None = _option(None, "SIZE", minimum=0, maximum=MAX_BYTES)
    max_num_seqs: int = _option(32, "N", minimum=1)
    max_num_batched_tokens: int = _option(2048, "N", minimum=1)
    max_new_requests_per_step: int | None = _option(None, "N", minimum=1)
    max_prompt_tokens_per_step: int | None = _option(None, "N", minimum=1)
    max_inter_token_ms: int | None = _option(None, "MS", minimum=1)
    deterministic: bool = False
    load_format: str = _option("auto", "F", choices=("auto", "dummy"))
    mtp: bool = False
    lock: Any = _option(None, "FILE", types=(str, os.PathLike, type(None)), form="a path")
    progress: Callable[[int, int], None] | None = _option(
        None, types=(Callable, type(None)), form="a function of (bytes done, bytes in all)"
    )
    enable_prefix_caching: bool = True
    max_waiting: int | None = _option(None, minimum=0)
    speculative_config: Any = None
    tensor_parallel_size: int | None = _option(None, minimum=1)
    capture: bool = True
    kv_cache_tokens: int | None = _option(None, "N", minimum=1)
    async_scheduling: str = _option("auto", "W", choices=ASYNC_SCHEDULING)

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value, checks = option.name, getattr(self, option.name), option.metadata
            if "choices" in checks and value not in checks["choices"]:
                raise UsageError(f"{name} = {value!r}.", there_is=", ".join(map(repr, checks["choices"])))
            most = checks.get("maximum", MAX_INTEGER)
            if "minimum" in checks and not (value is None and option.default is None):
                object.__setattr__(self, name, as_integer(name, value, checks["minimum"], most))
            if option.type == "bool":  # annotations are text
                as_bool(name, value)
            if "types" in checks and not isinstance(value, checks["types"]):
                raise UsageError(f"{name} = {value!r}.", there_is=checks["form"])
        check_quantization(self.quantization)
        object.__setattr__(self, "kv_cache_dtype", resolve_kv_cache_dtype(self.quantization, self.kv_cache_dtype))
        if self.kv_cache_bytes is not None and self.kv_cache_tokens is not None:
            what = f"kv_cache_bytes = {self.kv_cache_bytes} with kv_cache_tokens = {self.kv_cache_tokens}."
            raise UsageError(what, there_is="one size of the cache", remedy="leave one of them out")
        torch = sys.modules.get("torch")  # a caller with one of its dtypes has imported it
        if not isinstance(self.dtype, str) and (torch is None or not isinstance(self.dtype, torch.dtype)):
            raise UsageError(f"dtype = {self.dtype!r}.", there_is=OPTIONS["dtype"].metadata["form"])
        for site, provider in (self.ops or {}).items():
            if not isinstance(site, str) or not isinstance(provider, str):
                raise UsageError(f"ops names {site!r}: {provider!r}.", there_is=OPTIONS["ops"].metadata["form"])

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineOptions:
        """The record of the keyword arguments of `LLM`; an old name is a DeprecationWarning.

        Raises:
            UsageError: an unknown name, an option given twice, or an invalid value.
        """
        named = current_names(options, OLD_NAMES)
        for name, value in named.items():
            if name not in OPTIONS:
                raise unknown_keyword("LLM", name, value, ["model", *OPTIONS], advice(name))
        return cls(**named)

    @property
    def insertion(self) -> Insertion:
        """How prompts join what runs."""
        from inferplane.engine.schedule.insertion import Insertion

        return Insertion(**{f.name: getattr(self, f.name) for f in fields(Insertion)})

    def runner_options(self, ranks: int) -> RunnerOptions:
        """The options that say how to bind and load the model, for a model shared by `ranks` processes."""
        from inferplane.engine.runner.options import RunnerOptions

        own = {f.name: getattr(self, f.name) for f in fields(RunnerOptions) if f.name in OPTIONS}
        lock = None if self.lock is None else str(self.lock)
        return RunnerOptions(**{**own, "ops": dict(self.ops or {}), "lock": lock, "ranks": ranks})


@dataclass(frozen=True)
class SpeculativeOptions:
    """The fields of `speculative_config` that are flags, and settings of the server, of their own.

    Args:
        speculative_method: draft several tokens per step: ngram (copies from the text), suffix (copies from the text
            and from earlier answers), draft_model, mtp (the model's own layer), eagle.
        num_speculative_tokens: maximum drafts per sequence and step, 1 to 7.
        speculative_model: folder or name of the draft model, EAGLE head, or prediction layers (mtp; left out: the
            model's own); demo-draft, demo-eagle: for the demo model.
        speculative_quantization: as quantization, for what drafts; none: as it is stored; left out: the model's, unless
            it has files of its own that are quantized already.
        prompt_lookup_max: longest key, in tokens, that ngram searches for, 1 to 16; left out: 3.
        verify_strategy: which drafts are accepted: rejection and target_match keep the model's distribution, greedy
            keeps it at temperature 0, topp accepts any draft inside the nucleus; left out: rejection.
        max_candidates: most members of the nucleus that topp accepts, 1 to 64; left out: 5.
        verify_window: under topp, how many next drafts must be the most likely tokens to accept a second-best one, 0
            to 7; left out: 2.
        suffix_decoding_max_tree_depth: most last tokens that suffix compares with earlier text, 1 to 256; left out: 24.
        suffix_decoding_max_cached_requests: most earlier answers that suffix copies from, each for requests of the same
            key alone; 0: only the request's own text; left out: 10000.
        suffix_decoding_max_cached_tokens: most tokens of all these answers; left out: 500000.
        suffix_decoding_max_spec_factor: most drafts of suffix for each token that matched, 0 to 64; left out: 1.0.
        suffix_decoding_min_token_prob: least probability, by the counts, with which suffix adds a draft, 0 to 1; left
            out: 0.1.
    """

    speculative_method: str | None = _option(None, "METHOD", choices=(*DRAFT_METHODS, *DRAFT_ALIASES, *NO_DRAFTS))
    num_speculative_tokens: int = _option(1, "N", minimum=1, maximum=MAX_SPECULATIVE_TOKENS)
    speculative_model: str | None = _option(None, "X")
    speculative_quantization: str | None = _option(None, "Q")
    prompt_lookup_max: int | None = _option(None, "N", minimum=1, maximum=MAX_LOOKUP_TOKENS)
    verify_strategy: str | None = _option(None, "S", choices=VERIFY_STRATEGIES)
    max_candidates: int | None = _option(None, "N", minimum=1, maximum=MAX_CANDIDATES)
    verify_window: int | None = _option(None, "N", minimum=0, maximum=MAX_SPECULATIVE_TOKENS)
    suffix_decoding_max_tree_depth: int | None = _option(None, "N", minimum=1, maximum=MAX_TREE_DEPTH)
    suffix_decoding_max_cached_requests: int | None = _option(None, "N", minimum=0, maximum=MAX_INTEGER)
    suffix_decoding_max_cached_tokens: int | None = _option(None, "N", minimum=0, maximum=MAX_INTEGER)
    suffix_decoding_max_spec_factor: float | None = _option(None, "X", minimum=0, maximum=MAX_SPEC_FACTOR)
    suffix_decoding_min_token_prob: float | None = _option(None, "P", minimum=0, maximum=1)

    def config(self) -> dict[str, Any] | None:
        """The value of `speculative_config` for `LLM`; None if no method was chosen."""
        if self.speculative_method in (None, *NO_DRAFTS):
            return None
        found = {"method": self.speculative_method, "num_speculative_tokens": self.num_speculative_tokens}
        more = {name: getattr(self, name) for name in PLAIN_PARTS}
        more |= {"model": self.speculative_model, "draft_quantization": self.speculative_quantization}
        return {**found, **{name: value for name, value in more.items() if value is not None}}


PLAIN_PARTS = (
    *("prompt_lookup_max", "verify_strategy", "max_candidates", "verify_window"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_cached_tokens"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
)
"""The parts of `speculative_config` that are called alike as flags and settings."""
OPTIONS = {f.name: f for f in fields(EngineOptions)}
"""Every option of `LLM` by its name."""
ALL_OPTIONS = {**OPTIONS, **{f.name: f for f in fields(SpeculativeOptions)}}
"""These and the parts of `speculative_config`, by the names of flags and settings."""


def _descriptions(record: type) -> dict[str, str]:
    """Field -> its description in the `Args` of a record's docstring; empty under `python -OO`."""
    args = inspect.cleandoc(record.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {4}(\w+): ", args, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2])}


DESCRIPTIONS = {**_descriptions(EngineOptions), **_descriptions(SpeculativeOptions)}


def help_text(name: str) -> str:
    """An option's description for the help of a flag or of a setting, where argparse reads % as a placeholder."""
    return DESCRIPTIONS.get(name, "").removesuffix(".").replace("%", "%%")


def flags(name: str) -> list[str]:
    """The command-line flags of an option: its current name, then older aliases. Help shows the first."""
    names = [name, *(alias for alias, current in ALIASES.items() if current == name)]
    return ["--" + name.replace("_", "-") for name in names]


def signature_with_options(call: Callable[..., Any]) -> inspect.Signature:
    """The signature of a call in which each option stands in place of its `**options`."""
    kind, own = inspect.Parameter.KEYWORD_ONLY, list(inspect.signature(call).parameters.values())[:-1]
    named = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in OPTIONS.values()]
    return inspect.Signature([*own, *named])


def options_text(indent: str) -> str:
    """All options with their descriptions as lines of a docstring, each indented by `indent`."""
    wrapper = textwrap.TextWrapper(120, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return "\n".join(wrapper.fill(f"{name}: {DESCRIPTIONS.get(name, '')}") for name in OPTIONS)
