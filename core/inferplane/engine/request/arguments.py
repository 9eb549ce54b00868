"""Checks of what callers pass to `LLM` and `AsyncLLM`, made before anything is loaded or run. Without torch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from reprlib import repr as short
from typing import Any

from inferplane.engine.request.params import SamplingParams, plain_integer
from inferplane.errors import UsageError, deprecation_message
from inferplane.units import size_of

Prompt = str | Sequence[int]
MIN_PRIORITY = -(2**31)
MAX_INTEGER = 2**31 - 1
"""Largest priority, count, and number of a sequence; a message's integers have 64 bits at most."""

DRAFT_METHODS = ("ngram", "suffix", "draft_model", "mtp", "eagle")
NETWORK_METHODS = ("draft_model", "mtp", "eagle")
"""Those that load a network. All others draft on the host, without weights, as the methods of plugins do."""
DRAFT_ALIASES = {"inference_with_reference": "ngram", "draft": "draft_model"}
"""Other name of a method of speculation -> its name."""
NO_DRAFTS = ("none", "None")
"""Spellings of no method at all; the source system writes the second."""
MAX_SPECULATIVE_TOKENS = 7
"""A sequence with a decode token and this many drafts still counts as one with few query tokens."""
MAX_LOOKUP_TOKENS, MAX_CANDIDATES = 16, 64
"""Most tokens of the key of n-gram drafting, and most members of the nucleus that "topp" accepts."""
MAX_TREE_DEPTH, MAX_SPEC_FACTOR = 256, 64
"""Most tokens of a suffix that are compared, and most drafts for each of them."""
VERIFY_STRATEGIES = ("rejection", "target_match", "greedy", "topp")


def as_integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Check an argument that has to be an integer, and return it as an int; floats and bools are no integers.

    Raises:
        UsageError: it is no integer, less than `minimum`, or more than `maximum` (None: any); `name` is the
            argument's, for the message.
    """
    found = plain_integer(value)  # not 1e6: a float is not silently rounded
    if not isinstance(found, int) or isinstance(found, bool):
        intended = _read_integer(name, value)
        fits = intended is not None and minimum <= intended and (maximum is None or intended <= maximum)
        raise UsageError(
            f"{name} = {value!r:.80}.",
            there_is=f"integers of {minimum} and more",
            remedy=f"pass an int, as in {name}={intended}" if fits else "pass an int",
        )
    if found < minimum:
        raise UsageError(f"{name} = {value!r}.", there_is=f"values of {minimum} and more")
    if maximum is not None and found > maximum:
        raise UsageError(f"{name} = {value!r:.80}.", there_is=f"values of {minimum} to {maximum}")
    return found


def as_bool(name: str, value: Any) -> bool:
    """Check an argument that has to be True or False, and return it; any text would count as True.

    Raises:
        UsageError: it is another value; `name` is the argument's, for the message.
    """
    if not isinstance(value, bool):
        raise UsageError(
            f"{name} = {value!r:.80}.", there_is="True and False", remedy="pass one of them, without quotes"
        )
    return value


def as_number(name: str, value: Any) -> float:
    """Check an argument that has to be a number, and return it; bools and NaN are none. `name` is the argument's.

    Raises:
        UsageError: it is another value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise UsageError(f"{name} = {value!r:.80}.", there_is="numbers", remedy="pass an int or a float")
    return value


def _read_integer(name: str, value: Any) -> int | None:
    """The integer that a value of another type stands for: 3.0, "3", or "1GiB" where bytes are counted; else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and (value.isdecimal() or name.endswith("_bytes")):
        with contextlib.suppress(ValueError):  # of text that is no size, or has too many digits
            return size_of(value)
    return None


def current_names(values: Mapping[str, Any], old_names: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments with old names replaced by current ones. An old name is a DeprecationWarning; UsageError when
    both are given.

    Args:
        values: the arguments by the names that the caller used.
        old_names: old name -> current name.
    """
    named: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in values.items():
        new = old_names.get(name, name)
        if new != name:
            warnings.warn(deprecation_message(name, new), DeprecationWarning, stacklevel=4)
        if new in named:
            raise UsageError(f"{given[new]} and {name} are the same option.", remedy=f"pass {new} alone")
        named[new], given[new] = value, name
    return named


