"""The flags of the source system's commands: what each does here, or why it needs no switch.

Source: https://paddlenlp.readthedocs.io, "llm/docs/predict", and the arguments of `predictor.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from inferplane.cli.arguments import Parser
from inferplane.engine.request.arguments import DRAFT_ALIASES, DRAFT_METHODS, MAX_LOOKUP_TOKENS, NO_DRAFTS
from inferplane.errors import UsageError
from inferplane.serving.source_models import SourceModel, model_named
from inferplane.serving.source_names import FALSE, MAX_DRAFTS, TRUE, integer


class Flag(NamedTuple):
    """A flag.

    Args:
        name: without dashes.
        kind: "text", "number", "count" or "switch".
        default: if it is left out.
        words: what it does.
        needless: why it needs no switch here; empty: it does what its name says.
        range: of a count. choices: of a text.
    """

    name: str
    kind: str
    default: Any
    words: str
    needless: str = ""
    range: tuple[int, int | None] = (1, None)
    choices: tuple[str, ...] = ()


METHODS = (*NO_DRAFTS, *DRAFT_ALIASES, *DRAFT_METHODS)
MODEL_FLAGS = (
    Flag("model_name_or_path", "text", None, "the model: a folder, a name on a hub, a name of the source system, demo"),
    Flag("dtype", "text", "auto", "float32, bfloat16 or float16; left out: the model's"),
    Flag("device", "text", "auto", "the kind of device"),
    Flag("quant_type", "text", None, "quantize the model while it is read"),
    Flag("total_max_length", "count", None, "tokens of a sequence, its prompt included"),
    Flag("mode", "text", "dynamic", "", "a folder says itself whether it was exported", choices=("dynamic", "static")),
    Flag("inference_model", "switch", False, "", "there is one implementation of each model"),
    Flag("block_attn", "switch", False, "", "the KV cache is always in blocks"),
    Flag("append_attn", "switch", False, "", "attention always takes several tokens of a sequence in a step"),
    Flag("block_size", "count", 64, "", "the device's kernels decide it"),
    Flag("use_flash_attention", "switch", False, "", "the fastest kernel of the device is chosen"),
    Flag("mla_use_matrix_absorption", "switch", False, "", "latent attention is absorbed where that is faster"),
    Flag("return_full_hidden_states", "switch", False, "", "layers that draft read what they need"),
    Flag("speculate_method", "text", None, "draft several tokens per step", choices=METHODS),
    Flag("speculate_max_draft_token_num", "count", 1, "most drafts per sequence and step", range=(1, MAX_DRAFTS)),
    Flag("speculate_max_ngram_size", "count", 1, "longest key of n-grams", range=(1, MAX_LOOKUP_TOKENS)),
    Flag("speculate_verify_window", "count", 2, "", "accepted drafts follow the model's own distribution", (0, 7)),
    Flag("speculate_max_candidate_len", "count", 5, "", "accepted drafts follow the model's own distribution", (1, 64)),
    Flag("draft_model_name_or_path", "text", None, "the model or the layers that draft"),
    Flag("draft_model_quant_type", "text", None, "as quant_type, for what drafts"),
)
PREDICTOR_FLAGS = (
    *MODEL_FLAGS,
    Flag("src_length", "count", None, "most tokens of a prompt; a longer one is refused"),
    Flag("max_length", "count", 1024, "most tokens to generate for a prompt"),
    Flag("min_length", "count", 1, "fewest tokens to generate"),
    Flag("top_k", "count", 0, "keep so many of the most probable tokens; 0: all", range=(0, None)),
    Flag("top_p", "number", 0.7, "keep the most probable tokens whose probabilities add up to it"),
    Flag("temperature", "number", 0.95, "0: always the most probable token"),
    Flag("repetition_penalty", "number", 1.0, "of tokens that were there before"),
    Flag("decode_strategy", "text", "sampling", "how tokens are chosen", choices=("sampling", "greedy_search")),
    Flag("batch_size", "count", 1, "prompts that run together; without a data_file: so many of the same prompt"),
    Flag("data_file", "text", None, 'a file of lines {"src": PROMPT, "tgt": REFERENCE}'),
    Flag("output_file", "text", "output.json", "where the results go, as lines of JSON"),
)
EXPORT_FLAGS = (*MODEL_FLAGS, Flag("output_path", "text", None, "a new folder"))
NONE = ("", *NO_DRAFTS)


def parse(command: str, flags: Sequence[Flag], words: Sequence[str], described: str) -> argparse.Namespace:
    """Parse the flags of a command; the attribute `given` has the names of those that were given.

    Raises:
        UsageError: an unknown flag, or a value out of range.
    """
    parser = Parser(prog=f"python -m inferplane.source {command}", description=described)
    for flag in flags:
        kind: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "metavar": "X"}
        kind["help"] = (flag.words or f"needs no switch: {flag.needless}").replace("%", "%%")
        if flag.kind == "switch":
            kind |= {"nargs": "?", "const": "1"}
        parser.add_argument(f"--{flag.name}", f"--{flag.name.replace('_', '-')}", **kind)
    found = parser.parse_all(list(words))
    given = [flag for flag in flags if hasattr(found, flag.name)]
    values = {flag.name: flag.default for flag in flags}
    values |= {flag.name: _convert(flag, getattr(found, flag.name)) for flag in given}
    return argparse.Namespace(**values, given=[flag.name for flag in given])


def explain_needless(flags: Sequence[Flag], given: Sequence[str]) -> str:
    """One sentence about the given flags that need no switch; empty without them."""
    reasons: dict[str, list[str]] = {}
    for flag in flags:
        if flag.needless and flag.name in given:
            reasons.setdefault(flag.needless, []).append(f"--{flag.name}")
    words = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    return f"no switch is needed for {words}" if words else ""


def _convert(flag: Flag, text: str) -> Any:
    if flag.kind == "switch":
        if text.lower() not in (*TRUE, *FALSE):
            raise UsageError(f"--{flag.name} {text}.", there_is=", ".join((*TRUE, *FALSE)))
        return text.lower() in TRUE
    if flag.kind == "count":
        try:
            return integer(*flag.range)(text)
        except ValueError as error:
            raise UsageError(f"--{flag.name} {text}.", there_is=str(error)) from error
    if flag.kind == "number":
        try:
            return float(text)
        except ValueError as error:
            raise UsageError(f"--{flag.name} {text}.", there_is="numbers") from error
    if flag.choices and text not in flag.choices:
        raise UsageError(f"--{flag.name} {text}.", there_is=", ".join(flag.choices))
    return text


def model_of(args: argparse.Namespace) -> SourceModel:
    """The model of a command.

    Raises:
        UsageError: none is named, or a name of the source system is unknown.
    """
    name = args.model_name_or_path
    if not name:
        raise UsageError("There is no model.", remedy="pass --model_name_or_path MODEL")
    return model_named(name)


def speculation(args: argparse.Namespace, model: SourceModel) -> dict[str, Any] | None:
    """What `LLM` takes as `speculative_config`.

    Raises:
        UsageError: a name of the source system is unknown.
    """
    method = args.speculate_method
    if method is None and model.drafts:
        method = "mtp"
    if method in (None, *NO_DRAFTS):
        return None
    method = DRAFT_ALIASES.get(method, method)
    found = {"method": method, "num_speculative_tokens": args.speculate_max_draft_token_num}
    if method == "ngram":
        return {**found, "prompt_lookup_max": args.speculate_max_ngram_size}
    draft = args.draft_model_name_or_path
    if draft:
        draft = model_named(draft).repository
    if draft and draft != model.repository:  # the layers that draft may be in the model's own files
        found["model"] = draft
    quantization = args.draft_model_quant_type or model.draft_quantization
    return {**found, "draft_quantization": quantization} if quantization not in (None, *NONE) else found


def engine_options(args: argparse.Namespace, model: SourceModel) -> dict[str, Any]:
    """The options of `LLM` that the flags give, without speculation."""
    quantization = model.quantization if args.quant_type is None else args.quant_type
    dtype = args.dtype if "dtype" in args.given or model.dtype is None else model.dtype
    found: dict[str, Any] = {"device": args.device, "dtype": dtype}
    if quantization not in (None, *NONE):
        found["quantization"] = quantization
    if args.total_max_length is not None:
        found["max_model_len"] = args.total_max_length
    return found
