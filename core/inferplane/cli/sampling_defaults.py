"""How tokens are chosen when the user does not say: as the checkpoint recommends, else greedily.

What is left out on the command line is taken from the checkpoint's `generation_config.json` when that says
`"do_sample": true`; some models (DeepSeek-R1) fall into repetition when they are run greedily. Where it is silent,
temperature is 0, so that the same command gives the same text. A seed that is drawn is told, so that any text can be
had again.
"""

from __future__ import annotations

import argparse
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.errors import CapacityError, CheckpointError

if TYPE_CHECKING:
    from inferplane.engine import SamplingParams

FILE = "generation_config.json"
TAKEN = ("temperature", "top_p", "top_k", "min_p")
SEED_BITS = 32


def recommended_sampling(folder: Path | None) -> dict[str, Any]:
    """Sampling options of a folder's generation_config.json; empty when it has none or means greedy decoding.

    Raises:
        CheckpointError: the file is not what it should be.
    """
    path = folder / FILE if folder is not None else None
    if path is None or not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.", remedy="fetch the file again") from error
    if not isinstance(entries, dict) or not entries.get("do_sample"):
        return {}
    found = {"temperature": 1.0, **{name: entries[name] for name in TAKEN if entries.get(name) is not None}}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(
                f"{path}: {name} is {value!r}, not a number.", remedy=f"pass --{name.replace('_', '-')}"
            )
    return found


def sampling_params(args: argparse.Namespace, folder: Path | None) -> SamplingParams:
    """The parameters of a command: its own options first, then the checkpoint's, then greedy ones.

    Raises:
        UsageError: a value lies outside its range.
        CheckpointError: generation_config.json is damaged.
    """
    from inferplane.engine import SamplingParams

    chosen: dict[str, Any] = {"temperature": 0.0, **recommended_sampling(folder)}
    chosen.update({name: value for name in TAKEN if (value := getattr(args, name)) is not None})
    seed = args.seed
    if seed is None and chosen["temperature"]:
        seed = secrets.randbits(SEED_BITS)
    tokens = args.default_max_tokens if args.max_tokens is None else args.max_tokens
    return SamplingParams(max_tokens=tokens, seed=seed, stop=args.stop, **chosen)


def limit_max_tokens(
    params: SamplingParams, asked: int | None, prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """`params` with a default `max_tokens` lowered to what has room behind the prompt; what was asked for stays.

    Args:
        params: the command's.
        asked: the value of `--max-tokens`.
        prompt_tokens: tokens of the prompt.
        max_model_len: tokens of the longest sequence.

    Raises:
        CapacityError: the prompt leaves no room.
    """
    from dataclasses import replace

    room = max_model_len - prompt_tokens
    if room < 1:
        raise CapacityError(
            f"The prompt has {prompt_tokens} tokens, and a sequence at most {max_model_len} with what is generated.",
            remedy="shorten it, or raise --max-model-len where the model allows it",
        )
    return params if asked is not None else replace(params, max_tokens=min(params.max_tokens, room))


def sampling_data(params: SamplingParams) -> dict[str, Any]:
    """What was chosen, for `--json`."""
    names = ("max_tokens", *TAKEN, "seed")
    return {**{name: getattr(params, name) for name in names}, "stop": list(params.stop or ())}