def as_sampling_params(params: Any) -> SamplingParams:
    """The sampling parameters of one request: `params` itself, the defaults for None; UsageError for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise UsageError(
            f"params = {short(params)}.",
            there_is="one SamplingParams",
            remedy="pass SamplingParams(**params)" if isinstance(params, Mapping) else "pass SamplingParams(...)",
        )
    return params


def as_sampling_params_list(params: Any, num_prompts: int, what: str = "prompt") -> list[SamplingParams]:
    """The sampling parameters of each prompt, `num_prompts` in all, from one for all prompts or one per prompt;
    UsageError for another number. `what` is what a prompt is called in the error.
    """
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [as_sampling_params(params)] * num_prompts
    if len(params) != num_prompts:
        raise UsageError(
            f"{len(params)} sampling params for {num_prompts} {what}{'s' * (num_prompts != 1)}.",
            remedy=f"pass one, or one per {what}",
        )
    return [as_sampling_params(p) for p in params]


_NOT_PROMPTS = (bytes, bytearray, memoryview, Mapping, Set)
"""Types that yield integers or strings when iterated over, and are no prompts all the same."""


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list of prompts; token ids may also be an array or a tensor. UsageError for anything
    else, and for none at all.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list(prompts)
    if items is None:
        raise _no_prompt(prompts)
    if not items:
        raise UsageError("No prompts were given.", remedy="pass at least one")
    is_one = all(isinstance(p, int) or getattr(p, "ndim", None) == 0 for p in items)
    if not is_one and (odd := [p for p in items if not hasattr(p, "__iter__") or isinstance(p, _NOT_PROMPTS)]):
        raise _no_prompt(odd[0], " among the prompts")
    return [items] if is_one else items


def as_prompt(prompt: Any) -> Prompt:
    """Check a single prompt: a string is returned unchanged, token ids (also an array or a tensor) as a list;
    UsageError for anything else, such as several prompts.
    """
    if isinstance(prompt, str):
        return prompt
    ids = _as_list(prompt)
    if ids is None:
        raise _no_prompt(prompt)
    if any(isinstance(p, (str, bytes, list, tuple)) for p in ids):
        raise UsageError(
            f"stream takes one prompt, not {short(prompt)}.",
            there_is="a string, or a list of token ids",
            remedy="use generate, or one stream per prompt",
        )
    return ids


def check_ids(prompt: Sequence[int], vocab: int) -> None:
    """Raise UsageError for an empty prompt, or for token ids outside 0 to `vocab` - 1."""
    if not prompt:
        raise UsageError("The prompt is empty.", remedy="pass at least one token")
    bad: list[Any] = [t for t in prompt if type(t) is not int or not 0 <= t < vocab]
    if bad:
        raise UsageError(f"Token id {short(bad[0])} is not in the vocabulary.", there_is=f"ids 0 to {vocab - 1}")


def _as_list(prompts: Any) -> list[Any] | None:
    """The items of an iterable, an array or a tensor as a list; None for anything else, and for bytes and mappings."""
    if isinstance(prompts, _NOT_PROMPTS) or not hasattr(prompts, "__iter__"):
        return None
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    return items if isinstance(items, list) else None  # an array without dimensions holds one number


def _no_prompt(found: Any, where: str = "") -> UsageError:
    """The error for a value that is no prompt; `where` follows the value in the message."""
    remedy = "decode bytes first" if isinstance(found, (bytes, bytearray)) else ""
    return UsageError(f"{short(found)}{where} is no prompt.", there_is="strings, and lists of token ids", remedy=remedy)


QUANTIZATIONS = {
    "weight_only_int8": "auto",
    "weight_only_int4": "auto",
    "weight_only_mxfp4": "auto",
    "weight_only_nvfp4": "auto",
    "a8w8": "auto",
    "a8w8c8": "int8",
    "a8w8_fp8": "auto",
    "a8w8c8_fp8": "fp8",
    "a8w4": "auto",
    "a4w4": "auto",
    "a4w4_mxfp4": "auto",
    "a8w8_fp8_wint4": "auto",
}
"""Name -> `kv_cache_dtype` that belongs to it: c8 is a cache in 8 bits, of the kind of the products; auto: any."""
INDEX_KEY_DTYPES = ("auto", "none", "fp8", "int8")
"""Values of `index_key_dtype`; auto: as the cache, with at least 8 bits; none: as activations."""
HEAD_FORMATS = ("auto", "int8", "int4", "none")
"""Values of `head_format`; auto: as the quantization has it."""
ASYNC_SCHEDULING = ("auto", "on", "off")
"""Values of `async_scheduling`; auto: by the device."""
STORED_FORMATS = ("awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "gguf")
"""Formats of checkpoints, which other engines have an option for."""
SIMILAR = {
    **dict.fromkeys(("int8", "w8a16", "wint8", "8bit"), "weight_only_int8"),
    **dict.fromkeys(("int4", "w4a16", "wint4", "4bit"), "weight_only_int4"),
    "w4a16_mxfp4": "weight_only_mxfp4",
    **dict.fromkeys(("nvfp4", "w4a16_nvfp4", "nvfp4a16"), "weight_only_nvfp4"),
    "w8a8": "a8w8",
    **dict.fromkeys(("w4a8", "w4a8_int8", "w4aint8"), "a8w4"),
    **dict.fromkeys(("w4a4", "w4a4_int4", "quarot"), "a4w4"),
    **dict.fromkeys(("mxfp4", "w4a4_mxfp4"), "a4w4_mxfp4"),
    "w8a8c8": "a8w8c8",
    **dict.fromkeys(("block_wise_fp8", "w8a8_fp8", "fp8_w8a8"), "a8w8_fp8"),
}
"""Another engine's name of a quantization on load -> the name here."""


