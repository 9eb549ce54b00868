"""Measure a model's perplexity on texts, and how far it is from another model.

--against names the reference, such as the model that a copy was quantized from. It runs on the same device, without
--quantization and --kv-cache-dtype. Then the ratio of perplexities, the Kullback-Leibler divergence and the share of
equal first choices are printed with 95 % intervals. A prompt attends to the entries of the cache, so a quantized cache
counts.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.cli.arguments import BINDING, Parser, add_binding, add_examples, add_json, add_model, pins
from inferplane.cli.model_loading import fetching
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError
from inferplane.hub import find, locate, parse_name

if TYPE_CHECKING:
    from inferplane.audit import Evaluation
    from inferplane.engine import LLM

SCHEMA = 1
WINDOW_TOKENS = 512
OF_THE_MODEL = ("quantization", "kv_cache_dtype")
"""Options that the reference does not get."""


def add_arguments(parser: Parser) -> None:
    """Options of `eval`."""
    parser.usage = f"{parser.prog} [MODEL] --data PATH ... [options]"
    add_model(parser)
    words = "files of text or JSON lines, and folders of them"
    parser.add_argument("--data", metavar="PATH", nargs="+", required=True, help=words)
    parser.add_argument("--against", metavar="MODEL2", help="a reference with the same tokenizer")
    parser.add_argument("--windows", metavar="N", type=int, help="most windows of text; left out: all")
    words = f"tokens of a window (default {WINDOW_TOKENS})"
    parser.add_argument("--window-tokens", metavar="N", type=int, default=WINDOW_TOKENS, help=words)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of which windows are drawn, and of intervals")
    parser.add_argument("--html", metavar="FILE", help="write tables and plots to this page")
    add_json(parser)
    add_binding(parser)
    add_examples(
        parser,
        "model-int4 --against org/model --data texts",
        "org/m --kv-cache-dtype int8 --against org/m --data texts",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Load, run over all windows, print."""
    from inferplane.audit import evaluate, score_windows
    from inferplane.audit.page import write_page
    from inferplane.calibrate import draw_windows, read_texts, slice_windows
    from inferplane.engine.request.arguments import as_integer
    from inferplane.files import check_writable, write_atomically

    tokens = as_integer("window_tokens", args.window_tokens, 16)
    most = None if args.windows is None else as_integer("windows", args.windows, 1)
    page = None if args.html is None else Path(args.html).expanduser()
    if page is not None:
        check_writable(page)
    texts = read_texts(args.data)
    options = {name: getattr(args, name) for name in ("device", *BINDING, "strict")}
    options = {**options, "ops": pins(args.ops), "max_num_seqs": 1, "max_model_len": tokens}
    with ExitStack() as opened:
        model = opened.enter_context(_load(args.model, options, screen))
        reference = None
        if args.against is not None:
            others = {name: value for name, value in options.items() if name not in OF_THE_MODEL}
            reference = opened.enter_context(_load(args.against, others, screen))
            if reference.engine.vocab != model.engine.vocab:
                raise UsageError(
                    f"{args.model} has a vocabulary of {model.engine.vocab} tokens, {args.against} one of "
                    f"{reference.engine.vocab}.",
                    remedy="hold it against a model with the same tokenizer",
                )
        windows = slice_windows(texts, model.tokenizer.encode, tokens)
        if most is not None:
            windows = draw_windows(windows, most, args.seed)
        with screen.progress_counter("evaluating", len(windows)) as count:
            found = evaluate(score_windows(model, windows, reference, count), args.seed)
    settings = [(name.replace("_", " "), str(value)) for name, value in options.items() if value]
    if page is not None:
        write_atomically(page, write_page(found, args.model, args.against, settings))
    if args.json:
        screen.facts({"schema": SCHEMA, "model": args.model, "against": args.against, **found.data()})
        return 0
    for line in _list_lines(found):
        screen.show(line)
    return 0


def _load(model: str, options: dict[str, Any], screen: Screen) -> LLM:
    """Load a model, downloading it first if it is a name that is not in the cache."""
    from inferplane.engine import LLM

    name = None if Path(model).expanduser().exists() else parse_name(model)
    if name is not None and find(name) is None:
        with fetching(name, screen) as progress:
            locate(name, progress=progress)
    with screen.loading(f"loading {model}") as loading:
        return LLM(model, **options, progress=loading.bar)


def _list_lines(found: Evaluation) -> list[str]:
    """What is printed."""
    lines = [f"{found.windows:,} windows, {found.tokens:,} predicted tokens"]
    names = {
        "perplexity": "perplexity",
        "reference_perplexity": "perplexity of the reference",
        "ratio": "ratio of perplexities",
        "divergence": "divergence, nats a token",
        "agreement": "same first choice",
    }
    for name, words in names.items():
        if (figure := getattr(found, name)) is not None:
            lines.append(f"{words:28} {figure.value:.5g}   95 %: {figure.low:.5g} to {figure.high:.5g}")
    return lines
