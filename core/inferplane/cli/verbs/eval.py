"""Measure a model's perplexity on texts, and how far it is from another model.

--against names the reference, such as the model that a copy was quantized from. It runs on the same device, without
--quantization, --kv-cache-dtype and --index-key-dtype. Then the ratio of perplexities, the Kullback-Leibler
divergence and the share of equal first choices are printed with 95 % intervals. A prompt attends to the entries of
the cache, so a quantized cache counts.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from inferplane.cli.arguments import BINDING, Parser, add_binding, add_examples, add_json, add_model, pins
from inferplane.cli.model_loading import load_model
from inferplane.cli.screen import Screen
from inferplane.cli.text_windows import TextWindows, add_texts
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.audit import Evaluation

SCHEMA = 1
OF_THE_MODEL = ("quantization", "kv_cache_dtype", "index_key_dtype")
"""Options that the reference does not get."""


def add_arguments(parser: Parser) -> None:
    """Options of `eval`."""
    parser.usage = f"{parser.prog} [MODEL] --data PATH ... [options]"
    add_model(parser)
    parser.add_argument("--against", metavar="MODEL2", help="a reference with the same tokenizer")
    add_texts(parser, windows=None, seed="of which windows are drawn, and of intervals")
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

    texts = TextWindows.of(args)
    options = {name: getattr(args, name) for name in ("device", *BINDING, "strict")}
    options = {**options, "ops": pins(args.ops), "max_num_seqs": 1, "max_model_len": texts.tokens}
    with ExitStack() as opened:
        model = opened.enter_context(load_model(args.model, options, screen))
        reference = None
        if args.against is not None:
            others = {name: value for name, value in options.items() if name not in OF_THE_MODEL}
            reference = opened.enter_context(load_model(args.against, others, screen))
            if reference.engine.vocab != model.engine.vocab:
                raise UsageError(
                    f"{args.model} has a vocabulary of {model.engine.vocab} tokens, {args.against} one of "
                    f"{reference.engine.vocab}.",
                    remedy="hold it against a model with the same tokenizer",
                )
        windows = texts.draw(model.tokenizer)
        with screen.progress_counter("evaluating", len(windows)) as count:
            found = evaluate(score_windows(model, windows, reference, count), args.seed)
    settings = [(name.replace("_", " "), str(value)) for name, value in options.items() if value]
    if texts.page is not None:
        texts.write_page(write_page(found, args.model, args.against, settings))
    if args.json:
        screen.facts({"schema": SCHEMA, "model": args.model, "against": args.against, **found.data()})
        return 0
    for line in _list_lines(found):
        screen.show(line)
    return 0


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