def quantization_remedy(value: Any) -> str:
    """What to pass in place of a value of `quantization` that is unknown; "" for one that resembles nothing."""
    word = value.lower() if isinstance(value, str) else ""
    stored = word.replace("_", "-").removesuffix("-marlin")
    if stored in (name.replace("_", "-") for name in STORED_FORMATS):
        return f"leave quantization out: a checkpoint in {value} is read as it is"
    close = get_close_matches(word, QUANTIZATIONS, n=1)
    found = SIMILAR.get(word) or (close[0] if close else "")
    return f"perhaps {found} was meant" if found else ""


def check_quantization(value: Any) -> None:
    """Raise UsageError for a value of `quantization` that is neither None nor one of `QUANTIZATIONS`."""
    if value is not None and (not isinstance(value, str) or value not in QUANTIZATIONS):
        there_is = f"None, {', '.join(map(repr, QUANTIZATIONS))}"
        raise UsageError(f"quantization = {value!r:.80}.", there_is=there_is, remedy=quantization_remedy(value))


def resolve_kv_cache_dtype(quantization: str | None, kv_cache_dtype: str) -> str:
    """The KV dtype of a quantization and the option `kv_cache_dtype`.

    Raises:
        UsageError: the quantization has a KV dtype of its own, and the option is neither "auto" nor that.
    """
    own = QUANTIZATIONS.get(quantization or "", "auto")
    if own == "auto" or kv_cache_dtype in (own, f"{own}_static"):
        return kv_cache_dtype
    if kv_cache_dtype == "auto":
        return own
    assert quantization is not None
    without = quantization.replace("c8", "")
    raise UsageError(
        f"quantization = {quantization!r} with kv_cache_dtype = {kv_cache_dtype!r}.",
        there_is=f"{quantization} with a KV cache in {own}, which c8 in the name stands for",
        remedy=f"leave kv_cache_dtype out, or pass quantization={without!r} with kv_cache_dtype={kv_cache_dtype!r}",
    )
