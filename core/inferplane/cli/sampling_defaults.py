"""Sampling parameters of a command: its options, then the checkpoint's recommendation, then greedy decoding.

Options that the command omits come from the checkpoint's `generation_config.json` if that says `"do_sample": true`;
some models (DeepSeek-R1) repeat themselves when they decode greedily. Without a recommendation the temperature is 0, so
that the same command gives the same text. A drawn seed is printed, so that any text can be reproduced.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.errors import CapacityError, CheckpointError, UsageError, warn

if TYPE_CHECKING:
    from inferplane.engine import SamplingParams

FILE = "generation_config.json"
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p")
SEED_BITS = 32


def read_recommended_sampling(folder: Path | None) -> dict[str, Any]:
    """Sampling options of a folder's generation_config.json; empty without one, or if it says greedy decoding.

    Warns about a file that cannot be read, and about options that cannot be meant; they are not used.
    """
    from inferplane.engine import SamplingParams
    from inferplane.models.reading.json_object import read_object

    path = folder / FILE if folder is not None else None
    if path is None or not path.exists():
        return {}
    try:
        entries = read_object(path)
    except CheckpointError as error:
        warn(f"{error.what} It is not used.")
        return {}
    if not entries.get("do_sample"):
        return {}
    found = {"temperature": 1.0}
    for name in RECOMMENDED:
        if (value := entries.get(name)) is not None:
            try:
                SamplingParams(**{name: value})
                found[name] = value
            except UsageError as error:
                warn(f"{path}: {error.what} It is not used.")
    return found


def sampling_params(args: argparse.Namespace, folder: Path | None) -> SamplingParams:
    """The sampling parameters of a command: its options, then the checkpoint's, then greedy decoding.

    Raises:
        UsageError: a value lies outside its range.
    """
    from inferplane.engine import SamplingParams

    chosen: dict[str, Any] = {"temperature": 0.0, **read_recommended_sampling(folder)}
    chosen.update({name: value for name in RECOMMENDED if (value := getattr(args, name)) is not None})
    seed = args.seed
    if seed is None and chosen["temperature"]:
        seed = secrets.randbits(SEED_BITS)
    tokens = args.default_max_tokens if args.max_tokens is None else args.max_tokens
    return SamplingParams(max_tokens=tokens, seed=seed, stop=args.stop, **chosen)


def limit_max_tokens(
    params: SamplingParams, requested: int | None, prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Lower a default `max_tokens` to the tokens left after the prompt; an explicit value stays.

    Args:
        params: the parameters of the command.
        requested: the value of `--max-tokens`.
        prompt_tokens: number of tokens of the prompt.
        max_model_len: maximum tokens of a sequence.

    Raises:
        CapacityError: the prompt leaves no token.
    """
    from dataclasses import replace

    remaining = max_model_len - prompt_tokens
    if remaining < 1:
        raise CapacityError(
            f"The prompt has {prompt_tokens} tokens, and a sequence at most {max_model_len} with what is generated.",
            remedy="shorten it, or raise --max-model-len where the model allows it",
        )
    return params if requested is not None else replace(params, max_tokens=min(params.max_tokens, remaining))


def sampling_data(params: SamplingParams) -> dict[str, Any]:
    """The parameters for `--json`."""
    names = ("max_tokens", *RECOMMENDED, "seed")
    return {**{name: getattr(params, name) for name in names}, "stop": list(params.stop or ())}
