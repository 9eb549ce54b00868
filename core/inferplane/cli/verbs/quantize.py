"""Write a quantized copy of a model, with all its files, to a new folder.

Weights are rounded to nearest while they are read, one at a time. Those that are quantized already (FP8, GPTQ, AWQ,
GGUF and others) are expanded in float32 first, or taken as they are where they have the format. The copy has the form
of compressed-tensors, or DeepSeek's own where all is FP8 in blocks of 128 x 128. The folder appears when complete.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from inferplane.cli.arguments import Parser, add_examples, add_json, add_model, add_option
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.units import format_bytes

SCHEMA = 1


def add_arguments(parser: Parser) -> None:
    """Options of `quantize`."""
    parser.usage = f"{parser.prog} [MODEL] --quantization Q --out FOLDER"
    add_model(parser)
    add_option(parser, "quantization")
    parser.add_argument("--out", metavar="FOLDER", help="a new folder", required=True)
    add_json(parser)
    add_examples(
        parser,
        "--quantization weight_only_int4 --out demo-int4",
        "org/model --quantization a8w8 --out model-a8w8",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Quantize, and print the folder."""
    from inferplane import __version__
    from inferplane.engine import ModelFiles
    from inferplane.models.writing.quantize import ModelToQuantize, quantize_checkpoint
    from inferplane.plugins import host

    if args.quantization is None:
        raise UsageError("quantize lacks --quantization.", remedy="name a scheme, such as weight_only_int4")
    folder = Path(args.out).expanduser()
    files = ModelFiles(args.model)
    with screen.loading(f"quantizing {files.name}") as loading:
        source = files.source()
        origin = ModelToQuantize(
            files.name, files.config_of_tensors(), source, files.folder, files.weight_files(), host().models()
        )
        try:
            found = quantize_checkpoint(origin, args.quantization, folder, __version__, loading.bar)
        finally:
            source.close()
    if args.json:
        weights = dict(sorted(found.weights.items()))
        screen.facts({"schema": SCHEMA, "folder": str(folder), "tensor_bytes": found.nbytes, "weights": weights})
        return 0
    listed = ", ".join(f"{count} weights in {format}" for format, count in sorted(found.weights.items()))
    screen.note(f"{listed}; {format_bytes(found.nbytes)} in all")
    screen.stream(f"{folder}\n")
    return 0
