"""Loads a model with a progress bar, and formats the timings of a reply."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import BINDING, binding_options, pins, speculation
from inferplane.cli.screen import Screen, plural
from inferplane.hub import DownloadProgress, ModelName, find, locate, parse_name

if TYPE_CHECKING:
    from inferplane.engine import LLM, SamplingParams, Timings


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` that the options of `add_running` set, JSON-ready.

    Raises:
        UsageError: a pin is malformed, or drafts have no method.
    """
    names = ("model", "device", "index", *BINDING, "strict", "lock", "load_format")
    chosen = {name: getattr(args, name) for name in names}
    return {**chosen, "ops": pins(args.ops), "speculative_config": speculation(args)}


def locate_models(args: argparse.Namespace, screen: Screen) -> None:
    """Download the models of a command that are given by name, if they are not in the cache.

    Raises:
        InferplaneError: as `inferplane.hub.locate`.
    """
    for model in (args.model, args.speculative_model):
        is_name = model is not None and not Path(model).expanduser().exists()
        name = parse_name(model) if is_name else None
        if name is not None and find(name) is None:
            from inferplane.gguf.opened import find_planned_ranges

            check = partial(_check, args) if model == args.model else None
            with fetching(name, screen) as progress:
                locate(name, progress=progress, check=check, find_ranges=find_planned_ranges)


def _check(args: argparse.Namespace, path: Path) -> None:
    """Refuse a model before its weights are downloaded: its architecture is not known, or it is too large."""
    from inferplane.engine.runner.model_runner import check_before_download  # imports torch, which is needed anyway
    from inferplane.plugins import host

    options = binding_options(args)
    check_before_download(path, model=args.model, host=host(), device=args.device, options=options, index=args.index)


@contextmanager
def fetching(name: ModelName, screen: Screen) -> Iterator[DownloadProgress]:
    """Show a download: what it is as a note, how far it is as a bar."""
    with screen.loading(f"fetching {name.text}") as loading:
        yield DownloadProgress(screen.note, loading.bar)


def open_model(args: argparse.Namespace, screen: Screen) -> tuple[LLM, SamplingParams]:
    """Load the model of a command with its tokenizer; returns it with the sampling parameters.

    Raises:
        InferplaneError: as `LLM`; cheap checks run before weights are read.
    """
    options = model_options(args)
    locate_models(args, screen)
    with screen.loading(f"starting {args.model}") as loading:
        from inferplane.engine.clients.process.memory import gc_paused

        with gc_paused():
            from inferplane.cli.sampling_defaults import sampling_params
            from inferplane.engine import LLM, ModelFiles
            from inferplane.engine.request.tokenizer_loading import no_vocabulary
            from inferplane.engine.runner.model_files import SHIPPED, check_architecture

        files = ModelFiles(args.model)
        if files.folder is not None and not files.has_tokenizer:
            remedy = "add its tokenizer.json (`inferplane bench` needs none)"
            if args.model in SHIPPED:
                remedy = "pass demo as the model, and this draft model by --speculative-model"
            else:
                check_architecture(files.folder)  # a model that cannot run needs no tokenizer
            raise no_vocabulary(args.model, files.folder, remedy)
        params = sampling_params(args, files.folder)
        loading.phase(f"loading {args.model}")
        llm = LLM(**options, progress=loading.bar)
        loading.phase("reading the tokenizer")
        try:
            with gc_paused():
                _ = llm.tokenizer  # loaded at first use; do it while the bar is shown
        except BaseException:
            llm.close()
            raise
    return llm, params


def load_model(model: str, options: dict[str, Any], screen: Screen) -> LLM:
    """Load a model, downloading it first if it is a name that is not in the cache."""
    from inferplane.engine import LLM

    name = None if Path(model).expanduser().exists() else parse_name(model)
    if name is not None and find(name) is None:
        with fetching(name, screen) as progress:
            locate(name, progress=progress)
    with screen.loading(f"loading {model}") as loading:
        return LLM(model, **options, progress=loading.bar)


def summary_line(timings: Timings, device: str, reason: str | None, drawn_seed: int | None) -> str:
    """One line: prompt and generated tokens, seconds to the first, tokens per second, device, and a drawn seed."""
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
