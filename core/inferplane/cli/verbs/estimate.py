"""Show how much memory a model takes on a device, and how many sequences of each length fit.

The exit code is 1 if the model does not fit, and 0 if it fits or the device's memory is unknown. If it does not fit,
the output says on how many equal devices it does.

Nothing is loaded: weights are counted in the packings of the plan, the KV cache in the layout of the backend. Of a name
on a hub that is not in the cache, configs and the headers of weights are read, some kilobytes of each file; of a GGUF
file, whose header holds the tokenizer, some megabytes. If several devices share the model, all figures are those of one
of them.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.cli.arguments import (
    Parser,
    add_binding,
    add_examples,
    add_json,
    add_model,
    add_option,
    add_speculation,
    binding_options,
)
from inferplane.cli.screen import MIB, Screen
from inferplane.errors import InferplaneError, UsageError
from inferplane.hub import DownloadProgress, fetch_headers, find, parse_name
from inferplane.hub.names import HUGGING_FACE
from inferplane.hub.settings import is_offline
from inferplane.units import format_bytes, size_of

if TYPE_CHECKING:
    from rich.table import Table

    from inferplane.engine import ModelFiles
    from inferplane.engine.runner.estimate import Estimate
    from inferplane.engine.runner.sizes.sizing import Traffic
    from inferplane.plugins import PluginHost

MAX_DEVICES = 64
"""Numbers of devices up to this are tried where one does not suffice."""


def add_arguments(parser: Parser) -> None:
    """Options of `estimate`."""
    parser.usage = f"{parser.prog} [MODEL] [options]"
    add_model(parser, config=True)
    add_json(parser)
    group = add_binding(parser)
    group.add_argument("--arch", metavar="A", help="the architecture to assume; else the first that the backend knows")
    parser.add_argument("--memory", metavar="SIZE", help="of each device, such as 80GiB; left out: what is free here")
    words = "devices that share the model; left out: as many as torchrun started, else 1"
    parser.add_argument("--tensor-parallel-size", metavar="N", type=int, help=words)
    add_option(parser, "max_num_seqs")
    add_option(parser, "max_num_batched_tokens")
    add_speculation(parser)
    words = "average tokens of a prompt; with --output-tokens, for max_batch and BLOCK_RATIO"
    parser.add_argument("--prompt-tokens", metavar="N", type=int, help=words)
    parser.add_argument("--output-tokens", metavar="N", type=int, help="average tokens of an answer")
    add_examples(
        parser,
        "path/to/config.json --device {X} --memory 80GiB",
        "path/to/config.json --memory 80G --tensor-parallel-size 8",
        "--device {X} --kv-cache-dtype fp8 --memory 24G",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Plan, add up, print."""
    with contextlib.ExitStack() as opened:
        return _run(args, screen, opened)


