"""Continue a prompt: the text goes to standard output as it is generated, timings to standard error.

The prompt is the value of -p, or standard input without its last line end. A terminal shows it dimmed before the text;
a pipe gets only the generated text, ending in a line end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.cli.arguments import PROGRAM, Parser, add_examples, add_generating, add_json, add_model, as_text
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.engine import LLM, SamplingParams

SCHEMA = 1
MAX_TOKENS = 128


def add_arguments(parser: Parser) -> None:
    """Options of `generate`."""
    parser.usage = f"{parser.prog} [MODEL] [-p TEXT] [options]"
    add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue; left out: standard input")
    add_json(parser)
    add_generating(parser, max_tokens=MAX_TOKENS)
    add_examples(
        parser,
        "-p 'def main():' --max-tokens 64",
        "path/to/model --device {X} --temperature 0.7 < prompt.txt",
        "-p 'import ' --json",
        "-p 'import ' --speculative-method mtp",
    )


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Load, generate, report."""
    prompt = read_prompt(args)
    from inferplane.cli.model_loading import open_model

    llm, params = open_model(args, screen)
    with llm:
        return _generate(llm, prompt, params, args, screen)


def read_prompt(args: argparse.Namespace) -> str:
    """Read the prompt from -p or standard input.

    Raises:
        UsageError: there is no prompt, or it is no text.
    """
    prompt: str | None = args.prompt
    if prompt is None:
        likely = "TEXT" if args.model == "demo" or Path(args.model).exists() else repr(args.model)
        remedy = f"{PROGRAM} generate -p {likely}, or pipe one in"
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("There is no prompt.", remedy=remedy)
        prompt = sys.stdin.read().removesuffix("\n")
        if not prompt:
            raise UsageError("There is no prompt: standard input is empty.", remedy=remedy)
    if not prompt:
        raise UsageError("The prompt is empty.", remedy="pass at least one character")
    return as_text(prompt)


def _generate(llm: LLM, prompt: str, params: SamplingParams, args: argparse.Namespace, screen: Screen) -> int:
    from inferplane.cli.model_loading import summary_line, timings_data
    from inferplane.cli.sampling_defaults import limit_max_tokens, sampling_data

    ids = llm.tokenizer.encode(prompt)
    params = limit_max_tokens(params, args.max_tokens, len(ids), llm.runner.max_model_len)
    terminal, pieces, tokens = sys.stdout.isatty(), [], []
    reason, timings = None, None
    if terminal and not args.json:
        screen.stream(prompt, style="dim")
    try:
        for delta in llm.stream(ids, params):
            tokens += delta.token_ids
            pieces.append(delta.text)
            reason, timings = delta.finish_reason, delta.timings
            if not args.json:
                screen.stream(delta.text)
    except KeyboardInterrupt:
        if terminal:
            screen.stream("\n")
        raise
    assert timings is not None, "a stream ends with its timings"
    text = "".join(pieces)
    if args.json:
        screen.facts(
            {
                "schema": SCHEMA,
                "model": llm.files.name,
                "device": llm.device,
                "prompt": prompt,
                "text": text,
                "token_ids": tokens,
                "finish_reason": reason,
                "timings": timings_data(timings),
                "sampling": sampling_data(params),
            }
        )
        return 0
    if not text.endswith("\n"):
        screen.stream("\n")
    drawn = params.seed if args.seed is None else None
    screen.print_remark(summary_line(timings, llm.device, reason, drawn))
    return 0
