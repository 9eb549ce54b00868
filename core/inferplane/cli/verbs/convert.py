"""Write a GGUF model as a folder in the Hugging Face layout: config, safetensors, tokenizer, chat template.

Packed weights are expanded: to float32, which holds every value of every packed type, or to --dtype.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from inferplane.cli.arguments import Parser, add_examples
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError


def add_arguments(parser: Parser) -> None:
    """Options of `convert`."""
    parser.usage = f"{parser.prog} FILE FOLDER [options]"
    parser.add_argument("file", metavar="FILE", help="a GGUF file, or the first of its shards")
    parser.add_argument("folder", metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; else as the file has them, and float32 where they are packed",
    )
    add_examples(parser, "model-Q4_K_M.gguf model", "model-Q8_0.gguf model --dtype bfloat16")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Convert, and print the folder."""
    file, folder = Path(args.file).expanduser(), Path(args.folder).expanduser()
    if not file.is_file():
        raise UsageError(f"{args.file!r} is no file.", remedy="name a GGUF file")
    with screen.loading(f"converting {file.name}") as loading:
        import torch

        from inferplane.models.convert import convert

        convert(file, folder, getattr(torch, args.dtype) if args.dtype else None, loading.bar)
    screen.stream(f"{folder}\n")
    return 0