def _run(args: argparse.Namespace, screen: Screen, opened: contextlib.ExitStack) -> int:
    from inferplane.cli.verbs.explain import check_arch
    from inferplane.engine import Runner
    from inferplane.engine.request.arguments import as_integer
    from inferplane.engine.runner.estimate import estimate
    from inferplane.engine.runner.ranks import launcher_ranks
    from inferplane.plugins import host
    from inferplane.quant import explain_no_savings, explain_requantized

    rank, started, _ = launcher_ranks()
    if rank:
        return 0  # rank 0 answers for all
    requested = args.tensor_parallel_size
    devices = started if requested is None else as_integer("tensor_parallel_size", requested, 1)
    options = binding_options(args, arch=args.arch, max_num_seqs=as_integer("max_num_seqs", args.max_num_seqs, 1))
    step_tokens = as_integer("max_num_batched_tokens", args.max_num_batched_tokens, 1)
    memory = _memory(args.memory) if args.memory is not None else None
    traffic = _traffic(args.prompt_tokens, args.output_tokens)
    files = _find_files(args.model, screen, opened)
    device = host().backend_for_explain(args.device).name  # chosen once: each choice is a note
    check_arch(host(), device, args.arch)

    def planned(devices: int) -> Runner:
        return Runner.plan_only(files, host(), device, replace(options, ranks=devices))

    runner = planned(devices)
    if memory is None:
        memory = _free(host(), runner.backend.name)
    found = estimate(runner, memory, step_tokens)
    if found.fits is False:
        needed = _devices_needed(lambda n: estimate(planned(n), memory, step_tokens), devices)
        found = replace(found, devices_needed=needed)
    scheme = options.quantization
    no_savings = explain_no_savings(runner.plan, scheme, runner.read.schemes_instead)
    for what in (*no_savings, *explain_requantized(runner.requantized, scheme)):
        screen.warning(what)
    if args.json:
        screen.facts({"model": files.name, "device": runner.backend.name, **found.data(traffic)})
        return int(found.fits is False)
    screen.show(_bytes_table(found, files.name, runner.backend.name))
    if found.left is None:
        screen.note(f"the device is not here; pass --memory to see what fits on {runner.backend.name}")
    elif not found.fits:
        screen.warning(f"it does not fit: {_shortage(found)}")
    else:
        screen.show(_fits_table(found))
        screen.show(_settings_line(found, traffic))
        if found.state_sequence:
            count = found.max_num_seqs
            screen.show(f"At most {count} sequences run at a time, each with a state: raise --max-num-seqs for more.")
    return int(found.fits is False)


def _find_files(model: str, screen: Screen, opened: contextlib.ExitStack) -> ModelFiles:
    """The files of a model; of a name on a hub that is not in the cache, configs and headers in a folder for now."""
    from inferplane.cli.verbs.explain import model_files
    from inferplane.engine import ModelFiles
    from inferplane.gguf.opened import find_planned_ranges

    name = None if Path(model).expanduser().exists() else parse_name(model)
    if name is None or name.source != HUGGING_FACE or is_offline() or find(name) is not None:
        return model_files(model)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="inferplane-")))
    with screen.loading(f"reading the headers of {name.text}"):
        progress = DownloadProgress(screen.note, lambda done, total: None)
        files = ModelFiles(fetch_headers(name, folder, find_planned_ranges, progress=progress))
    files.name = model
    return files


def _devices_needed(estimated: Callable[[int], Estimate], devices: int) -> int | None:
    """The smallest power of two above `devices` of equal devices on which the model fits; None up to `MAX_DEVICES`."""
    count = 2
    while count <= MAX_DEVICES:
        if count > devices:
            with contextlib.suppress(InferplaneError):  # this number cannot share the model
                if estimated(count).fits:
                    return count
        count *= 2
    return None


def _shortage(found: Estimate) -> str:
    short = found.weights + found.workspace + found.states + found.min_kv_bytes - (found.memory or 0)
    where = " on each device" if found.devices > 1 else ""
    if found.devices_needed is None:
        remedy = f"no power of two of such devices up to {MAX_DEVICES} is enough; quantize, or use larger devices"
    else:
        remedy = f"it fits on {found.devices_needed} such devices (--tensor-parallel-size); or quantize"
    return f"{format_bytes(short)} are missing{where}; {remedy}"


def _memory(text: str) -> int:
    found = 0
    with contextlib.suppress(ValueError):
        found = size_of(text)
    if not found:
        raise UsageError(f"--memory {text!r} is no amount of memory.", there_is="for example 80GiB, 512MiB, 24G")
    if found < MIB and text.strip().isdecimal():
        what = f"--memory {text!r} is {format_bytes(found)}, less than any device has."
        raise UsageError(what, remedy=f"perhaps {text.strip()}GiB was meant")
    return found


