"""Write a model with weights packed for one device: a start packs nothing.

The folder has the config, the tokenizer, the kernel choices and, for each of the devices that share the model, a folder
with its weights. Verbs that load a model take it in its place. It is readable on the same kind of device, by kernels
that read the same packings; others refuse it. Layers that draft (MTP) are part of it, if need be in a format of their
own; n-grams need nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from inferplane.cli.arguments import Parser, add_binding, add_examples, add_json, add_model, add_option, binding_options
from inferplane.cli.screen import Screen
from inferplane.units import format_bytes


def add_arguments(parser: Parser) -> None:
    """Options of `export`."""
    parser.usage = f"{parser.prog} [MODEL] --out FOLDER [options]"
    add_model(parser)
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a new folder")
    add_json(parser)
    group = add_binding(parser)
    add_option(group, "index")
    add_option(group, "lock")
    drafts = "as --quantization, for prediction layers (MTP); left out: the same"
    add_option(group, "speculative_quantization", help=drafts)
    parser.set_defaults(speculative_model=None)
    words = "devices that will share the model (1)"
    parser.add_argument("--tensor-parallel-size", metavar="N", type=int, default=1, help=words)
    add_examples(
        parser,
        "model --device {X} --quantization a8w8 --out made",
        "model --device {X} --tensor-parallel-size 8 --out made",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Export, and print the folder."""
    from inferplane.cli.model_loading import locate_models
    from inferplane.engine.request.arguments import as_integer
    from inferplane.engine.runner.exports.export import export_model
    from inferplane.engine.runner.model_files import ModelFiles
    from inferplane.engine.speculate import SpeculativeConfig, with_draft
    from inferplane.plugins import host

    ranks = as_integer("tensor_parallel_size", args.tensor_parallel_size, 1)
    options = replace(binding_options(args, lock=args.lock), ranks=ranks)
    if args.speculative_quantization is not None:
        options = with_draft(options, SpeculativeConfig("mtp", draft_quantization=args.speculative_quantization))
    folder = Path(args.out).expanduser()
    locate_models(args, screen)
    with screen.loading(f"exporting {args.model}") as loading:
        files = ModelFiles(args.model)
        made = export_model(files, host(), args.device, options, folder, index=args.index, progress=loading.bar)
    if args.json:
        names = ("device", "arch", "dtype", "quantization", "packings", "rank_bytes")
        facts = {name: getattr(made, name) for name in names}
        screen.facts({"schema": 1, "model": args.model, "folder": str(folder), **facts})
        return 0
    screen.stream(f"{folder}\n")
    share = f", each of {made.ranks} devices" if made.ranks > 1 else ""
    screen.print_remark(f"{format_bytes(max(made.rank_bytes))} of weights for {made.device} ({made.arch}){share}")
    return 0
