"""Measure, wherever a model's plan could take several kernels, which one is the fastest here, and write a lock file.

Every kernel is first held against the op's oracle with the model's own sizes and random weights; one that is wrong is
out. Those left are timed in turn, recorded where the device records steps. The kernel that ranks choose stays unless
another one is faster beyond noise. The file holds each choice and what led to it; `--lock FILE` takes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from inferplane.cli.arguments import Parser, add_binding, add_examples, add_index, add_json, add_model, binding_options
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
    add_index(add_binding(parser))
    add_examples(parser, "--device {X} --out lock.json", "path/to/config.json --device {X} --out lock.json")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Measure, tell, write."""
    from inferplane.cli.verbs.explain import model_files
    from inferplane.engine.tuning import facts, lock, tuned
    from inferplane.plugins import host

    path = Path(args.out)
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"--out {path} cannot be written.", remedy="name a file in a folder that exists")
    options = binding_options(args)
    told = (lambda outcome: None) if args.json else (lambda outcome: screen.print_remark(outcome_line(outcome)))
    runner, outcomes = tuned(model_files(args.model), host(), args.device, options, told, index=args.index)
    if not outcomes:
        raise UsageError(
            f"Nothing to tune: no op of this model has several kernels on {runner.backend.name!r}.",
            remedy="see `inferplane explain --verbose` for the kernels there are",
        )
    lock(path, runner, outcomes)
    if args.json:
        screen.facts({"schema": 1, "lock": str(path), "sites": {o.key: facts(o) for o in outcomes}})
    else:
        changed = sum(o.chosen != o.before for o in outcomes)
        screen.print_remark(
            f"{path}: {len(outcomes)} choices, {changed} other than by rank; take it with --lock {path}"
        )
    return 0


def outcome_line(outcome: Tuned) -> str:
    """One line: the site, what was chosen, and every kernel's time, or why it is out."""
    times = [
        f"{t.kernel} {'wrong' if t.wrong else f'{t.score * 1e6:.1f} us'}"
        for t in sorted(outcome.trials, key=lambda t: float("inf") if t.wrong else t.score)
    ]
    verdict = "stays" if outcome.chosen == outcome.before else "instead of " + outcome.before
    kind = outcome.key.split("|")[1]
    return f"{outcome.site or 'model'} ({kind}): {outcome.chosen} {verdict}; {', '.join(times)}"