def _traffic(prompt_tokens: int | None, output_tokens: int | None) -> Traffic | None:
    """The average request; None: neither number is given.

    Raises:
        UsageError: one is given without the other, or below 1.
    """
    if prompt_tokens is None and output_tokens is None:
        return None
    from inferplane.engine.runner.sizes.sizing import Traffic

    if prompt_tokens is None or output_tokens is None:
        raise UsageError(
            "--prompt-tokens and --output-tokens belong together.", remedy="pass both averages, or neither"
        )
    return Traffic(prompt_tokens, output_tokens)


def _settings_line(found: Estimate, traffic: Traffic | None) -> str:
    """The source system's settings for all free memory."""
    assert found.left is not None
    sizing = found.size(found.left, traffic)
    words = f"all free memory holds {sizing.cache_tokens} tokens: BLOCK_BS {sizing.block_bs} x {sizing.max_seq_len}"
    if traffic is None:
        return words
    each = f"requests of {traffic.prompt_tokens} + {traffic.output_tokens} tokens"
    return f"{words}; max_batch {sizing.max_batch} for {each}, BLOCK_RATIO {traffic.block_ratio():.2f}"


def _free(plugins: PluginHost, device: str) -> int | None:
    """Free bytes of the device; None if it is not here."""
    entry = next(e for e in plugins.devices() if e.name == device)
    return plugins.backend(device).memory().free_bytes if entry.probe.available else None


def _bytes_table(found: Estimate, model: str, device: str) -> Table:
    from rich.table import Table

    where = f"{model} on {device}" if found.devices == 1 else f"{model} on {device}, each of {found.devices} devices"
    table = Table(title=where, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    copies = f"of these {format_bytes(found.copies)} second packings" if found.copies else ""
    table.add_row("weights", format_bytes(found.weights), copies)
    if found.draft_weights or found.draft_block:
        words = f"of a block of the KV cache {format_bytes(found.draft_block)}"
        table.add_row("of it what drafts", format_bytes(found.draft_weights), words)
    for part in found.formats:
        words = f"{part.parameters:,} weights of {part.bits:.2f} bits"
        table.add_row(f"  {part.format}", format_bytes(part.nbytes), words)
    table.add_row("workspace", format_bytes(found.workspace), "estimated")
    words = f"a block of {found.block_tokens} tokens takes {format_bytes(found.block)}"
    table.add_row("KV cache, a token", format_bytes(found.kv_token), words)
    for window in dict.fromkeys(w for w in found.windows if w is not None):
        layers = sum(n for w, n in zip(found.windows, found.table_layers) if w == window)
        words = f"of {layers} of {found.cached_layers} layers: what lies before it is given back as a sequence grows"
        table.add_row("window", f"{window} tokens", words)
    if found.unreleased_window:
        share = found.unreleased_window / found.block
        table.add_row("of it windows", f"{share:.0%}", "layers that keep all tokens, as others of the model do")
    if found.state_sequence:
        words = f"whatever its length; {format_bytes(found.states)} for {found.max_num_seqs} sequences"
        table.add_row("states, a sequence", format_bytes(found.state_sequence), words)
    if found.memory is not None:
        table.add_row("memory", format_bytes(found.memory))
        table.add_row("left for the cache", format_bytes(found.left or 0))
    return table


def _fits_table(found: Estimate) -> Table:
    from rich.table import Table

    assert found.left is not None and found.default_kv_bytes is not None
    caches = {"by default": min(found.default_kv_bytes, found.left), "all free memory": found.left}
    table = Table(box=None, pad_edge=False)
    table.add_column("KV cache")
    table.add_column("--kv-cache-bytes", justify="right")
    table.add_column("longest sequence", justify="right")
    for length in found.lengths():
        table.add_column(f"x {length}", justify="right")
    for name, kv_bytes in caches.items():
        cells = [str(found.sequences(length, kv_bytes)) for length in found.lengths()]
        table.add_row(name, str(kv_bytes), str(found.max_sequence_tokens(kv_bytes)), *cells)
    return table
