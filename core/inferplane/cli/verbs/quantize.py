"""Write a quantized copy of a model, with all its files, to a new folder.

Weights are rounded to nearest while they are read, one at a time. Those that are quantized already (FP8, GPTQ, AWQ,
GGUF and others) are expanded in float32 first, or taken as they are where they have the format. The copy has the form
of compressed-tensors, or DeepSeek's own where all is FP8 in blocks of 128 x 128. The folder appears when complete.

With --data the model is calibrated on texts, layer by layer: each layer reads what the quantized layers before it
return. --method says how, as names with commas: one that rounds weights (nearest, clip, gptq, quantease), and before it
one that rescales channels without changing results (smoothquant, pss, awq), one that shifts them where norms have
biases (shift), and one that rotates the residual stream (rotate); or those that a plugin brings. --kv-cache finds
static scales of a KV cache in int8 or fp8 on the same texts, one a layer for K and one for V; without --quantization
weights stay as they are. Unfinished work is beside the new folder, as FOLDER.calibration: the same command goes on with
it.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.cli.arguments import Parser, add_examples, add_json, add_model, add_option
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.units import format_bytes

if TYPE_CHECKING:
    from inferplane.calibrate import CalibratedTensors, CalibrationSettings
    from inferplane.engine import ModelFiles
    from inferplane.models.writing.model_to_quantize import ModelToQuantize
    from inferplane.models.writing.quantize import QuantizedCopy

SCHEMA = 1
WINDOWS, WINDOW_TOKENS = 128, 512
ROTATED_TOKENS = 64
"""Tokens on which a rotated layer is compared with the layer as it is."""


def add_arguments(parser: Parser) -> None:
    """Options of `quantize`."""
    parser.usage = f"{parser.prog} [MODEL] --quantization Q --out FOLDER"
    add_model(parser)
    add_option(parser, "quantization")
    parser.add_argument("--out", metavar="FOLDER", help="a new folder", required=True)
    words = "texts to calibrate on: files of text or JSON lines, and folders of them"
    parser.add_argument("--data", metavar="PATH", nargs="+", help=words)
    words = "with --data: clip, gptq, quantease, smoothquant, pss, awq, shift, rotate, or several as pss,gptq"
    parser.add_argument("--method", metavar="NAMES", help=words)
    words = "with --data: static scales of a KV cache in int8 or fp8, with --quantization or alone"
    parser.add_argument("--kv-cache", metavar="D", help=words)
    words = "columns of int4 weights that share a scale: 32, 64 or 128 (default 32)"
    parser.add_argument("--group-size", metavar="N", type=int, help=words)
    words = f"most windows of text (default {WINDOWS})"
    parser.add_argument("--windows", metavar="N", type=int, default=WINDOWS, help=words)
    words = f"tokens of a window (default {WINDOW_TOKENS})"
    parser.add_argument("--window-tokens", metavar="N", type=int, default=WINDOW_TOKENS, help=words)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of which windows are drawn, and of methods")
    add_json(parser)
    add_examples(
        parser,
        "--quantization weight_only_int4 --out demo-int4",
        "org/model --quantization a8w8 --data texts --out m",
        "org/model --kv-cache int8 --data texts --out m",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Quantize, and print the folder."""
    from inferplane import __version__
    from inferplane.engine import ModelFiles
    from inferplane.models.writing.model_to_quantize import ModelToQuantize
    from inferplane.models.writing.quantize import quantize_checkpoint
    from inferplane.plugins import host

    if args.quantization is None and args.kv_cache is None:
        raise UsageError("quantize lacks --quantization.", remedy="name a scheme, such as weight_only_int4")
    _check_cache(args)
    if args.method is not None and args.data is None:
        raise UsageError("--method needs texts to calibrate on.", remedy="pass --data with files or folders of text")
    folder = Path(args.out).expanduser()
    files = ModelFiles(args.model)
    settings = None if args.data is None else _read_settings(args, files)
    with screen.loading(f"quantizing {files.name}") as loading:
        source = files.source()
        origin = ModelToQuantize(
            files.name, files.config_of_tensors(), source, files.folder, files.weight_files(), host().models()
        )
        calibration = None if settings is None else _Calibration(settings, args.quantization, folder, loading.phase)
        if calibration is not None:
            screen.note(calibration.describe())
        try:
            run = None
            if calibration is not None:
                origin, run = calibration.prepare(origin), calibration.run
            found = quantize_checkpoint(
                origin, args.quantization, folder, __version__, loading.bar, run, args.group_size, args.kv_cache
            )
        finally:
            source.close()
        if calibration is not None:
            shutil.rmtree(calibration.folder, ignore_errors=True)
    if args.json:
        weights = dict(sorted(found.weights.items()))
        cache = {} if args.kv_cache is None else {"kv_cache": args.kv_cache}
        facts = {"schema": SCHEMA, "folder": str(folder), "tensor_bytes": found.nbytes, "weights": weights}
        screen.facts({**facts, **cache})
        return 0
    listed = [f"{count} weights in {format}" for format, count in sorted(found.weights.items())]
    listed += [f"static scales of a KV cache in {args.kv_cache}"] if args.kv_cache is not None else []
    screen.note(f"{', '.join(listed)}; {format_bytes(found.nbytes)} in all")
    screen.stream(f"{folder}\n")
    return 0


