"""Measure the fastest of the kernels for each part of a model on this machine, and write a lock file.

Every kernel is first compared with the op's oracle at the model's own sizes with random weights; a wrong one is
excluded. The others are timed alternately, captured where the device captures steps. The kernel of the highest rank
stays unless another one is faster beyond noise. The file has each choice and its figures; `--lock FILE` applies it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.cli.arguments import Parser, add_binding, add_examples, add_json, add_model, add_option, binding_options
from inferplane.cli.screen import Screen
from inferplane.errors import UsageError

if TYPE_CHECKING:
    from inferplane.binding import Tuned


def add_arguments(parser: Parser) -> None:
    """Options of `tune`."""
    parser.usage = f"{parser.prog} [MODEL] --out FILE [options]"
    add_model(parser, config=True)
    parser.add_argument("--out", metavar="FILE", required=True, help="the lock file to write")
    add_json(parser)
    add_option(add_binding(parser), "index")
    add_examples(parser, "--device {X} --out lock.json", "path/to/config.json --device {X} --out lock.json")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Measure, report, write."""
    from inferplane.cli.verbs.explain import model_files
    from inferplane.engine.runner.tuning import outcome_data, tune_model, write_tuning_lock
    from inferplane.plugins import host

    path = Path(args.out)
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"--out {path} cannot be written.", remedy="name a file in a folder that exists")
    options = binding_options(args)
    on_outcome = (lambda outcome: None) if args.json else (lambda outcome: screen.print_remark(outcome_line(outcome)))
    runner, outcomes = tune_model(model_files(args.model), host(), args.device, options, on_outcome, index=args.index)
    if not outcomes:
        raise UsageError(
            f"Nothing to tune: no op of this model has several kernels on {runner.backend.name!r}.",
            remedy="see `inferplane explain --verbose` for the kernels there are",
        )
    write_tuning_lock(path, runner, outcomes)
    if args.json:
        screen.facts({"schema": 1, "lock": str(path), "sites": {o.key: outcome_data(o) for o in outcomes}})
    else:
        changed = sum(o.chosen != o.before for o in outcomes)
        screen.print_remark(
            f"{path}: {len(outcomes)} choices, {changed} other than by rank; take it with --lock {path}"
        )
    return 0


def outcome_line(outcome: Tuned) -> str:
    """One line with the site, its kernel, and every kernel's time or the word "wrong"."""
    times = [
        f"{t.kernel} {'wrong' if t.wrong else f'{t.score * 1e6:.1f} us'}"
        for t in sorted(outcome.timings, key=lambda t: float("inf") if t.wrong else t.score)
    ]
    verdict = "stays" if outcome.chosen == outcome.before else "instead of " + outcome.before
    kind = outcome.key.split("|")[1]
    return f"{outcome.site or 'model'} ({kind}): {outcome.chosen} {verdict}; {', '.join(times)}"
