#!/usr/bin/env python3
"""Train, export and check the small demo model that ships with Inferplane.

The model has DeepSeek-V3's architecture (multi-head latent attention with V3's own head sizes, a mixture of
experts with sigmoid scores and a correction bias, one multi-token-prediction layer) at a size that fits in
16 MB, and is exported in DeepSeek-V3's own checkpoint format: float8 e4m3 weights with one float32 scale for
each 128 x 128 block.  It is trained on the standard library of the Python that runs this tool, on a CPU.

    python tools/demo/train_demo.py selftest                 # our model against transformers' DeepseekV3ForCausalLM
    python tools/demo/train_demo.py data                     # what would be trained on
    python tools/demo/train_demo.py train --minutes 75       # train (resumable), then export into the work folder
    python tools/demo/train_demo.py export --out FOLDER      # export the work folder's finished run
    python tools/demo/train_demo.py eval                     # recompute the held-out loss from the shipped folder

A budget in minutes makes the schedule, and so the weights, depend on the machine's speed; `--steps` does not.  The
shipped model's options are in its training.json; `--compile` and OMP_WAIT_POLICY=passive pay on a shared machine.

Sources: DeepSeek-V3 technical report (arXiv:2412.19437) for the architecture, the bias update of section 2.1.2
and the MTP module of section 2.2; the published checkpoints for tensor names and the FP8 block format; Muon as
described by Keller Jordan (https://kellerjordan.github.io/posts/muon/).

Shapes in the docstrings: B sequences, T positions, N = B * T rows, D hidden size, E experts, V vocabulary.
Losses are in nats for each predicted token unless said otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from demo_check import check_folder
from demo_data import Dataset, data_hash
from demo_export import DEFAULT_OUT, export
from demo_model import Config, UsageError
from demo_selftest import selftest
from train_loop import Options, train

DEFAULT_WORK = Path(tempfile.gettempdir()) / "demo-train"


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; 0 done, 1 failed with one line of why, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)

    command("selftest", "check the model against transformers at a tiny size")
    command("data", "show what would be trained on")
    fit = command("train", "train within a budget, then export")
    fit.add_argument("--minutes", type=float, default=10.0, help="wall-clock budget; the learning rate follows it")
    fit.add_argument("--steps", type=int, help="a budget in steps instead: repeatable whatever the machine's speed")
    fit.add_argument("--resume", action="store_true", help="go on from the work folder's last checkpoint")
    fit.add_argument("--no-export", action="store_true", help="train only")
    for field, text in {
        "tokens_per_step": "progress:tokens pairs, tokens in one optimizer step by progress (0 to 1)",
        "micro_rows": "tokens in one forward and backward pass",
        "context": "progress:length pairs, training windows by progress (0 to 1)",
        "muon_lr": "peak learning rate of the hidden matrices (Muon)",
        "adam_lr": "peak learning rate of norms and router gates (AdamW)",
        "embed_lr": "peak learning rate of the embedding (AdamW)",
        "weight_decay": "decoupled decay of the hidden matrices, times the learning rate",
        "warmup": "part of the budget in which the learning rate rises",
        "cooldown": "part of the budget in which it falls to zero",
        "mtp_weight": "weight of the multi-token-prediction loss",
        "bias_speed": "step of the experts' correction bias",
        "fp8_from": "progress from which the forward pass uses FP8-rounded weights",
        "seed": "seed of weights and data order",
        "threads": "torch threads",
        "checkpoint_minutes": "minutes between checkpoints",
        "eval_minutes": "minutes between held-out measurements",
    }.items():
        default = getattr(Options, field)
        fit.add_argument("--" + field.replace("_", "-"), type=type(default), default=default, help=text)
    fit.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    ship = command("export", "export the finished run of the work folder")
    check = command("eval", "recompute the held-out loss of an exported folder")
    check.add_argument("--model", type=Path, default=DEFAULT_OUT, help="the exported folder")
    check.add_argument("--transformers", action="store_true", help="measure with transformers' model class as well")
    for sub in (fit, ship):
        sub.add_argument("--work", type=Path, default=DEFAULT_WORK, help="checkpoints and logs")
        # Not the shipped folder by default: trying the tool must not replace the project's model.
        sub.add_argument("--out", type=Path, help="the exported folder; left out, WORK/demo")
    args = parser.parse_args(argv)
    try:
        if args.command == "selftest":
            selftest()
        elif args.command == "data":
            data = Dataset.build(Config().vocab_size)
            train_tokens, held_tokens = sum(map(len, data.train)), sum(map(len, data.held))
            print(f"{len(data.files)} files, sha256 {data_hash(data.files)}")
            print(f"training: {len(data.train)} files, {train_tokens} tokens")
            print(f"held out: {len(data.held)} files, {held_tokens} tokens, {data.held_bytes} bytes")
        elif args.command == "train":
            names = {f.name for f in dataclasses.fields(Options)}
            opt = Options(**{k: v for k, v in vars(args).items() if k in names})
            opt.check()
            train(Config(), opt, args.work, args.resume)
            if not args.no_export:
                export(args.work, args.out or args.work / "demo")
        elif args.command == "export":
            export(args.work, args.out or args.work / "demo")
        else:
            check_folder(args.model, args.transformers)
    except (UsageError, OSError) as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