def _check_cache(args: argparse.Namespace) -> None:
    """Raise UsageError for options of weights without a scheme, and for static scales without texts."""
    if args.kv_cache is not None and args.data is None:
        raise UsageError("--kv-cache needs texts to calibrate on.", remedy="pass --data with files or folders of text")
    for name in ("method", "group_size") if args.quantization is None else ():
        if getattr(args, name) is not None:
            what = f"--{name.replace('_', '-')} is for weights, and there is no scheme for them."
            raise UsageError(what, remedy="name one with --quantization, or leave it out")


def _read_settings(args: argparse.Namespace, files: ModelFiles) -> CalibrationSettings:
    """Methods and windows of texts.

    Raises:
        UsageError: an option has no such value, or the texts are too short.
    """
    from inferplane.calibrate import (
        CalibrationSettings,
        draw_windows,
        load_methods,
        make_recipe,
        read_texts,
        slice_windows,
    )
    from inferplane.engine.request.arguments import as_integer
    from inferplane.engine.request.text import Tokenizer
    from inferplane.plugins import host

    names = [name.strip() for name in (args.method or "gptq").split(",")] if args.quantization is not None else []
    recipe = make_recipe(names, load_methods(host().calibration()))
    count, tokens = as_integer("windows", args.windows, 1), as_integer("window_tokens", args.window_tokens, 16)
    texts = read_texts(args.data)
    found = draw_windows(slice_windows(texts, Tokenizer(files.folder).encode, tokens), count, args.seed)
    windows = [window.ids for window in found]
    names_of_texts, has_weights = [Path(text.name).name for text in texts], args.quantization is not None
    return CalibrationSettings(recipe, windows, names_of_texts, args.seed, has_weights)


class _Calibration:
    """A calibration whose unfinished work is beside the new folder.

    Args:
        settings: methods and windows.
        scheme: the quantization scheme.
        out: the new folder.
        say: shows what is done.
    """

    def __init__(self, settings: CalibrationSettings, scheme: str, out: Path, say: Callable[[str], None]) -> None:
        self.settings, self.scheme, self.say = settings, scheme, say
        self.folder = out.with_name(out.name + ".calibration")

    def describe(self) -> str:
        """What is done, and where unfinished work is."""
        count, names = len(self.settings.windows), ", ".join(self.settings.recipe.names) or "the KV cache"
        begun = "goes on with" if self.folder.exists() else "unfinished work is in"
        return f"calibrating ({names}) on {count} windows; {begun} {self.folder}"

    def prepare(self, origin: ModelToQuantize) -> ModelToQuantize:
        """The model that is quantized: the given one, or the same with a rotated residual stream."""
        from inferplane.calibrate import rotate, rotates_inner

        rotation = self.settings.recipe.rotation
        if rotation is None:
            return origin
        self.say("rotating")
        ids = self.settings.windows[0][:ROTATED_TOKENS]
        inner = rotates_inner(self.scheme)
        return rotate(origin, ids, self.settings.seed, origin.plugins, rotation.run, inner=inner)  # type: ignore[arg-type]

    def run(self, copy: QuantizedCopy) -> CalibratedTensors:
        """Calibrate a copy."""
        from inferplane.calibrate import calibrate
        from inferplane.plugins import host

        def progress(done: int, total: int) -> None:
            self.say(f"calibrating: {done} of {total} layers")

        return calibrate(copy, self.settings, self.folder, host().models(), progress)
