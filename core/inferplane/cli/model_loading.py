"""A model, loaded, with a progress bar; and the line that tells what a reply took."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import pins, speculation
from inferplane.cli.screen import Screen, plural
from inferplane.errors import CheckpointError

if TYPE_CHECKING:
    from inferplane.engine import LLM, SamplingParams, Timings


def open_model(args: argparse.Namespace, screen: Screen) -> tuple[LLM, SamplingParams]:
    """The model of a command with its tokenizer, and how to sample from it.

    Raises:
        InferplaneError: as `LLM`; cheap checks come before weights are read.
    """
    pinned, speculative = pins(args.ops), speculation(args)
    with screen.loading(f"starting {args.model}") as loading:
        from inferplane.engine.garbage import importing

        with importing():
            from inferplane.cli.sampling_defaults import sampling_params
            from inferplane.engine import LLM, ModelFiles

        files = ModelFiles(args.model)
        if files.folder is not None and not files.has_tokenizer:
            raise CheckpointError(
                f"{args.model} has no tokenizer: {files.folder} holds none of its files.",
                remedy="add its tokenizer.json (`inferplane bench` needs none); "
                "a draft model is named by --draft-model, beside its model",
            )
        params = sampling_params(args, files.folder)
        loading.phase(f"loading {args.model}")
        llm = LLM(
            args.model,
            device=args.device,
            index=args.index,
            dtype=args.dtype,
            kv_dtype=args.kv_dtype,
            quantization=args.quantization,
            max_model_len=args.max_model_len,
            strict=args.strict,
            ops=pinned,
            lock=args.lock,
            load_format=args.load_format,
            speculative=speculative,
            progress=loading.bar,
        )
        loading.phase("reading the tokenizer")
        try:
            with importing():
                _ = llm.tokenizer  # read at first use, which would be after the bar
        except BaseException:
            llm.close()
            raise
    return llm, params


def summary_line(timings: Timings, device: str, reason: str | None, drawn_seed: int | None) -> str:
    """One line: tokens in and out, seconds to the first, speed of the others, where; and a seed nobody chose."""
    parts = [
        plural(timings.prompt_tokens, "prompt token"),
        f"{timings.generated_tokens} generated" + (f" ({reason})" if reason else ""),
        f"first token {_seconds(timings.first_token_s)}",
        f"{timings.tokens_per_s:.1f} tokens/s",
        device,
    ]
    if drawn_seed is not None:
        parts.append(f"seed {drawn_seed}")
    return ", ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.01 else f"{value:.2g} s"


def timings_data(timings: Timings) -> dict[str, Any]:
    """Seconds and counts, for `--json`."""
    from dataclasses import asdict

    seconds = {name: round(value, 6) for name, value in asdict(timings).items()}
    return {**seconds, "tokens_per_s": round(timings.tokens_per_s, 3)}
