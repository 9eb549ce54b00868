"""`EngineOptions`: the one record of options, from which `LLM`, the command line and the server's settings are made.

Without torch: a process whose engine lives in another one reads it, too.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from inferplane.engine.request.arguments import as_integer
from inferplane.engine.request.params import unknown_keyword
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine.runner.options import RunnerOptions

OLD_NAMES = {
    "max_batch": "max_num_seqs",
    "max_step_tokens": "max_num_batched_tokens",
    "kv_dtype": "kv_cache_dtype",
    "prefix_cache": "enable_prefix_caching",
    "speculative": "speculative_config",
}
"""Names of the options until 0.2; they go with 0.3. The command line and the server's settings keep them."""
NAME, TEXT = (str,), "a name"


def _option(default: Any, doc: str, brief: str = "", **checks: Any) -> Any:
    """A field with its documentation, a brief one for flags, and its checks: `minimum`, or `types` and `form`."""
    return field(default=default, metadata={"doc": doc, "brief": brief, **checks})


@dataclass(frozen=True)
class EngineOptions:
    """The options of `LLM`, checked and with their current names; `help(LLM)` says what each means.

    Raises:
        UsageError: a value of a type, or in a range, that cannot be meant.
    """

    device: str = _option(
        "auto",
        'a backend\'s name ("auto" takes the best one available, and says which). Never another device than requested.',
        "a device; auto: the best one here",
        types=NAME,
        form="a backend's name, or 'auto'",
    )
    index: int = _option(0, "which of several devices of that kind, from 0.", "which of several devices of that kind")
    dtype: Any = _option(
        "auto",
        '"auto" (the checkpoint\'s), "float32", "bfloat16", "float16", or a torch dtype.',
        "float32, bfloat16, float16; auto: the checkpoint's",
        form="a dtype's name, or a torch dtype",
    )
    max_model_len: int | None = _option(
        None,
        "maximum number of tokens of a sequence; None takes what the model allows and the cache can hold.",
        "most tokens of a sequence",
        minimum=1,
    )
    strict: bool = _option(
        False,
        "refuse to run when a hot op is left on its slow reference.",
        "refuse to leave a hot op on its slow reference",
    )
    ops: Mapping[str, str] | None = _option(
        None,
        'pins: site or op name -> provider, "reference", "decomposition" or a variant of the op.',
        "pin an op or a site to a provider; repeatable",
        types=(Mapping, type(None)),
        form="a mapping of site or op name -> provider",
    )
    kv_cache_dtype: str = _option(
        "auto",
        'how the KV cache stores entries: "auto" (as dtype), "fp8", "int8" where the backend has them.',
        "how the KV cache stores: fp8, int8 where offered",
        types=NAME,
        form=TEXT,
    )
    quantization: str | None = _option(
        None,
        'quantize linear weights while they are read: "weight_only_int8", "weight_only_int4", "a8w8" (int8, and '
        'activations in int8 where a kernel quantizes them), or "a8w8_fp8_wint4" (experts in int4, the rest in FP8, '
        "activations in FP8 where a kernel quantizes them); None keeps the checkpoint's format.",
        "quantize linear weights while reading them",
    )
    kv_cache_bytes: int | None = _option(
        None,
        "memory for the KV cache; None takes 30 % of what is free. A warning says if it shortens sequences.",
        "memory for the KV cache; left out: 30 %% of what is free",
        minimum=0,
    )
    max_num_seqs: int = _option(32, "maximum number of sequences in a step.", "sequences in a step", minimum=1)
    max_num_batched_tokens: int = _option(
        2048,
        "maximum number of tokens in a step; longer prompts are split into chunks.",
        "tokens in a step; longer prompts are cut",
        minimum=1,
    )
    deterministic: bool = _option(
        False,
        "use only kernels whose results do not depend on the batch.",
        "bind only kernels whose results do not depend on the batch",
    )
    load_format: str = _option(
        "auto", '"auto", or "dummy" for random weights.', "dummy: random weights", choices=("auto", "dummy")
    )
    mtp: bool = _option(False, "also load the multi-token-prediction layers.")
    lock: Any = _option(
        None,
        "a lock file with measured kernel choices.",
        "take kernel choices from a lock file",
        types=(str, os.PathLike, type(None)),
        form="a path",
    )
    progress: Callable[[int, int], None] | None = _option(
        None,
        "called with `(bytes done, bytes in all)` while weights are loaded.",
        types=(Callable, type(None)),
        form="a function of (bytes done, bytes in all)",
    )
    enable_prefix_caching: bool = _option(
        True,
        "reuse the cache's blocks for equal beginnings of prompts.",
        "reuse the cache for equal beginnings of prompts",
    )
    max_waiting: int | None = _option(None, "maximum number of waiting requests; None: unlimited.", minimum=0)
    speculative_config: Any = _option(
        None, "draft and verify several tokens per step (`SpeculativeConfig`, or a mapping with its fields)."
    )
    tensor_parallel_size: int | None = _option(
        None,
        "number of processes that share the model; None takes all that torchrun started. Rank 0 goes on and "
        "schedules; in the others this call runs its steps, and ends the process when rank 0 closes the model.",
    )
    capture: bool = _option(
        True, "capture decode steps and replay them, on devices that can; False runs every step eagerly."
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value, checks = option.name, getattr(self, option.name), option.metadata
            if "choices" in checks and value not in checks["choices"]:
                raise UsageError(f"{name} = {value!r}.", there_is=", ".join(map(repr, checks["choices"])))
            if "minimum" in checks and not (value is None and option.default is None):
                object.__setattr__(self, name, as_integer(name, value, checks["minimum"]))
            if "types" in checks and not isinstance(value, checks["types"]):
                raise UsageError(f"{name} = {value!r}.", there_is=checks["form"])
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
            UsageError: an unknown name, an option given twice, or a value that cannot be meant.
        """
        named: dict[str, Any] = {}
        for name, value in options.items():
            new = OLD_NAMES.get(name, name)
            if new not in OPTIONS:
                raise unknown_keyword("LLM", name, value, ["model", *OPTIONS])
            if new != name:
                warnings.warn(f"{name} is now {new}; the old name goes with 0.3.", DeprecationWarning, stacklevel=3)
            if new in named:
                raise UsageError(f"{name} and {new} are the same option.", remedy=f"pass {new} alone")
            named[new] = value
        return cls(**named)

    def runner_options(self, ranks: int) -> RunnerOptions:
        """The part of them that says how to bind and load the model, on one of `ranks` processes."""
        from inferplane.engine.runner.options import RunnerOptions

        own = {f.name: getattr(self, f.name) for f in fields(RunnerOptions) if f.name in OPTIONS}
        lock = None if self.lock is None else str(self.lock)
        return RunnerOptions(**{**own, "ops": dict(self.ops or {}), "lock": lock, "ranks": ranks})


OPTIONS = {f.name: f for f in fields(EngineOptions)}
"""Every option by its name."""


def brief(name: str) -> str:
    """An option's description for the help of a flag, or of a setting."""
    return str(OPTIONS[name].metadata["brief"])


def signature_with_options(call: Callable[..., Any]) -> inspect.Signature:
    """The signature of a call in which each option stands in place of its `**options`."""
    own = list(inspect.signature(call).parameters.values())[:-1]
    named = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in OPTIONS.values()
    ]
    return inspect.Signature([*own, *named])


def options_text(indent: str) -> str:
    """The options as the lines of a docstring."""
    lines = (f"{name}: {option.metadata['doc']}" for name, option in OPTIONS.items())
    wrapper = textwrap.TextWrapper(120, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return "\n".join(map(wrapper.fill, lines))
