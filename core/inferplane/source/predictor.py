"""Continue prompts of a file, or one prompt, and write the results as lines of JSON.

Takes the flags of the source system's predictor.py. Under a launcher the processes share the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.cli.screen import Screen
from inferplane.errors import CapacityError, UsageError
from inferplane.files import check_writable, write_atomically
from inferplane.source.flags import (
    PREDICTOR_FLAGS,
    engine_options,
    explain_needless,
    model_of,
    parse,
    speculation,
)

if TYPE_CHECKING:
    from inferplane.engine import LLM, SamplingParams

PROMPT = "你好，请介绍一下你自己。"
"""What is continued without a file of prompts."""


def run(words: Sequence[str], screen: Screen) -> int:
    """Load, generate, write: the whole file, or none."""
    from inferplane.engine.runner.ranks import launcher_ranks

    args = parse("predictor", PREDICTOR_FLAGS, words, str(__doc__))
    model = model_of(args)
    examples, output = read_examples(args), Path(args.output_file).expanduser()
    if note := explain_needless(PREDICTOR_FLAGS, args.given):
        screen.note(note)
    options = {**engine_options(args, model), "max_num_seqs": args.batch_size}
    config = speculation(args, model)
    if launcher_ranks()[0] == 0:  # other ranks write nothing
        check_writable(output)
    with _open(model.repository, {**options, "speculative_config": config}, screen) as llm:
        params, lines = _params(args), []
        requests = [_request(llm, source, target, params, args.src_length) for source, target in examples]
        for first in range(0, len(examples), args.batch_size):
            chosen = slice(first, first + args.batch_size)
            prompts, each = zip(*requests[chosen])
            for (source, target), result in zip(examples[chosen], llm.generate(list(prompts), list(each))):
                for title, what in (("Source", source), ("Target", target), ("Output", result.text)):
                    screen.stream(f"***********{title}**********\n{what}\n")
                lines.append(json.dumps({"src": source, "tgt": target, "output": result.text}, ensure_ascii=False))
        write_atomically(output, "".join(f"{line}\n" for line in lines))
    return 0


def read_examples(args: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Prompts with their references: of the file, or the same prompt once for each sequence of a batch.

    Raises:
        UsageError: the file cannot be read, or a line is no prompt.
    """
    if args.data_file is None:
        return [(PROMPT, "")] * args.batch_size
    found = []
    try:
        lines = Path(args.data_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{args.data_file} cannot be read: {error}.", remedy="correct --data_file") from error
    for number, line in enumerate(lines, 1):
        try:
            example = json.loads(line)
            source, target = example["src"], example.get("tgt", "")
        except (ValueError, KeyError, TypeError, AttributeError):
            source = target = None
        texts = [source] if isinstance(source, str) else source
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            what = f"{args.data_file}, line {number} is no prompt."
            raise UsageError(what, there_is='lines as {"src": ..., "tgt": ...}')
        found.append((source, target))
    if not found:
        raise UsageError(f"{args.data_file} has no prompts.", remedy='write lines as {"src": ..., "tgt": ...}')
    return found


def _open(model: str, options: dict[str, Any], screen: Screen) -> LLM:
    """The model; with as many positions as it has, if fewer than the flags say."""
    with screen.loading(f"loading {model}") as loading:
        from inferplane.engine import LLM, ModelFiles

        files = ModelFiles(model, configs=True)
        positions = files.config.get("max_position_embeddings")
        if positions and options.get("max_model_len", 0) > positions:
            screen.note(f"--total_max_length {options['max_model_len']}: {model} has {positions} positions")
            options = {**options, "max_model_len": positions}
        return LLM(model, **options, progress=loading.bar)


def _params(args: argparse.Namespace) -> SamplingParams:
    from inferplane.engine import SamplingParams

    greedy = args.decode_strategy == "greedy_search"
    chosen = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    return SamplingParams(
        max_tokens=args.max_length,
        min_tokens=args.min_length if "min_length" in args.given else 0,
        repetition_penalty=args.repetition_penalty,
        **({"temperature": 0.0} if greedy else chosen),
    )


def _request(
    llm: LLM, source: Any, target: Any, params: SamplingParams, longest: int | None
) -> tuple[list[int], SamplingParams]:
    """A prompt's token ids, with as many new tokens as the flags say, or as a sequence may still have."""
    ids = _encode(llm, source, target)
    if longest is not None and len(ids) > longest:
        what = f"A prompt has {len(ids)} tokens."
        raise CapacityError(what, there_is=f"--src_length {longest}", remedy="raise it, or cut the prompt")
    left = max(1, llm.runner.max_model_len - len(ids))
    return ids, replace(params, max_tokens=min(params.max_tokens or left, left))


def _encode(llm: LLM, source: Any, target: Any) -> list[int]:
    """The token ids of a prompt: by the chat template if the model has one; a list is a conversation."""
    texts = [source] if isinstance(source, str) else source
    if getattr(llm.tokenizer.fast, "chat_template", None) is None:
        return llm.tokenizer.encode(texts[0])
    answers = target if isinstance(target, list) else []
    messages = []
    for number, text in enumerate(texts):
        messages.append({"role": "user", "content": text})
        if number < len(texts) - 1:
            messages.append({"role": "assistant", "content": answers[number] if number < len(answers) else ""})
    return llm.tokenizer.chat(messages)
